"""Losses that a program prints, found in its output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf, isfinite

from commpass.errors import CommpassError
from commpass.report.numbers import percent

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
NUMBER = rf"[-+]?(?:{DIGITS}|nan|inf(?:inity)?)(?!\w|\.\d)"
LOSS = re.compile(
    rf"(?<![^\W_])loss\b\W{{0,6}}?\s*(?:(?:is|of|was)\s+|tensor\()?({NUMBER})", re.IGNORECASE
)
STEP = re.compile(
    r"\b(step|iteration|iter|epoch|batch)s?\b\W{0,4}?\s*(\d+(?:\.\d+)?)", re.IGNORECASE
)
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What a program writes to colour its text on a terminal."""
LONGEST = 10_000
"""Characters of a line that are read: more is data, not a message."""
Losses = dict[str, float]
"""Losses by step ("step 3"), or by the number of the line if no line names a step."""


def loss_pattern(text: str | None) -> re.Pattern[str]:
    """Compile a user's pattern of a loss; None gives LOSS. Raise CommpassError if it is no pattern,
    or has no group for the number."""
    if text is None:
        return LOSS
    try:
        made = re.compile(text)
    except re.error as error:
        raise CommpassError(f"--loss {text!r} is no regular expression: {error}") from error
    if not made.groups:
        raise CommpassError(
            f"--loss {text!r} has no group for the number: write 'ppl=([0-9.]+)', for example"
        )
    return made


def find(lines: Iterable[str], pattern: re.Pattern[str] = LOSS) -> Losses:
    """Return the losses of a program's output.

    By default a line counts if it has the word loss and a number behind it: ``step 3 loss 2.31``,
    ``{'loss': 2.31, 'epoch': 0.08}``, ``train_loss=2.31``. If ranks print the same step, the first
    line counts. Raise CommpassError if the first group of ``pattern`` is no number.
    """
    named: Losses = {}
    numbered: Losses = {}
    for line in lines:
        text = COLOURS.sub("", line[:LONGEST])
        if (found := pattern.search(text)) is None:
            continue
        value = _number(found[1] or "", text)
        if places := STEP.findall(text):
            named.setdefault(" ".join(f"{word.lower()} {number}" for word, number in places), value)
        else:
            numbered[f"line {len(numbered) + 1}"] = value
    return named or numbered


def _number(text: str, line: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError as error:
        raise CommpassError(
            f"--loss: the first group of the expression is {text!r}, which is no number, in the"
            f" line {line.strip()[:200]!r}"
        ) from error


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
    if not (isfinite(a) and isfinite(b)):
        return inf
    return abs(a - b) / max(abs(a), abs(b))


def first_not_finite(of: Losses, reference: Losses) -> str | None:
    """Return the first step whose loss is NaN or infinite though that of ``reference`` is
    finite."""
    steps = (step for step in of if step in reference)
    return next((s for s in steps if not isfinite(of[s]) and isfinite(reference[s])), None)


def difference_text(value: float) -> str:
    """Format a relative difference of losses."""
    return percent(value, 2) if isfinite(value) else "not finite"


def side_by_side(columns: Sequence[Losses], limit: int) -> list[tuple[str, list[float | None]]]:
    """Return a row for each step, with the loss of each column. Of more than ``limit`` rows, return
    that many, evenly spread, with the first and the last."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, [column.get(name) for column in columns]) for name in names]
    if len(rows) <= limit:
        return rows
    return [rows[round(at * (len(rows) - 1) / (limit - 1))] for at in range(limit)]
