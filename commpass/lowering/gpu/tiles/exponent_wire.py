"""Where things lie in a row of the codec ``exponent``, and where a tile's share of a row begins.

A *tile* is a run of ``COLUMNS`` neighbouring columns of a row, what one program works on. What
depends on all tiles before it is found without a scan over them: each tile writes its sums to
``tallies`` and adds them to those of its group of ``GROUP`` tiles in ``groups``; a later kernel
adds up the groups before its own, and the tiles before it in its own.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile

LANES = 32
ROOM = 256
"""Words of the dynamic part for each chunk."""
BIAS = 8
MANY = 256
WILD = 512
WILD_BITS = 8192
"""Bits of the exponents of a wild chunk."""


@tile
def header_words(chunks):
    return LANES + ((chunks + 1) // 2 + LANES - 1) // LANES * LANES


@tile
def row_words(chunks, STATIC: tl.constexpr):
    return tl.cast(chunks, tl.int64) * (STATIC * LANES + ROOM) + header_words(chunks)


@tile
def header_of(row, chunks, STATIC: tl.constexpr):
    """Pointer to the header of a row."""
    return row + tl.cast(chunks, tl.int64) * (STATIC * LANES)


@tile
def dynamic_of(row, chunks, STATIC: tl.constexpr):
    """Pointer to the dynamic part of a row."""
    return header_of(row, chunks, STATIC) + header_words(chunks)


@tile
def marks_of(row, chunks, STATIC: tl.constexpr):
    """Pointer to the marks of chunks, int16."""
    return (header_of(row, chunks, STATIC) + LANES).to(tl.pointer_type(tl.int16))


@tile
def chunk_marks(row, tile_, chunks, STATIC: tl.constexpr, COLUMNS: tl.constexpr):
    """The marks of the chunks of a tile, int32; WILD behind the last chunk."""
    chunk = tile_ * (COLUMNS // LANES) + tl.arange(0, COLUMNS // LANES)
    marks = tl.load(marks_of(row, chunks, STATIC) + chunk, mask=chunk < chunks, other=WILD)
    return marks.to(tl.int32)


@tile
def on_columns(of_chunks, COLUMNS: tl.constexpr):
    """What holds for chunks, for each of their columns."""
    wide = tl.broadcast_to(of_chunks[:, None], (COLUMNS // LANES, LANES))
    return tl.reshape(wide, (COLUMNS,))


@tile
def chunk_sums(of_columns, COLUMNS: tl.constexpr):
    return tl.sum(tl.reshape(of_columns, (COLUMNS // LANES, LANES)), 1)


@tile
def add_up(
    tallies,
    groups,
    row,
    tile_,
    many_groups,
    counter,
    sum_,
    COUNTERS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Writes the sum of a tile, and adds it to that of its group. Sums of whole numbers: the same
    in any order."""
    at = tl.cast(row, tl.int64) * COUNTERS + counter
    tl.store(tallies + at * many_groups * GROUP + tile_, sum_)
    sum_ = sum_.to(groups.dtype.element_ty)
    padded = (many_groups + GROUP - 1) // GROUP * GROUP
    tl.atomic_add(groups + at * padded + tile_ // GROUP, sum_, sem="relaxed")


@tile
def before(tallies, groups, row, tile_, many_groups, COUNTERS: tl.constexpr, GROUP: tl.constexpr):
    """For each counter the sum of all tiles of a row before this one, and that of all its tiles:
    two tuples, int64."""
    padded = (many_groups + GROUP - 1) // GROUP * GROUP
    groups += tl.cast(row, tl.int64) * COUNTERS * padded
    tallies += tl.cast(row, tl.int64) * COUNTERS * many_groups * GROUP
    tallies += tile_ // GROUP * GROUP
    lane = tl.arange(0, GROUP)
    earlier = ()
    whole = ()
    # Both buffers are as long as whole groups, so that nothing has to be masked.
    for counter in tl.static_range(COUNTERS):
        sums = tl.load(tallies + counter * many_groups * GROUP + lane)
        sums = tl.where(lane < tile_ % GROUP, sums, 0).to(groups.dtype.element_ty)
        earlier = earlier + (sums,)
        whole = whole + (tl.zeros((GROUP,), groups.dtype.element_ty),)
    for first in range(0, padded, GROUP):
        is_earlier = lane < tile_ // GROUP - first
        more_earlier = ()
        more = ()
        for counter in tl.static_range(COUNTERS):
            sums = tl.load(groups + counter * padded + first + lane)
            more = more + (whole[counter] + sums,)
            more_earlier = more_earlier + (earlier[counter] + tl.where(is_earlier, sums, 0),)
        earlier = more_earlier
        whole = more
    sums_before = ()
    sums_of_all = ()
    for counter in tl.static_range(COUNTERS):
        sums_before = sums_before + (tl.sum(earlier[counter], 0).to(tl.int64),)
        sums_of_all = sums_of_all + (tl.sum(whole[counter], 0).to(tl.int64),)
    return sums_before, sums_of_all
