"""Run examples as a user does, and show each process's stack if one hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import Ranks

ROOT = Path(__file__).parents[1]
LONGEST_S = 240.0
"""Below the time-out of a test, so that the output of a hanging example is shown."""
LONGEST_ABORT_S = 60.0
"""How long processes that are aborted may take to write their stacks."""


def output_of(
    script: str, ranks: int, *options: str, longest_s: float = LONGEST_S, folder: Path = ROOT
) -> str:
    """Return what an example prints when it is started in a folder, with its ranks on this host.

    Raise AssertionError with all output if it fails. If it hangs, the output includes the stacks of
    its processes.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", script, *options]
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        longest_s *= Ranks.limit_factor
        try:
            out, err = process.communicate(timeout=longest_s)
        except subprocess.TimeoutExpired:
            _abort(process.pid)
            out, err = process.communicate()
            raise AssertionError(f"{script} did not end in {longest_s} s:\n{out}\n{err}") from None
    assert process.returncode == 0, out + err
    return out


def _abort(launcher: int) -> None:
    """End a launcher and its ranks so that each writes its stack.

    The launcher is stopped until all ranks have ended: it would otherwise kill the others when the
    first one ends.
    """
    os.kill(launcher, signal.SIGSTOP)
    *ranks, _ = _descendants(launcher)
    for pid in ranks:
        os.kill(pid, signal.SIGABRT)
    deadline = time.monotonic() + LONGEST_ABORT_S
    while any(map(_is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(launcher, signal.SIGABRT)
    os.kill(launcher, signal.SIGCONT)


def _is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _descendants(pid: int) -> list[int]:
    """Return a process and all its descendants, the latter first."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += _descendants(int(child))
    return [*found, pid]
