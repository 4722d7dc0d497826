"""The processes of one run of the command, and how to end them all."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

PATIENCE = ((signal.SIGINT, 15.0), (signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0))
"""Signals for the command, each with the seconds to wait after it."""
GRACE = 3.0
"""Seconds that other processes have to end by themselves after the command has ended, and after
SIGTERM."""
POLL = 0.1


def stop(child: subprocess.Popen[bytes], mark: str) -> int:
    """End the child politely, and then all other processes that have ``mark`` in their environment.

    A launcher such as torchrun starts each rank in a session of its own, so these do not end with
    it. ``mark`` reads NAME=VALUE, and is unique to the run. Return how many processes still ran
    after the end of the child. On Ctrl-C all are killed at once.
    """
    try:
        for number, seconds in PATIENCE:
            if child.poll() is not None:
                break
            _signal_group(child.pid, number)
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
        rest = _wait_for(mark)
        _signal(rest, signal.SIGTERM)
        _signal(_wait_for(mark) if rest else (), signal.SIGKILL)
    except BaseException:
        _signal_group(child.pid, signal.SIGKILL)
        _signal(having(mark), signal.SIGKILL)
        raise
    return len(rest)


def having(mark: str) -> list[int]:
    """Return the processes that have ``mark`` in their environment, this one left out.

    It needs /proc. Elsewhere there are none. Processes of other users are left out.
    """
    found, text = [], mark.encode() + b"\0"
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or it belongs to someone else
            continue
    return [pid for pid in found if pid != os.getpid()]


def _wait_for(mark: str) -> list[int]:
    """Return the processes that are there after GRACE seconds; earlier if there are none."""
    end = time.monotonic() + GRACE
    while (found := having(mark)) and time.monotonic() < end:
        time.sleep(POLL)
    return found


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
