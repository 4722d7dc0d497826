"""What ``make demo`` runs, and the examples that share its code: run as a user runs them.
CI runs that of the demo with each commit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from run_example import output_of

from commpass.plan import dump

pytestmark = pytest.mark.xdist_group("ranks")


OPTIONS = ("--steps=2", "--layers=1", "--width=64")


@pytest.mark.every
@pytest.mark.parametrize("script", ["train_tp", "train_hf", "train_sp", "train_moe"])
def test_example_started_by_torchrun_ends_with_one_page(script, tmp_path):
    if script == "train_hf":
        pytest.importorskip("transformers")
    printed = output_of(f"examples/{script}.py", 2, f"--out={tmp_path}", *OPTIONS)
    check_demo(printed, tmp_path)


def check_demo(printed: str, tmp_path: Path) -> None:
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.strip()}
    for policy in ("off", "bf16", "balanced"):
        assert float(rows[policy][1]) > 0
    assert "over loopback, where no gain can be seen" in " ".join(printed.split())
    # The steps in turns compile nothing anew: each run has the graphs of its trace alone.
    for run in ("off", "bf16", "on"):
        assert [one.plan.direction for one in dump.read_run(tmp_path / run)] == [
            "forward",
            "backward",
        ]
    # What it says to run is there: beside Python, where that is not on the path.
    said = next(line for line in printed.splitlines() if " explain " in line).split()
    assert shutil.which(said[0]), said
    page = (tmp_path / "report.html").read_text()
    assert "balanced" in page
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
