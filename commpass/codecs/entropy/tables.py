"""Tables of a Gaussian: how often each class of numbers occurs, as integers.

All machines must compute the same integers, or they could not decode each other's wires. The last
bits of ``math.exp`` differ between C libraries, and those of ``sum`` between versions of Python. So
the frequencies are computed by what IEEE 754 defines to the last bit: sums, products, quotients,
and ``fsum``, which is exact.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache

TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
"""The sum of the frequencies of a table."""
HALF = 24
"""Classes of negative numbers, and as many of the others."""
PER_OCTAVE = 8
"""Tables for each doubling of the ratio."""
LEAST_RATIO, LARGEST_RATIO = -3 * PER_OCTAVE, 16 * PER_OCTAVE
"""Ratios of a block's root mean square to its step, in eighths of an octave. With the least one, a
Gaussian gives only zeros; with the largest, the error is beyond float16."""
REPEATED = 5 * PER_OCTAVE
"""From this ratio on, frequencies are those of the same ratio within its octave: a half step is
too small a part of a class to matter."""
ALWAYS_DITHERED = PER_OCTAVE
"""From this ratio on, dither costs next to nothing, and all numbers have it."""
LEAST_DITHERED = -PER_OCTAVE
"""From this ratio on, the numbers of a chunk that does not fit otherwise are dithered."""
COST_BITS = 10
"""The unit of a cost is this power of two of a bit."""
_INTERVALS = 8
"""Intervals of Simpson's rule in a class that is at most one deviation wide."""


@dataclass(frozen=True)
class Table:
    """How the numbers q of a block with some ratio are coded.

    Args:
        dithered: whether ``q = round(x / step + d)``, and not ``round(x / step)``. The fixed
            *dither* d of each position, from -1/2 to 1/2, is subtracted again by decode. It makes
            the error of any values that of evenly distributed ones (Schuchman, 1964). Without it,
            values of one size could all have the largest error. Blocks of small values would get
            more error from it.
        low: the lowest bits of q, which are stored as they are, since they are almost uniform. The
            other bits, ``q >> low``, are its *class*, from -24 to 23.
        frequencies: of the classes.
        level: q decodes to ``level * (q - d)`` steps, a float32: the factor with the least error
            for a Gaussian.
        cost: the mean bits of q in a Gaussian, times 2^10.
    """

    dithered: bool
    low: int
    frequencies: tuple[int, ...]
    level: float
    cost: int


@lru_cache(maxsize=1)
def tables() -> tuple[Table, ...]:
    """Return the tables of all ratios, from the least to the largest; then those with dither of the
    ratios that may have it."""
    every = [_table(ratio, False) for ratio in range(LEAST_RATIO, ALWAYS_DITHERED)]
    every += [_table(ratio, True) for ratio in range(ALWAYS_DITHERED, LARGEST_RATIO + 1)]
    every += [_table(ratio, True) for ratio in range(LEAST_DITHERED, ALWAYS_DITHERED)]
    return tuple(every)


@lru_cache(maxsize=256)
def _table(ratio: int, dithered: bool) -> Table:
    if ratio >= REPEATED + PER_OCTAVE:
        below = _table(ratio - PER_OCTAVE, dithered)
        return replace(below, low=below.low + 1, cost=below.cost + (1 << COST_BITS))
    octave = ratio // PER_OCTAVE
    low, step = max(0, octave - 1), 2.0**-octave
    for _ in range(ratio % PER_OCTAVE):
        step *= 0.9170040432046712  # 2^(-1/8)
    intervals = _INTERVALS << max(0, -octave)
    heights = _heights((1 << low) * step, step, intervals)
    between = (1 << low) * step / intervals
    if dithered and not low:
        probabilities = _dithered(heights, between, intervals)
    else:
        probabilities = _probabilities(heights, between, intervals)
    frequencies = _frequencies(probabilities)
    bits = low + sum(
        probability * (TOTAL_BITS - math.log2(frequency))
        for probability, frequency in zip(probabilities, frequencies, strict=True)
    )
    # The Wiener factor of independent noise, or the one of a quantizer without dither.
    noisy = 1 / (1 + step * step / 12)
    level = noisy if dithered else _level(heights[::intervals], probabilities, step)
    return Table(dithered, low, frequencies, _float32(level), round(bits * 2**COST_BITS))


@lru_cache(maxsize=1)
def roots() -> tuple[float, ...]:
    """Return ``2^(i / 64)`` for i from 0 to 63, by square roots, which IEEE 754 defines as well:
    ranks must decode the same values."""
    root = 2.0
    for _ in range(6):
        root = math.sqrt(root)
    found = [1.0]
    while len(found) < 64:
        found.append(found[-1] * root)
    return tuple(map(_float32, found))


def _frequencies(probabilities: list[float]) -> tuple[int, ...]:
    """Return integers of at least 1 in proportion, with the sum ``TOTAL``. The most frequent class
    takes what the rounding leaves over."""
    found = [max(1, int(each * TOTAL + 0.5)) for each in probabilities]
    most = found.index(max(found))
    found[most] += TOTAL - sum(found)
    return tuple(found)


def _heights(width: float, step: float, intervals: int) -> list[float]:
    """Return the density of a Gaussian of deviation 1 at the points of Simpson's rule: so many
    intervals in each class, from its lower edge to its upper one."""
    first, between = -HALF * width - 0.5 * step, width / intervals
    places = [first + number * between for number in range(2 * HALF * intervals + 1)]
    return [0.3989422804014327 * _exp(-0.5 * place * place) for place in places]  # 1 / sqrt(2 pi)


def _probabilities(heights: list[float], between: float, intervals: int) -> list[float]:
    """Return the probability of each class, whose points are ``between`` apart."""
    starts = range(0, 2 * HALF * intervals, intervals)
    return [
        _simpson(heights[start : start + intervals + 1], [1.0] * (intervals + 1)) * between
        for start in starts
    ]


def _dithered(heights: list[float], between: float, intervals: int) -> list[float]:
    """Return the probability of each number with dither. It falls linearly from the number to its
    neighbours, which are whole cells away."""
    rise = [place / intervals for place in range(intervals + 1)]
    half = intervals // 2
    padded = [0.0] * half + heights + [0.0] * half
    found = []
    for start in range(0, 2 * HALF * intervals, intervals):
        middle = start + intervals
        below, above = padded[start : middle + 1], padded[middle : middle + intervals + 1]
        found.append((_simpson(below, rise) + _simpson(above, rise[::-1])) * between)
    return found


def _simpson(heights: list[float], weights: list[float]) -> float:
    """Return the integral of a product, by Simpson's rule for points 1 apart."""
    values = [height * weight for height, weight in zip(heights, weights, strict=True)]
    odd, even = math.fsum(values[1::2]), math.fsum(values[2:-1:2])
    return (values[0] + values[-1] + 4 * odd + 2 * even) / 3


def _level(edges: list[float], probabilities: list[float], step: float) -> float:
    """Return ``E[x q] / E[q^2]`` in steps, from the density at the edges of the cells: the integral
    of x times the density is the difference of both."""
    numbers = range(-HALF, HALF)
    product = math.fsum(
        number * (below - above)
        for number, below, above in zip(numbers, edges, edges[1:], strict=False)
    )
    square = math.fsum(
        number * number * each for number, each in zip(numbers, probabilities, strict=True)
    )
    return product / (square * step)


def _float32(number: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return rounded


def _exp(number: float) -> float:
    """Return the exponential of a number up to 0: a power series of a small part of it, squared."""
    if number < -40:
        return 0.0
    halvings = 0
    while number < -0.5:
        number, halvings = number / 2, halvings + 1
    total = term = 1.0
    for place in range(1, 15):
        term = term * number / place
        total += term
    for _ in range(halvings):
        total *= total
    return total
