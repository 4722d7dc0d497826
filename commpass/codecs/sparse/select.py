"""Selectors of the entries of a row to send: exact top-k, random-k, DGC, Gaussian-k, RedSync,
SIDCo.

A selector is plain data. ``select``, dispatched on its type, maps rows ``[rows, n]`` and a density
to a Selection of exactly ``k = ceil(density * n)`` slots. It uses plain aten operations with a
fixed number of passes: published loops that stop early are run to their end for all rows at once.

All selectors share these rules:

- Magnitudes are compared as bit patterns, in which NaN > Inf > all finite numbers, so nonfinite
  values are always chosen. A row with more of them than slots (or, for random-k, outside of the
  slots) is ``lost``: its encoder must make all of it NaN.
- Statistics are computed from finite entries divided by the largest of them, as integers. They do
  not overflow or underflow, and sums do not depend on their order, so eager and compiled runs
  choose alike.
- A threshold is never above the largest magnitude, and zero is never above a threshold. A row that
  is not all zeros has at least one entry chosen; a row of zeros has none.
- If more than ``k`` entries reach a threshold, the largest are kept. The threshold is raised in two
  passes of 16, until the step that separates the kept entries is 1/256 of the distance (in bit
  patterns) from the threshold to the largest magnitude. Within that step the lowest indices are
  kept. Published code keeps the lowest indices of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import torch
from torch import Tensor

from commpass.codecs.codec import accumulation_dtype
from commpass.codecs.dispatch import by_type
from commpass.codecs.rows import cut, larger, smaller
from commpass.codecs.sparse.indices import ranks_up_to
from commpass.codecs.sparse.measure import (
    AtenStatistics,
    Statistics,
    infinity,
    magnitude_bits,
    not_finite,
    pattern,
    unit,
    value,
)
from commpass.errors import PolicyError


@dataclass(frozen=True)
class Selection:
    """``indices`` int64 ``[rows, k]``, ascending, ``n`` in unused slots; ``used`` int64 and
    ``lost`` bool ``[rows]``."""

    indices: Tensor
    used: Tensor
    lost: Tensor


@dataclass(frozen=True)
class Density:
    """The fraction of chosen entries, ``numerator / denominator``.

    ``sigmas`` is the magnitude, in standard deviations, that this fraction of a Gaussian exceeds.
    """

    numerator: int
    denominator: int
    ratio: float
    sigmas: float

    def slots(self, entries: int) -> int:
        """Return ``ceil(entries * numerator / denominator)``: at least one if there is an entry.
        ``entries`` may be symbolic."""
        return (entries * self.numerator + self.denominator - 1) // self.denominator


def density_of(density: float) -> Density:
    """Return a density as the nearest fraction with a denominator up to a million. Raises
    PolicyError outside of [1e-6, 1]."""
    if not 1e-6 <= density <= 1:
        raise PolicyError(f"density={density}: must be from 1e-6 to 1, such as 0.01")
    fraction = Fraction(density).limit_denominator(10**6)
    ratio = float(fraction)
    return Density(
        fraction.numerator, fraction.denominator, ratio, NormalDist().inv_cdf(1 - ratio / 2)
    )


# --- selectors ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopK:
    """The ``k`` entries of largest magnitude; all slots are used."""


@dataclass(frozen=True)
class RandomK:
    """One random entry from each of ``k`` stretches of equal length: equal probabilities, O(k)
    work.

    The counter-based generator takes its key from ``seed`` and from the row itself. Different data
    gives a different choice without a step counter, and equal data the same choice. All slots are
    used.
    """

    seed: int = 0


@dataclass(frozen=True)
class Dgc:
    """The threshold of a sample, x0.8 until 0.8 k entries are found (Lin et al. 2018, Deep Gradient
    Compression, and its published code).

    The sample is 1 % of the row, but at least ``2 / density`` entries, one at random of each
    stretch. At most 10 rounds, all counted in one pass. If too many reach the threshold, the
    largest ``k`` are kept, as in the published code from 1.3 k.
    """


@dataclass(frozen=True)
class GaussianK:
    """``|mu| + sigma * ppf(1 - density/2)``, x0.5 or x1.5 in up to 3 rounds while not in 2k/3 ...
    4k/3 (Shi et al. 2019).

    Published code uses ``mu`` instead of ``|mu|``, which is too low for a negative mean. If no
    round fits, the smallest sufficient count is chosen instead of the last round, which may have
    found nothing if the mean is far from zero. The 10 thresholds that three rounds can reach are
    counted in one pass.
    """


@dataclass(frozen=True)
class RedSync:
    """``mean + t * (max - mean)`` with t bisected 3 times until between k and 2k entries are found
    (Fang et al. 2019).

    Fewer than k lower the threshold; published code does so only below k/2, and ends with too few
    if it finds less than k. If nothing fits, the lower end is used, which finds too many. All
    thresholds are counted in one pass.
    """


@dataclass(frozen=True)
class Sidco:
    """``-mean * ln(ratio)`` of an exponential, then the same for the entries above it, in stages
    (Abdelmoniem et al. 2021).

    Each stage keeps a quarter of the one before, the last one the remainder of the density: 4
    stages at 1 %. One pass per stage.
    """


Threshold = Dgc | GaussianK | RedSync | Sidco
"""Selectors that choose the entries above a threshold."""
Selector = TopK | RandomK | Threshold


def guaranteed_share(selector: Selector, density: Density) -> float:
    """Return the smallest part of a row's squared norm that a selector guarantees to choose: the
    density for exact top-k, 0 for the others."""
    return density.ratio if isinstance(selector, TopK) else 0.0


@by_type
def select(selector: Selector, rows: Tensor, density: Density) -> Selection:
    """Return the entries of each of the rows ``[rows, n]`` that a selector chooses."""
    raise NotImplementedError(selector)


@select.register
def _topk(selector: TopK, rows: Tensor, density: Density) -> Selection:
    bits = magnitude_bits(rows)
    k = density.slots(rows.shape[1])
    indices = bits.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    return Selection(indices, (indices >= 0).sum(-1), not_finite(bits) > k)


@select.register
def _randomk(selector: RandomK, rows: Tensor, density: Density) -> Selection:
    bits = magnitude_bits(rows)
    k = density.slots(rows.shape[1])
    words = rows.to(accumulation_dtype(rows.dtype)).view(bits.dtype).to(torch.int64)
    # Integer sums do not depend on their order; with 31 bits of each word, a sum of 2^32 words fits
    # in 64 bits.
    low, high = (
        (words & 0x7FFFFFFF).sum(-1, keepdim=True),
        ((words >> 31) & 0x7FFFFFFF).sum(-1, keepdim=True),
    )
    indices = _one_of_each_stretch(
        rows.shape[1], k, _mix(low & _MASK, _mix(high & _MASK, selector.seed))
    )
    chosen = (bits.gather(1, indices) >= infinity(bits)).sum(-1)
    return Selection(indices, (indices >= 0).sum(-1), not_finite(bits) > chosen)


@select.register(Dgc)
@select.register(GaussianK)
@select.register(RedSync)
@select.register(Sidco)
def _by_threshold(selector: Threshold, rows: Tensor, density: Density) -> Selection:
    statistics = AtenStatistics(rows, magnitude_bits(rows))
    chosen = bounds(selector, statistics, density)
    return _between(statistics.bits, chosen, density.slots(rows.shape[1]))


# --- threshold selectors --------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """Bounds of the chosen entries of a row, as magnitude patterns, each ``[rows, 1]``.

    Entries not below ``high`` are chosen, and the first ``room`` of those in ``low ... high``.
    ``lost`` is as in Selection.
    """

    low: Tensor
    high: Tensor
    room: Tensor
    lost: Tensor


@by_type
def bounds(selector: Threshold, statistics: Statistics, density: Density) -> Bounds:
    """Return the bounds for a selector. They depend only on ``statistics``, so all implementations
    of these give the same bounds."""
    raise NotImplementedError(selector)


@bounds.register
def _dgc(selector: Dgc, statistics: Statistics, density: Density) -> Bounds:
    entries, k, peak = statistics.entries, density.slots(statistics.entries), statistics.peak()
    sample = smaller(
        entries,
        larger(
            (entries + 99) // 100,
            (2 * density.denominator + density.numerator - 1) // density.numerator,
        ),
    )
    places = _one_of_each_stretch(entries, sample, torch.zeros_like(peak, dtype=torch.int64))
    sampled = torch.minimum(statistics.at(places), peak)
    smallest = sampled.topk(density.slots(sample), dim=-1).values.amin(-1, keepdim=True)
    start = value(smallest).double()
    thresholds = pattern(torch.cat([start * 0.8**round_ for round_ in range(11)], dim=1), peak)
    found = statistics.counts(thresholds, enough=(4 * k + 4) // 5)
    rounds = (found * 5 < 4 * k).sum(-1, keepdim=True).clamp(max=10)
    return _largest_above(statistics, thresholds.gather(1, rounds), peak, k)


@bounds.register
def _gaussiank(selector: GaussianK, statistics: Statistics, density: Density) -> Bounds:
    k, peak = density.slots(statistics.entries), statistics.peak()
    signed, squares, finite = statistics.moments(peak)
    count = finite.clamp(min=1).double()
    mean = signed / count
    variance = (squares / count - mean * mean).clamp(min=0) * (count / (count - 1).clamp(min=1))
    start = mean.abs() + density.sigmas * variance.sqrt()
    reach = [(half, more) for half in range(4) for more in range(4 - half)]
    tried = torch.cat([start * (0.5**a * 1.5**b) for a, b in reach], dim=1)
    thresholds = pattern(unit(tried) * value(peak), peak)
    found = statistics.counts(thresholds)
    halved = more = torch.zeros_like(peak, dtype=torch.int64)
    places = [_triangle(halved, more)]
    for _ in range(3):
        here = found.gather(1, places[-1])
        halved, more = halved + (3 * here < 2 * k), more + (3 * here > 4 * k)
        places.append(_triangle(halved, more))
    rounds = torch.cat(places, dim=1)
    counts = found.gather(1, rounds)
    best = torch.where(3 * counts >= 2 * k, counts, 2 * statistics.entries - counts).argmin(
        -1, keepdim=True
    )
    return _largest_above(statistics, thresholds.gather(1, rounds.gather(1, best)), peak, k)


@bounds.register
def _redsync(selector: RedSync, statistics: Statistics, density: Density) -> Bounds:
    k, peak = density.slots(statistics.entries), statistics.peak()
    total, finite = statistics.above(peak, None)
    mean = total / finite.clamp(min=1)
    eighths = torch.arange(8, dtype=torch.float64, device=mean.device) / 8
    thresholds = pattern(unit(mean + eighths * (1 - mean)) * value(peak), peak)
    found = statistics.counts(thresholds)
    low = torch.zeros_like(peak, dtype=torch.int64)
    high, done = low + 8, low.bool()
    for _ in range(3):
        middle = (low + high) // 2
        here = found.gather(1, middle)
        fits, few = (here >= k) & (here < 2 * k), here < k
        low = torch.where(done | few, low, middle)
        high = torch.where(~done & few, middle, high)
        done = done | fits
    return _largest_above(statistics, thresholds.gather(1, low), peak, k)


@bounds.register
def _sidco(selector: Sidco, statistics: Statistics, density: Density) -> Bounds:
    k, peak, left = density.slots(statistics.entries), statistics.peak(), density.ratio
    threshold = torch.zeros_like(peak, dtype=torch.float64)
    least = None
    while True:
        total, count = statistics.above(peak, least)
        above = total / count.clamp(min=1) - threshold
        threshold = unit(threshold - above.clamp(min=0) * math.log(max(left, 0.25)))
        if left >= 0.25:
            break
        left /= 0.25
        least = threshold
    return _largest_above(statistics, pattern(threshold * value(peak), peak), peak, k)


def _triangle(half: Tensor, more: Tensor) -> Tensor:
    """Return the index of (half, more) in the list of all pairs with ``half + more < 4``."""
    return half * 4 - half * (half - 1) // 2 + more


# --- from a threshold to slots --------------------------------------------------------------------

_STEPS = 16
FEW_ROWS = 2
"""Up to this many rows are searched one by one, 5 times faster on a CPU than a scan of all; more
take long to compile."""


def _largest_above(statistics: Statistics, threshold: Tensor, peak: Tensor, k: int) -> Bounds:
    """Return the bounds of the entries that reach a threshold ``[rows, 1]``; if more than ``k`` do,
    of the largest ones (see the module)."""
    start = torch.minimum(threshold, peak.clamp(min=1))
    low, high = start, peak + 1
    nonfinite = statistics.nonfinite()
    above_high, fits = nonfinite, None
    steps = torch.arange(_STEPS, dtype=peak.dtype, device=peak.device)
    for narrowing in range(2):
        step = (high - low + (_STEPS - 1)) // _STEPS
        points = torch.minimum(low + step * steps, high)
        if narrowing == 0:  # then all entries of the largest magnitude are kept, or no others
            points = torch.minimum(torch.cat([points, high], dim=1), torch.maximum(peak, start))
        counts = statistics.counts(points, fits)
        if narrowing == 0:
            fits = counts[:, :1] <= k  # no further narrowing is needed
        last = (
            (counts >= k).sum(-1, keepdim=True).clamp(min=1)
        )  # the number of edges that at least k entries reach
        points, counts = torch.cat([points, high], dim=1), torch.cat([counts, above_high], dim=1)
        low, high, above_high = (
            points.gather(1, last - 1),
            points.gather(1, last),
            counts.gather(1, last),
        )
    assert fits is not None
    low, high = torch.where(fits, start, low), torch.where(fits, start, high)
    room = torch.where(fits, 0, k - above_high).clamp(min=0)
    return Bounds(low, high, room, nonfinite.squeeze(-1) > k)


def _between(bits: Tensor, bounds: Bounds, k: int) -> Selection:
    """Return the entries within bounds."""
    low, high = bounds.low, bounds.high
    indices = _lowest(bits >= high, (bits >= low) & (bits < high), bounds.room, k)
    return Selection(indices, (indices < bits.shape[1]).sum(-1), bounds.lost)


def _lowest(sure: Tensor, maybe: Tensor, capacity: Tensor, k: int) -> Tensor:
    """Return ascending indices ``[rows, k]`` of all entries in ``sure`` and of the first
    ``capacity`` in ``maybe``, then ``n``."""
    second = torch.where(
        torch.arange(k, device=sure.device) < capacity, _first(maybe, k), sure.shape[1]
    )
    return cut(torch.cat([_first(sure, k), second], dim=1).sort(dim=-1).values, k)


def _first(mask: Tensor, k: int) -> Tensor:
    """Return the lowest indices of each row at which the mask holds, int64 ``[rows, k]``, then
    ``n``."""
    rows, entries = mask.shape
    if isinstance(rows, int) and rows <= FEW_ROWS:
        found = torch.stack(
            [torch.nonzero_static(row, size=k).squeeze(1) for row in mask.unbind(0)]
        )
        return torch.where(found < 0, entries, found)
    before = mask.cumsum(-1, dtype=torch.int32)
    return torch.searchsorted(before, ranks_up_to(k, before))


# --- a counter-based generator --------------------------------------------------------------------

_MASK = 0xFFFFFFFF


def _mix(counter: Tensor, key: Tensor | int) -> Tensor:
    """Return 32 well mixed bits of a counter and a key below 2^32; products stay below 2^59, so
    that they never overflow."""
    mixed = counter ^ key
    for _ in range(2):
        mixed = ((mixed >> 16 ^ mixed) * 0x45D9F3B) & _MASK
    return mixed >> 16 ^ mixed


def _one_of_each_stretch(entries: int, count: int, key: Tensor) -> Tensor:
    """Return ascending random indices, int64 ``[rows, count]``: one from each of ``count`` equal
    stretches of ``0 ... entries``.

    ``key`` is int64 ``[rows, 1]``.
    """
    number = torch.arange(count + 1, device=key.device)
    edges = number * entries // count
    length = edges[1:] - edges[:-1]
    return edges[:-1] + (_mix(number[:-1], key) * length >> 32)
