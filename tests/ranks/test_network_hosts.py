"""``python -m benchmarks.network`` from its command line to its JSON, on hosts of its own; needs
root."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_netlab_hosts import ROOT, WHY, left

pytestmark = [pytest.mark.every, pytest.mark.skipif(bool(WHY), reason=WHY)]


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
