"""The file format of step times: JSON lines that each rank writes for ``commpass compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

START = "start"
"""The clock of the first record of a process, which only says that commpass is in use."""
EXPLICIT = "commpass.step"
"""The clock of explicit calls."""


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank.

    ``clock`` is what ended it: ``commpass.step``, or ``optimizer 0`` for the first optimizer of the
    process. ``seconds`` is the time since the previous end of a step by this clock. ``compiled``
    says whether a graph was compiled in between.
    """

    rank: int
    clock: str
    seconds: float = 0.0
    compiled: bool = False


def encode(record: StepRecord) -> bytes:
    """Return a record as one line."""
    return msgspec.json.encode(record) + b"\n"


def read(path: Path) -> list[StepRecord]:
    """Return the records of one process. A last line that was cut short is left out."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=StepRecord) for line in lines]


def files(folder: Path) -> list[Path]:
    """Return the files of all processes, in the order in which they began."""
    return sorted(folder.glob("*.jsonl"), key=lambda path: path.name)


def file_name(start_ns: int, host: str, pid: int) -> str:
    """Return the name of the file of one process."""
    return f"{start_ns:020d}-{host}-{pid}.jsonl"
