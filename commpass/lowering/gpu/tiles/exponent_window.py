"""Choose the window of a chunk: the tile functions for ``commpass.codecs.exponent.window``."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.exponent_bits import any_of, inverse, minus, ones, spread
from commpass.lowering.gpu.tiles.exponent_ladder import four_of
from commpass.lowering.gpu.tiles.exponent_wire import chunk_sums, on_columns

BINS = 16


@tile
def median_of(planes, present, number, COLUMNS: tl.constexpr):
    """The lower median of the ``number`` exponents of each chunk that are present."""
    rank = tl.maximum(number - 1, 0) >> 1
    median = tl.zeros_like(number)
    left = present
    for turn in tl.static_range(len(planes)):
        plane = planes[len(planes) - 1 - turn]
        lower = chunk_sums(ones(left & inverse(plane)), COLUMNS)
        upper = rank >= lower
        rank = tl.where(upper, rank - lower, rank)
        median = median | (upper.to(tl.int32) << (len(planes) - 1 - turn))
        turned = tl.where(upper, 0, 0xFFFFFFFF).to(tl.uint32)
        left = left & (plane ^ on_columns(turned, COLUMNS))
    return median


@tile
def choose(
    planes,
    values,
    STEPS: tl.constexpr,
    FIELDS: tl.constexpr,
    WINDOWS: tl.constexpr,
    MODES: tl.constexpr,
    NAMED: tl.constexpr,
    LOST: tl.constexpr,
    MOVED: tl.constexpr,
    STARTS: tl.constexpr,
    BELOW: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Where the outermost windows of chunks of so many values start, and their modes. Also, for
    ``codes_of``: the number of each among the starts, the four low planes of the offsets from the
    lowest start, and where the offset has no further ones.

    Of step s, ``FIELDS`` has the bits of the field after it (4 bits), ``WINDOWS`` the first of the
    bins that it names for the lowest start, and the one behind them (4 bits each). Of mode m,
    ``NAMED`` has the bits saved for a zero, ``LOST`` those that what zero moves loses, and
    ``MOVED`` its bin for the lowest start (5 bits each).
    """
    present = any_of(planes)
    number = chunk_sums(ones(present), COLUMNS)
    base = median_of(planes, present, number, COLUMNS) - BELOW
    offset = minus(planes, spread(on_columns(base, COLUMNS), 9))
    near = inverse(offset[4] | offset[5] | offset[6] | offset[7] | offset[8])
    low = four_of(offset[0], offset[1], present & near)
    high = four_of(offset[2], offset[3], present)
    bins = ()
    for pair in tl.static_range(BINS // 2):
        # Two sums of at most 1,024 at once.
        first = ones(low[2 * pair % 4] & high[pair // 2])
        second = ones(low[(2 * pair + 1) % 4] & high[pair // 2])
        both = chunk_sums(first | (second << 16), COLUMNS)
        bins = bins + (both & 0xFFFF, both >> 16)
    upto = (tl.zeros_like(number),)
    for place in tl.static_range(BINS):
        upto = upto + (upto[place] + bins[place],)
    inside = ()
    for start in tl.static_range(STARTS):
        gain = tl.zeros_like(number)
        for step in tl.static_range(STEPS):
            some = (
                upto[start + ((WINDOWS >> (8 * step + 4)) & 15)]
                - upto[start + ((WINDOWS >> (8 * step)) & 15)]
            )
            gain = gain + some * ((FIELDS >> (4 * step)) & 15)
        inside = inside + (gain,)
    zeros = values - number
    # Of equal gains the first: it comes with the largest number in the low bits.
    best = tl.full(number.shape, -1, tl.int32)
    for mode in tl.static_range(MODES + 1):
        for start in tl.static_range(STARTS):
            gain = inside[start] + zeros * ((NAMED >> (5 * mode)) & 31)
            if mode > 0:
                moved = bins[start + ((MOVED >> (5 * mode)) & 31)]
                gain = gain - moved * ((LOST >> (5 * mode)) & 31)
            best = tl.maximum(best, gain * 32 + (31 - mode * STARTS - start))
    place = 31 - (best & 31)
    mode = place // STARTS
    place = place - mode * STARTS
    return base + place, mode, place, offset[0:4], near
