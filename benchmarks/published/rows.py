"""Read the table of published measurements (rows.tsv)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from commpass.errors import CommpassError

PATH = Path(__file__).with_name("rows.tsv")
US = {"us": 1.0, "ms": 1e3, "s": 1e6}
"""Microseconds of the units of time."""
RATIOS = ("x of baseline", "x latency")
"""Units of rows that give only a ratio of times."""


@dataclass(frozen=True)
class Row:
    """One line. Times are in microseconds, or relative to the baseline (``is_ratio``); they are
    None where the line has none, a range, or a rate.

    ``number`` is its line in the file; ``ranks`` and ``nbytes`` are None if they are not numbers.
    """

    number: int
    split: str
    level: str
    source: str
    hardware: str
    ranks: int | None
    collective: str
    dtype: str
    nbytes: int | None
    codec: str
    plain: float | None
    compressed: float | None
    unit: str
    note: str
    checked: str

    @property
    def is_ratio(self) -> bool:
        """Whether its times are relative to the baseline."""
        return self.unit in RATIOS


def read(path: Path = PATH) -> list[Row]:
    """Return all rows. Raises CommpassError for a line that cannot be read."""
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(lines, delimiter="\t", strict=True)
        return [_row(number, line, path) for number, line in enumerate(table, start=2)]


def _row(number: int, line: dict[str, str | None], path: Path) -> Row:
    if None in line or None in line.values():
        raise CommpassError(f"{path}:{number}: has more or fewer fields than the header")
    of = {key: value or "" for key, value in line.items()}
    try:
        scale = US.get(of["unit"], 1.0)
        plain, compressed = (_middle(of[name]) for name in ("baseline", "compressed"))
        return Row(
            number,
            of["split"],
            of["level"],
            of["source"],
            of["hardware"],
            int(of["ranks"]) if of["ranks"] else None,
            of["collective"],
            of["dtype"],
            int(of["bytes"]) if of["bytes"].isdecimal() else None,
            of["codec"],
            None if plain is None else plain * scale,
            None if compressed is None else compressed * scale,
            of["unit"],
            of["note"],
            of["checked"],
        )
    except (KeyError, ValueError) as error:
        raise CommpassError(f"{path}:{number}: cannot be read: {error!r}") from error


def _middle(text: str) -> float | None:
    """Return a number, or the middle of a range such as ``0.9 to 0.91``; None for no number."""
    ends = [float(end) for end in text.split(" to ")] if text else []
    return sum(ends) / len(ends) if ends else None
