"""Run ``make demo`` and the examples that share its code as a user does. CI runs the demo on each
commit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from run_example import output_of

from commpass.plan import dump

pytestmark = pytest.mark.xdist_group("ranks")


OPTIONS = ("--steps=4", "--layers=1", "--width=64")


@pytest.mark.every
@pytest.mark.parametrize("script", ["train_tp", "train_hf", "train_sp", "train_moe"])
def test_example_started_by_torchrun_ends_with_one_page(script, tmp_path):
    if script == "train_hf":
        pytest.importorskip("transformers")
    printed = output_of(f"examples/{script}.py", 2, f"--out={tmp_path}", *OPTIONS)
    check_demo(printed, tmp_path)


@pytest.mark.every
def test_fewer_steps_than_can_be_timed_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="--steps 3: must be at least 4, since the first 2"):
        output_of("examples/train_tp.py", 2, f"--out={tmp_path}", "--steps=3")


def check_demo(printed: str, tmp_path: Path) -> None:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    rows = {line.split()[0]: line.split() for line in lines}
    for policy in ("off", "bf16", "balanced"):
        assert float(rows[policy][1]) > 0
    # The results come first, one line each.
    first = next(at for at, line in enumerate(lines) if " bytes: " in line)
    assert "a step and rank" in lines[first]
    assert re.fullmatch(r"(loss within|the same loss).* on held-out text", lines[first + 1])
    assert lines[first + 2].startswith("no network to measure: loopback is faster than any")
    assert lines[first + 3].startswith("codec bf16 alone: no network to measure")
    assert re.match(r"\d+ of \d+ collectives are compressed", lines[first + 4])
    assert lines[first + 5].split()[0] == "policy"
    assert "As root, and started by python instead of torchrun, each" in " ".join(printed.split())
    assert ("?: known only at run time" in printed) == ("? -> ?" in printed)
    # Training in turns compiles nothing new: each run only has the graphs of its trace.
    for run in ("off", "bf16", "on"):
        assert [one.plan.direction for one in dump.read_run(tmp_path / run)] == [
            "forward",
            "backward",
        ]
    # The command that it prints exists: beside Python, if it is not on PATH.
    said = next(line for line in lines if " explain " in line).split()
    assert shutil.which(said[0]), said
    page = (tmp_path / "report.html").read_text()
    assert "balanced" in page
    assert "policy bf16" in page
    assert "Steps of B: no network to measure" in page
    assert "Steps of C, codec bf16 alone: no network to measure" in page
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
