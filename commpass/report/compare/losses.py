"""Losses that a program prints, found in its output."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, isfinite
from typing import Any

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
LINE_SECONDS = 2.0
"""Processor time that an expression may take for one line: some would take years."""
Losses = dict[str, float]
"""Losses by step ("step 3"), or by the number of the line if no line names a step."""


def loss_pattern(text: str | None) -> re.Pattern[str]:
    """Compile a user's pattern of a loss; None gives LOSS. Raise CommpassError if it is no pattern,
    or has no group for the number."""
    if text is None:
        return LOSS
    try:
        made = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
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
    line counts. The number is the first group of ``pattern`` that takes part in the match. Lines
    where it is no number do not count. Raise CommpassError if a line takes more than LINE_SECONDS,
    or if there are such lines and no losses.
    """
    named: Losses = {}
    numbered: Losses = {}
    unreadable = ""
    for line in lines:
        text = COLOURS.sub("", line[:LONGEST])
        if (found := _search(pattern, text)) is None:
            continue
        group = next((each for each in found.groups() if each is not None), "")
        if (value := _number(group)) is None:
            unreadable = unreadable or (
                f"--loss: the first group of the expression is {group!r}, which is no number, in"
                f" the line {text.strip()[:200]!r}"
            )
        elif places := STEP.findall(text):
            named.setdefault(" ".join(f"{word.lower()} {number}" for word, number in places), value)
        else:
            numbered[f"line {len(numbered) + 1}"] = value
    if unreadable and not (named or numbered):
        raise CommpassError(unreadable)
    return named or numbered


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").rstrip("."))  # it may end a sentence
    except ValueError:
        return None


class _Slow(Exception):
    """A search has taken LINE_SECONDS."""


def _search(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    try:
        with _limited(LINE_SECONDS):
            return pattern.search(text)
    except _Slow:
        raise CommpassError(
            f"--loss {pattern.pattern!r} takes more than {LINE_SECONDS:g} s for the line"
            f" {text.strip()[:200]!r}. Repeat nothing that repeats itself, such as (a+)+"
        ) from None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _Slow after so much processor time; this needs the main thread."""

    def stop(*_: Any) -> None:
        raise _Slow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


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
