"""``benchmarks.claims.formulas``: commpass is as near to each equation as rounding allows, and a
wrong formula is not near."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.claims.formulas import EQUATIONS, SUMS, equarx, lowbit, taco, zipccl
from benchmarks.claims.formulas.equation import relative

SLOW = "ZipCCL"
"""Its windows are counted in sixteen samples, operator by operator."""


@pytest.mark.parametrize(
    "paper", [pytest.param(p, marks=pytest.mark.every if p == SLOW else ()) for p in EQUATIONS]
)
def test_equations_are_those_of_commpass(paper):
    for equation in EQUATIONS[paper]:
        deviation = equation.deviation()
        assert deviation <= equation.bound, (equation.where, deviation)


def test_equations_of_taco_are_missed_with_another_largest_number(monkeypatch):
    monkeypatch.setattr(taco, "LARGEST", 240.0)
    missed = {e.where for e in taco.EQUATIONS if e.deviation() > e.bound}
    assert missed >= {"equation 9", "equation 10", "equation 11", "equation 13"}
    assert not missed & {"equation 6", "equation 7", "equation 8"}


def test_equations_of_low_bit_are_missed_with_another_gamma(monkeypatch):
    measured = lowbit.running(0)
    monkeypatch.setattr(lowbit, "GAMMA", 0.9)
    low, high = lowbit.moving(lowbit.sequences(0))
    assert relative(measured.low.numpy(), low) > 1e-3
    assert relative(measured.high.numpy(), high) > 1e-3


def test_window_of_a_gaussian_is_as_published():
    assert zipccl.best_u() == pytest.approx(0.0172, abs=5e-5)
    assert zipccl.best_start(1.0) == pytest.approx(-5.36, abs=5e-3)
    share = zipccl.covered(zipccl.best_start(1.0), 1.0)
    for step in (-0.1, 0.1):
        assert zipccl.covered(zipccl.best_start(1.0) + step, 1.0) < share


def test_values_of_e4m3_end_at_448_and_begin_at_2_to_minus_9():
    levels = taco.e4m3_values()
    assert (levels[0], levels[1], levels[-1]) == (0.0, 2.0**-9, 448.0)
    assert taco.to_fp8(np.array([-1000.0, 17.0, 19.0, 21.0])).tolist() == [-448.0, 16.0, 20.0, 20.0]


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_formulas_are_near_the_sum(name):
    made = np.random.default_rng(0)
    ranks = [made.standard_normal((16, 1024)) for _ in range(4)]
    got, exact = SUMS[name](ranks), sum(ranks)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert got.shape == exact.shape
    assert 1e-4 < error < 0.3


def test_ring_that_codes_one_stage_loses_less_than_both():
    made = np.random.default_rng(1)
    ranks = [made.standard_normal(4 * 4096) for _ in range(4)]
    error = {how: np.linalg.norm(equarx.ring(ranks, how) - sum(ranks)) for how in ("both", "ag")}
    assert error["ag"] < error["both"]
