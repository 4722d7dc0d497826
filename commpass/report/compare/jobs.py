"""Run the user's command under one policy, as a child process with an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commpass.errors import CommpassError
from commpass.report.compare import losses, processes
from commpass.report.compare.steps import Steps, read, steps_of

ON, OFF = "on", "off"
POLL = 0.25
SHARE = 0.01
"""Step times are read from the files for at most this share of the time, since it takes compute
from the program."""
LAST_LINES = 20
LINE_LENGTH = 500
"""Characters that are shown of a line of the output."""
TRACEBACK = "Traceback (most recent call last):"
SWITCH, POLICY, DUMP, STEPS = "COMMPASS", "COMMPASS_POLICY", "COMMPASS_DUMP", "COMMPASS_STEPS"


@dataclass(frozen=True)
class Runs:
    """The runs of ``commpass compare``: the command, and how often it runs under which policies.

    A run ends after ``most_steps`` counted steps, or at its end. ``loss`` finds a loss in a line of
    the output: the number is its first group that takes part in the match.
    """

    command: Sequence[str]
    policies: Sequence[str]
    rounds: int
    most_steps: int | None = None
    loss: re.Pattern[str] = losses.LOSS


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the command under one policy.

    ``status`` is its exit status, and None if it was stopped. ``used`` says whether the program
    used commpass. ``folder`` has its output, its step times and its dumps. ``stopped`` is the
    number of processes that still ran after the end of the command, and were ended. ``loss_error``
    says why no losses could be read.
    """

    policy: str
    round: int
    folder: Path
    status: int | None
    seconds: float
    used: bool
    steps: Steps
    losses: losses.Losses
    stopped: int = 0
    loss_error: str = ""

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    def last_lines(self) -> list[str]:
        """Return the end of the output, and before it that of the first traceback.

        A launcher prints much after the traceback of a rank.
        """
        with self.output.open(encoding="utf-8", errors="replace") as file:
            lines = [shortened(line.rstrip("\n")) for line in file]
        first = next((at for at, line in enumerate(lines) if TRACEBACK in line), len(lines))
        indent = lines[first].index(TRACEBACK) if first < len(lines) else 0
        last = next(
            (at for at in range(first + 1, len(lines)) if not lines[at][indent:].startswith(" ")),
            len(lines),
        )
        if last >= len(lines) - LAST_LINES:
            return lines[-LAST_LINES:]
        return [*lines[max(first, last - LAST_LINES) : last + 1], "...", *lines[-LAST_LINES // 2 :]]


def shortened(line: str) -> str:
    """Return the start of a line that is too long to be shown."""
    if len(line) <= LINE_LENGTH:
        return line
    return f"{line[:LINE_LENGTH]}... ({len(line):,} characters)"


class Interrupted(Exception):
    """The user stopped the comparison. ``job`` is the run that was stopped."""

    def __init__(self, job: Job):
        super().__init__()
        self.job = job


def check_command(command: Sequence[str]) -> None:
    """Raise CommpassError if there is no such program."""
    if not command:
        raise CommpassError(
            "there is no command: write it behind two dashes, such as commpass compare --"
            " torchrun --nproc-per-node 2 train.py"
        )
    if shutil.which(command[0]) is None:
        hint = ""
        if Path(command[0]).is_file():
            hint = f" It is a file without permission to execute: write python {command[0]}"
        raise CommpassError(f"{command[0]}: there is no such program.{hint}")


def environment_of(policy: str, folder: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command under one policy."""
    made = {name: value for name, value in outer.items() if name not in (SWITCH, POLICY)}
    if policy == OFF:
        made[SWITCH] = OFF
    elif policy != ON:
        made[POLICY] = policy
    made |= {DUMP: str(folder / "dump"), STEPS: str(folder / "steps"), "PYTHONUNBUFFERED": "1"}
    return made


def run(runs: Runs, policy: str, round_: int, folder: Path, update: Callable[[int], None]) -> Job:
    """Run the command to its end, or until ``runs.most_steps`` steps are counted.

    ``update`` is called with the number of counted steps. Raise Interrupted on Ctrl-C.
    """
    (folder / "steps").mkdir(parents=True)
    begin = time.monotonic()
    status: int | None = None
    is_interrupted = False
    environment = environment_of(policy, folder, os.environ)
    with (folder / "output.txt").open("wb") as output, _interrupt_on_terminate():
        child = subprocess.Popen(
            runs.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C reaches this process alone
        )
        try:
            status = _wait(child, folder / "steps", runs.most_steps, update)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            stopped = processes.stop(child, f"{STEPS}={environment[STEPS]}")
    ranks = read(folder / "steps")
    found: losses.Losses = {}
    loss_error = ""
    try:
        with (folder / "output.txt").open(encoding="utf-8", errors="replace") as text:
            found = losses.find(text, runs.loss)
    except CommpassError as error:
        loss_error = str(error)
    except KeyboardInterrupt:
        is_interrupted = True
    job = Job(
        policy=policy,
        round=round_,
        folder=folder,
        status=status,
        seconds=time.monotonic() - begin,
        used=bool(ranks),
        steps=steps_of(ranks),
        losses=found,
        stopped=stopped if status is not None else 0,
        loss_error=loss_error,
    )
    if is_interrupted:
        raise Interrupted(job)
    return job


def _wait(
    child: subprocess.Popen[bytes],
    folder: Path,
    most_steps: int | None,
    update: Callable[[int], None],
) -> int | None:
    """Wait for the end of the child and return its status; None if it has enough steps."""
    pause = POLL
    while True:
        try:
            return child.wait(pause)
        except subprocess.TimeoutExpired:
            begin = time.monotonic()
            counted = len(steps_of(read(folder)).ms)
            pause = max(POLL, (time.monotonic() - begin) / SHARE)
            update(counted)
            if most_steps is not None and counted >= most_steps:
                return None


@contextmanager
def _interrupt_on_terminate() -> Iterator[None]:
    """Treat SIGTERM of a job scheduler, and SIGHUP of a terminal that is closed, like Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
