"""Run ``make demo`` and the examples that share its code as a user does. CI runs the demo on each
commit."""

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
    # The alternating steps compile nothing new: each run only has the graphs of its trace.
    for run in ("off", "bf16", "on"):
        assert [one.plan.direction for one in dump.read_run(tmp_path / run)] == [
            "forward",
            "backward",
        ]
    # The command that it prints exists: beside Python, if it is not on PATH.
    said = next(line for line in printed.splitlines() if " explain " in line).split()
    assert shutil.which(said[0]), said
    page = (tmp_path / "report.html").read_text()
    assert "balanced" in page
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
