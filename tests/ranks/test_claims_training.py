"""The training experiments of ``benchmarks.claims``, in small."""

from __future__ import annotations

from dataclasses import replace

import pytest

import benchmarks.claims.experiments  # noqa: F401 (finds the folders of tests and examples)
from benchmarks.claims.experiments import ssfusion_training, taco_training, three_d_training
from benchmarks.claims.experiments.losses import percents

pytestmark = [pytest.mark.every, pytest.mark.xdist_group("ranks")]
TINY = taco_training.Setup(
    layers=1, width=64, sequences=1, steps=2, seeds=(0, 1), held_out=1, inner="eager"
)
VALUES = 128 * 64
"""The number of values of one sum."""


def test_taco_training_sends_codes_of_the_form_that_is_named():
    forms = {"off": None, "TACO": "taco", "naive fp8": "fp8(static=1.0)"}
    forms["TACO, block 32"] = "taco(block=32)"
    found = taco_training.trained(TINY, forms)["forms"]
    assert found["off"]["bytes"] == 4 * VALUES * 4
    # A two-shot sends all values, then this rank's half of them.
    assert found["naive fp8"]["bytes"] == 4 * 1.5 * VALUES
    # Both regions of scales of all three rows, of 64 bytes each, are padded to 128.
    assert found["TACO"]["bytes"] == 4 * (1.5 * VALUES + 3 * 2 * 128)
    assert found["TACO, block 32"]["bytes"] == 4 * 1.5 * VALUES * (1 + 8 / 32)
    assert [run["seed"] for run in found["TACO"]["runs"]] == [0, 1]
    off, taco = (found[name]["runs"] for name in ("off", "TACO"))
    assert off[0]["validation"] != off[1]["validation"]
    assert all(0 < abs(each) < 0.5 for each in percents(taco, off))


def test_taco_training_refuses_plans_that_are_not_what_was_asked_for(ranks2):
    with pytest.raises(Exception, match="none for"):
        ranks2.run(refused, timeout=120)


def refused() -> None:
    """Train without coding and request TACO."""
    taco_training.policy_of = lambda spec: "off"
    try:
        taco_training.train_form("taco", replace(TINY, seeds=(0,)))
    finally:
        taco_training.policy_of = POLICY_OF


POLICY_OF = taco_training.policy_of


def test_ssfusion_training_of_all_entries_is_dense_training():
    setup = ssfusion_training.Setup(
        layers=1, width=64, sequences=1, steps=6, seeds=(0,), densities=(1.0,), degrees=(0.5,),
        momentum=0.0, held_out=1, profile_steps=1,
    )  # fmt: skip
    ways = ssfusion_training.trained(setup)["ways"]
    dense = ways["dense"]["runs"]
    for name in ("fused, 1", "selective, 1", "each tensor, 1", "degree 0.5"):
        assert percents(ways[name]["runs"], dense) == pytest.approx([0.0], abs=0.01), name
        assert ways[name]["runs"][0]["missing"] == 0


def test_ssfusion_training_misses_tensors_where_they_are_fused():
    setup = ssfusion_training.Setup(
        layers=1, width=64, sequences=1, steps=6, seeds=(0,), densities=(0.001,),
        degrees=(0.0,), held_out=1, profile_steps=2,
    )  # fmt: skip
    ways = ssfusion_training.trained(setup)["ways"]
    missing = {name: way["runs"][0].get("missing") for name, way in ways.items()}
    assert missing["each tensor, 0.001"] == missing["degree 0"] == 0
    assert missing["selective, 0.001"] == 0
    assert missing["fused, 0.001"] > 0.2
    assert ways["selective, 0.001"]["runs"][0]["overhead_s"] > 0


def test_three_d_training_codes_the_dimensions_of_each_setting():
    setup = three_d_training.Setup(
        width=64, sequences=2, microbatches=2, steps=1, seeds=(0,), held_out=1
    )
    found = three_d_training.trained(setup, three_d_training.SETTINGS)["settings"]
    sent = {name: each["bytes"] for name, each in found.items()}
    assert sent["2D"]["tp"] == sent["off"]["tp"]
    assert sent["2D"]["dp"] < 0.5 * sent["off"]["dp"]
    assert sent["2D"]["pp"] < 0.3 * sent["off"]["pp"]
    # 8 bits a value, and two regions of scales for a row of 4,096 values, each padded to 128 bytes.
    bits = 8 + 2 * 128 * 8 / 4096
    assert sent["taco-3d"]["tp"] == pytest.approx(1.5 * bits / 32 * sent["off"]["tp"], rel=0.001)
    assert sent["taco-3d"]["dp"] == sent["2D"]["dp"]
    assert sum(sent["balanced-3d"].values()) <= sum(sent["taco-3d"].values())
    (off,), (coded,) = (found[name]["runs"] for name in ("off", "taco-3d"))
    assert coded["validation"] == pytest.approx(off["validation"], rel=0.02)
