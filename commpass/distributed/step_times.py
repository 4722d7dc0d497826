"""Write the time of each step of this process, if the environment names a folder for it.

``commpass compare`` sets COMMPASS_STEPS to a folder. Each process that uses commpass writes a file
of ``step_records`` there, one line for a step, flushed at once. A step ends when an optimizer has
stepped (a hook of torch for all optimizers), or when the program calls ``commpass.step()``.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from commpass.errors import CommpassError
from commpass.groups import ready
from commpass.utils import step_records
from commpass.utils.step_records import EXPLICIT, START, StepRecord

FOLDER = "COMMPASS_STEPS"


def step() -> None:
    """Mark the end of a step of a program without an optimizer, such as a server.

    ``commpass compare`` then measures the times between the calls, and ignores optimizers. Call it
    outside of compiled code. Without ``commpass compare`` it does nothing.
    """
    recorder = open_recorder()
    if recorder is not None:
        recorder.end_step(EXPLICIT)


def open_recorder() -> Recorder | None:
    """Return the recorder of this process; None if the environment names no folder.

    The first call writes that commpass is in use, and begins to observe optimizers. Raise
    CommpassError if the folder cannot be written to.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    with _lock:
        if _recorders and _recorders[-1].owner == (folder, os.getpid()):
            return _recorders[-1]
        recorder = Recorder(Path(folder))
        if not _recorders:  # a fork of this process has the hook already
            register_optimizer_step_post_hook(torch.compiler.disable(_after_optimizer))
            atexit.register(_finish)
        _recorders.append(recorder)
        return recorder


_recorders: list[Recorder] = []
"""The recorders of this process and of those that it was forked from; the last one is in use."""
_lock = threading.Lock()


def note_compile() -> None:
    """Record that the current step compiles a graph."""
    if _recorders:
        _recorders[-1].compiles += 1


def _after_optimizer(optimizer: Optimizer, *_: Any) -> None:
    recorder = open_recorder()
    if recorder is not None:
        recorder.end_step(recorder.name_of(optimizer))


def _finish() -> None:
    if _recorders[-1].owner[1] == os.getpid():
        _recorders[-1].write_complete()


@dataclass(frozen=True)
class _Mark:
    """A point in time: of the process, and on the stream of a GPU if one is in use."""

    seconds: float
    event: Any = None

    @classmethod
    def current(cls) -> _Mark:
        event = None
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return cls(time.perf_counter(), event)

    def since(self, earlier: _Mark) -> float | None:
        """Return the seconds since an earlier mark; None if the GPU has not reached this one."""
        if self.event is None or earlier.event is None:
            return self.seconds - earlier.seconds
        return earlier.event.elapsed_time(self.event) / 1e3 if self.event.query() else None


class Recorder:
    """Writes the steps of one process.

    On a GPU the time of a step is that between two events on the stream. They are read when the GPU
    has reached them, so nothing waits for them.
    """

    def __init__(self, folder: Path):
        self.owner = (str(folder), os.getpid())
        self.compiles = 0
        self.rank = _rank()
        self.begin = _Mark.current()
        self.last: dict[str, _Mark] = {}
        self.compiles_at: dict[str, tuple[int, int]] = {}
        self.pending: list[tuple[_Mark, _Mark, str, bool]] = []
        self.optimizers: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.lock = threading.Lock()
        name = step_records.file_name(time.time_ns(), socket.gethostname(), os.getpid())
        try:
            self.file: BinaryIO = (folder / name).open("ab", buffering=0)
        except OSError as error:
            raise CommpassError(
                f"{FOLDER}={folder}: cannot be written: {error.strerror}. commpass compare needs a"
                " folder that all hosts share: name one with --keep"
            ) from error
        self.write(StepRecord(self.rank, START))

    def name_of(self, optimizer: Optimizer) -> str:
        """Return the clock of an optimizer: its number in the order of their first steps."""
        if optimizer not in self.optimizers:  # the number of one that is gone is free again
            names = map("optimizer {}".format, count())
            self.optimizers[optimizer] = next(
                name for name in names if name not in self.optimizers.values()
            )
        return self.optimizers[optimizer]

    def end_step(self, clock: str) -> None:
        """End a step by this clock, and write all steps that are complete."""
        with self.lock:
            end, compiles = _Mark.current(), (self.compiles, _frames())
            if ready():  # it may be gone when the step is written
                self.rank = torch.distributed.get_rank()
            compiled = compiles != self.compiles_at.get(clock, (-1, -1))
            self.pending.append((self.last.get(clock, self.begin), end, clock, compiled))
            self.last[clock], self.compiles_at[clock] = end, compiles
            self._write_complete()

    def write_complete(self) -> None:
        """Write all steps that are complete."""
        with self.lock:
            self._write_complete()

    def _write_complete(self) -> None:
        while self.pending:
            begin, end, clock, compiled = self.pending[0]
            if (seconds := end.since(begin)) is None:
                return
            self.write(StepRecord(self.rank, clock, seconds, compiled))
            del self.pending[0]

    def write(self, record: StepRecord) -> None:
        self.file.write(step_records.encode(record))


def _frames() -> int:
    """Return how many frames Dynamo has compiled, also those of other backends."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["frames"]["total"] if utils is not None else 0


def _rank() -> int:
    """Return the rank of this process, without a process group that of the launcher."""
    if ready():
        return torch.distributed.get_rank()
    said = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(said) if said.isdecimal() else 0
