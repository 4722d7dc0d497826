"""Compare a run with the same run without commpass, in one sentence for each result.

The functions take numbers and return text: ``make demo`` and the HTML report print the sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles

from commpass.errors import CommpassError
from commpass.report.numbers import size

NEGLIGIBLE = 0.005
"""A change of a time by less than this share is shown as none."""
WIDE_SPREAD = 0.1
"""The width of a middle half, as a share of its median, from which the machine counts as busy."""


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How many times as fast one run is as another, from steps of both in turns.

    ``times`` is the median over the rounds, ``low`` and ``high`` are its quartiles. ``before`` and
    ``after`` are the quartiles of the steps of each run, in milliseconds.
    """

    times: float
    low: float
    high: float
    before: tuple[float, float, float]
    after: tuple[float, float, float]

    @property
    def is_inconclusive(self) -> bool:
        """Whether the middle halves of the two runs overlap."""
        return self.before[0] <= self.after[2] and self.after[0] <= self.before[2]

    @property
    def is_busy(self) -> bool:
        """Whether the steps of a run differ so much that something else must run as well."""
        return any(
            high - low > WIDE_SPREAD * middle for low, middle, high in (self.before, self.after)
        )


def speedup(before_ms: Sequence[float], after_ms: Sequence[float]) -> Speedup:
    """Return the speedup of the second run.

    The step at one position of both was taken in one round. Raise CommpassError for fewer than two
    rounds, or if the numbers of rounds differ.
    """
    if len(before_ms) != len(after_ms) or len(before_ms) < 2:
        raise CommpassError(
            f"{len(before_ms)} and {len(after_ms)} timed steps: a comparison needs as many of each"
            " run, and at least 2"
        )
    ratios = [before / after for before, after in zip(before_ms, after_ms, strict=True)]
    low, _, high = _quartiles(ratios)
    return Speedup(
        times=median(ratios),
        low=low,
        high=high,
        before=_quartiles(before_ms),
        after=_quartiles(after_ms),
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def time_sentence(found: Speedup, predicted: float | None = None) -> str:
    """Return what was measured, and the predicted speedup if it is known."""
    expected = "" if predicted is None else f"; predicted {predicted:.2f}"
    if found.is_inconclusive:
        cause = "the machine is busy" if found.is_busy else "the difference is within the spread"
        low, _, high = found.after
        return (
            f"inconclusive: {cause} (middle halves {found.before[0]:.0f} to"
            f" {found.before[2]:.0f} and {low:.0f} to {high:.0f} ms a step){expected}"
        )
    verdict = "" if found.times >= 1 else "slower: "
    return (
        f"{verdict}{found.times:.2f} times as fast ({found.low:.2f} to {found.high:.2f}):"
        f" {found.before[1]:.0f} -> {found.after[1]:.0f} ms a step{expected}"
    )


def loopback_sentence(predicted: float | None, gbit: float) -> str:
    """Return why no speed is shown where the ranks have no network between them."""
    expected = (
        "" if predicted is None else f"; predicted {predicted:.2f} times as fast on {gbit:g} Gbit/s"
    )
    return f"no network to measure: loopback is faster than any{expected}"


def predicted_sentence(before_us: float, after_us: float) -> str:
    """Return the predicted times of the same graphs in two runs, in microseconds."""
    change = before_us / after_us - 1 if after_us > 0 else 0.0
    if abs(change) < NEGLIGIBLE:
        return "predicted to be as fast"
    slower = "slower: " if change < 0 else ""
    return f"predicted {slower}{1 + change:.2f} times as fast"


def bytes_sentence(before: float, after: float) -> str:
    """Return by how much the bytes shrink that one rank hands to its collectives in a step."""
    if before <= 0:
        return "no bytes are handed to collectives"
    share = round(100 * (1 - after / before))
    amounts = f"{size(before)} -> {size(after)}"
    if after == before:
        return f"as many bytes as before: {size(before)}"
    if share == 0:
        return f"less than 1 % {'fewer' if after < before else 'more'} bytes: {amounts}"
    return f"{abs(share)} % {'fewer' if share > 0 else 'more'} bytes: {amounts}"


def loss_sentence(before: float, after: float) -> str:
    """Return how far apart two losses are, rounded up to four digits."""
    if after == before:
        return f"the same loss: {after:.4f}"
    apart = ceil(1e4 * abs(after - before) - 1e-9) / 1e4  # 0.0003 itself stays 0.0003
    return f"loss within {apart:.4f}: {before:.4f} -> {after:.4f}"
