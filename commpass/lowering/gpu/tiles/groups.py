"""Tile functions of grouped matmuls: which rows belong to a group is known on the device only."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile


@tile
def group_begins(ends, each, groups, total):
    """The first row of each group, from the last rows ``ends`` of those before. The rows behind the
    last group are one more, and ``total`` is the end of that. Offsets are cut to the rows that
    exist."""
    return tl.minimum(tl.maximum(tl.where(each > groups, total, ends), 0), total)


@tile
def group_place(
    slot,
    begins,
    each,
    groups,
    ranks,
    rows,
    BLOCK_M: tl.constexpr,
):
    """The shard, its first line, the group, and the lines from ``low`` up to ``high`` that belong
    to it, of the ``slot``-th pair of a tile of rows and a group.

    Pair ``tile + group`` exists for each tile that contains a row of the group. Groups are in the
    order of their rows, so no two pairs have the same number, and some numbers are of no pair:
    ``low`` is then not below ``high``.
    """
    down = (rows + BLOCK_M - 1) // BLOCK_M
    first = begins // rows * down + begins % rows // BLOCK_M + each
    before = tl.sum(((each <= groups) & (first <= slot)).to(tl.int32), axis=0)
    group = tl.maximum(before - 1, 0)
    tile_number = tl.minimum(tl.maximum(slot - group, 0), ranks * down - 1)
    shard = tile_number // down
    line = tile_number % down * BLOCK_M
    low = tl.max(tl.where(each == group, begins, 0), axis=0) - shard * rows
    high = tl.max(tl.where(each == group + 1, begins, 0), axis=0) - shard * rows
    high = tl.minimum(tl.minimum(high, rows), line + BLOCK_M)
    return shard, line, group, tl.maximum(low, line), high
