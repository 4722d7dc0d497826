"""The work of kernels that depends on the values, for typical ones: independent normal numbers of
mean 0 and deviation 1.

Shares of values follow from the normal distribution. A loop that runs as often as the fullest of
many words needs takes the mean of that maximum. All other numbers are those of the codec. Nothing
is fitted to measured times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commpass.codecs.exponent.floats import FloatForm
from commpass.codecs.exponent.ladder import BINS, Ladder

WORD = 32
"""The values of a column, and the entries of a word of chosen ones."""
DEEPEST = 40
"""Powers of two below 1 from which on a normal number is taken as zero."""


def mean_maximum(share: float, words: int) -> float:
    """Return the mean of the largest number of ones in any of so many words, of whose bits this
    share is one."""
    below, total = 0.0, 0.0
    for ones in range(WORD):
        below += math.comb(WORD, ones) * share**ones * (1 - share) ** (WORD - ones)
        total += 1.0 - min(below, 1.0) ** words
    return total


def exponent_shares() -> list[float]:
    """Return the shares of exponents, from 2^-40 up to 2^19."""

    def within(power: int) -> float:
        return math.erf(2.0**power / math.sqrt(2.0))

    return [within(power + 1) - within(power) for power in range(-DEEPEST, 20)]


@dataclass(frozen=True)
class Exponents:
    """What a ladder makes of typical values: the ``shares`` of values that have a field in each
    step after the first one, the last step being the plain exponent, and the ``fields`` in bits."""

    shares: tuple[float, ...]
    fields: tuple[int, ...]

    @property
    def bits(self) -> float:
        """Bits of a value in the dynamic part."""
        return sum(share * bits for share, bits in zip(self.shares, self.fields, strict=True))

    def words(self, values: int) -> float:
        """Return the 16-bit words of a chunk in the dynamic part: whole ones, half a word more on
        the average."""
        return values * self.bits / 16 + 0.5

    def rounds(self, step: int, columns: int) -> float:
        """Return how many fields of a step (0: the one after the first) the fullest of so many
        columns has."""
        return mean_maximum(self.shares[step], columns)


def exponents(ladder: Ladder, form: FloatForm) -> Exponents:
    """Return what a ladder makes of typical values, with the window that saves most bits."""
    shares = exponent_shares()
    base = _median(shares) - ladder.below
    bins = shares[base : base + BINS]
    gains = ladder.gains(bins, 0.0, form.exponent_bits)
    start = base + gains.index(max(gains[: ladder.starts]))
    left = []
    for step in ladder.steps:
        low = start + step.low - ladder.steps[-1].low
        left.append(1.0 - sum(shares[low : low + step.high - step.low]))
    return Exponents(tuple(left), (*ladder.fields[:-1], form.exponent_bits))


def _median(shares: Sequence[float]) -> int:
    total, place = shares[0], 0
    while total < 0.5:
        place += 1
        total += shares[place]
    return place
