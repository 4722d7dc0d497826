"""Choose the window of exponents that get short codes: the one with the fewest bits, of all starts
around the median, from counts of ones of bit planes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commpass.codecs.exponent.bits import any_of, count, equals, materialized, spread, subtract
from commpass.codecs.exponent.ladder import BINS, Ladder


def choose(
    ladder: Ladder, planes: Sequence[Tensor], values: Tensor, columns: int
) -> tuple[Tensor, Tensor]:
    """Return the start of the outermost window and the mode of each chunk, int32 ``[rows, chunks,
    1]``.

    ``planes`` ``[rows, chunks, columns]`` are bit planes of exponents, ``values`` ``[chunks, 1]``
    the number of values of each chunk. The median is the lower median of the nonzero exponents. Of
    equal gains the first is chosen. All arithmetic is on integers, so the order does not matter.
    """
    present = any_of(planes)
    number = total(present)
    median = median_of(planes, present, number)
    base = materialized(median - ladder.below)
    offset = subtract(planes, spread(base.expand(-1, -1, columns), 9))
    near = present & ~any_of(offset[4:])
    bins = [total(term & near) for term in equals(offset[:4], range(BINS))]
    gains = ladder.gains(bins, values - number, len(planes))
    best, place = gains[0], torch.zeros_like(base)
    for index, gain in enumerate(gains[1:], start=1):
        better = gain > best
        place = materialized(torch.where(better, index, place))
        best = materialized(torch.where(better, gain, best))
    mode = torch.div(place, ladder.starts, rounding_mode="floor")
    return materialized(base + place - mode * ladder.starts), materialized(mode)


def total(counts: Tensor) -> Tensor:
    """Count the ones of all words of a chunk, ``[rows, chunks, 1]``."""
    return count(counts).sum(2, keepdim=True, dtype=torch.int32)


def median_of(planes: Sequence[Tensor], present: Tensor, number: Tensor) -> Tensor:
    """Return the lower median of the ``number`` exponents under ``present``, bit by bit from the
    highest: each bit keeps the half that contains it."""
    rank, left, median = (number - 1).clamp_min(0) >> 1, present, torch.zeros_like(number)
    for bit in reversed(range(len(planes))):
        lower = total(left & ~planes[bit])
        upper = materialized(-(rank >= lower).to(torch.int32))
        rank = materialized(rank - (lower & upper))
        median = median | ((upper & 1) << bit)
        left = materialized(left & (planes[bit] ^ ~upper))
    return median
