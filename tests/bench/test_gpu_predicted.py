"""Predictions for a card whose kernel times were not used, beside its measured times."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks.gpu.predicted import Row, rows
from commpass.costmodel.cards import CARDS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def test_rows_of_the_h100_are_those_of_the_file():
    written = read("gpu_predicted_h100.json")
    found = list(rows(read(written["file"])["timings"], CARDS[written["card"]].kernels))
    want = [
        Row(each["what"], each["predicted_us"], each["measured_us"]) for each in written["rows"]
    ]
    assert [each.what for each in found] == [each.what for each in want]
    for one, other in zip(found, want, strict=True):
        assert one.predicted_us == pytest.approx(other.predicted_us)
        assert one.measured_us == other.measured_us


def test_median_error_on_the_h100_is_as_documented():
    found = list(rows(read("gpu_nvidia_h100_80gb_hbm3.json")["timings"], CARDS["h100"].kernels))
    codecs = [each for each in found if each.what.endswith(("encode", "decode"))]
    assert len(codecs) == 28
    assert median(abs(each.error) for each in codecs) < 0.055
    assert max(abs(each.error) for each in codecs) < 0.215


def test_copy_of_a_card_is_predicted_by_hand():
    timings = [{"name": "256 MiB", "what": "copy", "us": 200.0}]
    (row,) = rows(timings, CARDS["h100"].kernels)
    # 2 * 256 MiB over 0.88 of 3,350 GB/s
    assert row.predicted_us == pytest.approx(536.870912e6 / (0.88 * 3350e9) * 1e6)
    assert row.error == pytest.approx(row.predicted_us / 200 - 1)
