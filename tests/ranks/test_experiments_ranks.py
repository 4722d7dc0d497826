"""Tiny versions of the experiments of the claims, on real ranks."""

from __future__ import annotations

import pytest

from benchmarks.claims.experiments import (
    equarx_forms,
    lowbit_perplexity,
    zipccl_bits,
    zipccl_late,
)
from benchmarks.claims.experiments.turns import PLAIN

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.every]


def test_forms_of_equarx_have_times_and_errors():
    found = equarx_forms.run(kib=(64,), repeats=2, links=(None,), inner="eager")
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == {PLAIN, *equarx_forms.FORMS}
    assert rows["semi-loop, AG only"]["mse"] < rows["full loop"]["mse"] < rows["naive fp8"]["mse"]
    assert all(0 < row["ms"][0] <= row["ms"][1] <= row["ms"][2] for row in rows.values())


def test_exchange_with_a_late_rank_is_timed_from_its_start():
    found = zipccl_late.run(tokens=8, late_ms=(0.0, 300.0), repeats=2, gbit=None, inner="eager")
    rows = found["rows"]
    assert len(rows) == 12
    late = [row for row in rows if row["late_ms"] == 300.0]
    assert all(row["ms"][1] < 300 for row in late if row["name"] == PLAIN)
    assert {row["even"] for row in rows} == {True, False}


def test_bits_on_the_wire_are_those_of_what_is_sent():
    found = zipccl_bits.run(steps=1, measured=(0,), inner="eager")
    rows = {row["of"]: row for row in found["rows"]}
    assert set(rows) == {*zipccl_bits.OF, "loss"}
    for of in zipccl_bits.OF:
        ours, paper = (rows[of][codec] for codec in zipccl_bits.CODECS)
        assert rows[of]["entropy"] < ours < paper < 12


@pytest.mark.parametrize("planted", [False, True])
def test_perplexity_is_that_of_coded_graphs(planted):
    some = lowbit_perplexity.cells((4,), (0.0, 1 / 64), (0,))
    found = lowbit_perplexity.run(2, planted, some, steps=2, calibrated=1, measured=1)
    assert len(found["rows"]) == len(some) == 5
    assert all(row["perplexity"] != found["perplexity"] for row in found["rows"])
    kept = lowbit_perplexity.wire_bits(found, "selected", 1 / 64, 4)
    assert kept == pytest.approx(4 + 12 / 64, abs=0.05)
