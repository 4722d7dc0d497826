"""The layout of a row of the codec ``exponent``, and the start of a tile's share of it.

A *tile* is a run of ``COLUMNS`` consecutive columns of a row, processed by one program. Offsets
that depend on all earlier tiles are computed without a scan. Each tile writes its sums to
``tallies`` and adds them to the sums of its group of ``GROUP`` tiles in ``groups``. A later kernel
adds the groups before its own, and the earlier tiles of its group.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile

LANES = 32
BIAS = 16
START = 511
MODE_AT = 9
MODE = 3
LENGTH_AT = 16
"""Fields of a chunk's mark: the window start, the mode, and the number of 16-bit words in the
dynamic part."""


@tile
def row_words(static, columns, RAW: tl.constexpr):
    """Words of a row; ``static`` are units of 16 bytes."""
    return tl.cast(static, tl.int64) * 4 + tl.cast(columns, tl.int64) * RAW


@tile
def marks_of(row, columns, STATIC: tl.constexpr):
    """Pointer to the marks of chunks."""
    return row + tl.cast(columns, tl.int64) * STATIC


@tile
def lanes_of(chunk, columns):
    """How many columns chunks have: 32, but for the last one."""
    return tl.minimum(columns - chunk * LANES, LANES)


@tile
def chunk_marks(
    row, tile_, columns, STATIC: tl.constexpr, RAW: tl.constexpr, COLUMNS: tl.constexpr
):
    """The marks of the chunks of a tile, int32, and how many 16-bit words each has in the dynamic
    part: within its room, whatever the marks say, and none behind the last chunk."""
    chunk = tile_ * (COLUMNS // LANES) + tl.arange(0, COLUMNS // LANES)
    there = chunk * LANES < columns
    marks = tl.load(marks_of(row, columns, STATIC) + chunk, mask=there, other=0)
    most = lanes_of(chunk, columns) * (2 * RAW)
    length = tl.minimum((marks >> LENGTH_AT) & 0xFFFF, most)
    return marks, tl.where(there, length, 0), there & (length == most)


@tile
def on_columns(of_chunks, COLUMNS: tl.constexpr):
    """What holds for chunks, for each of their columns."""
    wide = tl.broadcast_to(of_chunks[:, None], (COLUMNS // LANES, LANES))
    return tl.reshape(wide, (COLUMNS,))


@tile
def chunk_sums(of_columns, COLUMNS: tl.constexpr):
    return tl.sum(tl.reshape(of_columns, (COLUMNS // LANES, LANES)), 1)


@tile
def add_up(tallies, groups, row, tile_, many_groups, sum_, GROUP: tl.constexpr):
    """Writes the sum of a tile, and adds it to that of its group. Sums of whole numbers: the same
    in any order."""
    at = tl.cast(row, tl.int64)
    tl.store(tallies + at * many_groups * GROUP + tile_, sum_)
    sum_ = sum_.to(groups.dtype.element_ty)
    padded = (many_groups + GROUP - 1) // GROUP * GROUP
    tl.atomic_add(groups + at * padded + tile_ // GROUP, sum_, sem="relaxed")


@tile
def before(tallies, groups, row, tile_, many_groups, GROUP: tl.constexpr):
    """The sum of all tiles of a row before this one, int64."""
    padded = (many_groups + GROUP - 1) // GROUP * GROUP
    groups += tl.cast(row, tl.int64) * padded
    tallies += tl.cast(row, tl.int64) * many_groups * GROUP + tile_ // GROUP * GROUP
    lane = tl.arange(0, GROUP)
    # Both buffers are as long as whole groups, so that nothing but what comes later is masked.
    sums = tl.load(tallies + lane)
    sums = tl.where(lane < tile_ % GROUP, sums, 0).to(groups.dtype.element_ty)
    sums += tl.where(lane < tile_ // GROUP, tl.load(groups + lane), 0)
    if tile_ // GROUP > GROUP:  # rare
        for first in range(GROUP, tile_ // GROUP, GROUP):
            more = tl.load(groups + first + lane)
            sums += tl.where(lane < tile_ // GROUP - first, more, 0)
    return tl.sum(sums, 0).to(tl.int64)
