"""Losses that a program prints, found in its output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)\b"
LOSS = re.compile(rf"\bloss\b\W{{0,6}}(?:is |of |was )?\s*({NUMBER})", re.IGNORECASE)
STEP = re.compile(r"\b(step|iteration|iter|epoch|batch)s?\b\W{0,4}(\d+)", re.IGNORECASE)
Losses = dict[str, float]
"""Losses by step ("step 3"), or by the number of the line if no line names a step."""


def find(lines: Iterable[str]) -> Losses:
    """Return the losses of a program's output.

    A line counts if it has the word loss and a number behind it: ``step 3 loss 2.31``,
    ``{'loss': 2.31, 'epoch': 1}``. If ranks print the same step, the first line counts.
    """
    named: Losses = {}
    numbered: Losses = {}
    for line in lines:
        if (found := LOSS.search(line)) is None:
            continue
        value = float(found[1])
        if places := STEP.findall(line):
            named.setdefault(" ".join(f"{word.lower()} {number}" for word, number in places), value)
        else:
            numbered[f"line {len(numbered) + 1}"] = value
    return named or numbered


def difference(first: Losses, second: Losses) -> float | None:
    """Return the largest relative difference of common steps; None if there are none.

    Losses that are both NaN, or the same infinity, are equal. If one of two is not finite, the
    difference is infinite.
    """
    common = [(first[step], second[step]) for step in first if step in second]
    return max((_relative(a, b) for a, b in common), default=None)


def _relative(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest < float("inf") else float("inf")


def side_by_side(columns: Sequence[Losses], limit: int) -> list[tuple[str, list[float | None]]]:
    """Return a row for each step, with the loss of each column. Of more than ``limit`` rows, return
    that many, evenly spread, with the first and the last."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, [column.get(name) for column in columns]) for name in names]
    if len(rows) <= limit:
        return rows
    return [rows[round(at * (len(rows) - 1) / (limit - 1))] for at in range(limit)]
