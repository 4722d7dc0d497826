"""Test ``python -m benchmarks.network`` from its command line to its JSON, on virtual hosts; needs
root."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_netlab_hosts import ROOT, WHY, left

pytestmark = [pytest.mark.every, pytest.mark.skipif(bool(WHY), reason=WHY)]


def test_training_is_measured(tmp_path):
    """With its own command. The bytes that leave the hosts are the model's gradients: a ring of two
    sends them once, fp16 half of that."""
    ways = ["ddp", "compute", "fp16"]
    command = [sys.executable, "benchmarks/data_parallel.py", "--quick", "--ways", "fp16"]
    command += ["--json", str(tmp_path / "made.json"), "--plot", str(tmp_path / "made.png")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "made.json").read_text())["rows"]["data_parallel"]
    assert [row["way"] for row in rows] == ways
    ddp, compute, fp16 = rows
    assert ddp["sent"] == pytest.approx(4 * ddp["parameters"], rel=0.05)
    assert fp16["sent"] == pytest.approx(2 * ddp["parameters"], rel=0.05)
    assert compute["sent"] < 0.05 * ddp["sent"]
    assert fp16["held_out"] == pytest.approx(ddp["held_out"], rel=0.01)
    assert len(ddp["losses"]) == len(ddp["elapsed_s"]) == 6
    assert (tmp_path / "made.png").read_bytes().startswith(b"\x89PNG")


def test_levels_are_measured_and_nothing_is_left_behind(tmp_path):
    before = left(str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.network", "--quick", "--only", "levels"]
    command += ["--json", str(tmp_path / "made.json")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "made.json").read_text())["rows"]
    names = ["plain", "int8, two_shot", "int8, hierarchical(node=2)"]
    assert [row["name"] for row in rows["levels"]] == names
    for row in rows["levels"]:
        assert row["ms"][1] > row["ideal_ms"] > 0
    assert all(name in done.stdout for name in names)
    assert left(str(tmp_path)) == before


def test_taco_steps_are_measured(tmp_path):
    """The experiment of ``benchmarks.claims``: plain and coded steps.

    The bytes are those of a two-shot of 8 sequences of 128 bytes, width 64.
    """
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.claims.experiments.taco_overlap"]
    command += ["--quick", "--json", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    plain, coded = json.loads(path.read_text())["rows"]
    assert (plain["way"], plain["bytes"]) == ("plain", None)
    assert (coded["way"], coded["sites"]) == ("two_shot", 4)
    assert plain["ms"] == sorted(plain["ms"])
    assert coded["bytes"] == 4 * 1.5 * 8 * 128 * 64 * (1 + 8 / 256)
