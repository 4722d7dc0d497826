"""Scatter the values of sparse rows to their indices, separately or summed over ranks."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.sparse import is_finite, received


@tile
def sparse_sum(
    values,
    indices,
    starts,
    out,
    n,
    k,
    blocks,
    value_pitch,
    ranks,
    SUM: tl.constexpr,
    FORM: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows of chosen values to float32: their sum ``[n]``, in the order of the ranks, or each of
    them ``[rows, n]``.

    ``values`` are codes, ``value_pitch`` apart from row to row; ``indices`` int32 ``[ranks, k]``,
    ascending; ``starts`` int32 ``[ranks, blocks + 1]``: with which slot each block of the output
    begins. A block is summed where it will lie, by one program: one rank is added when all of the
    one before is. Of a row, all indices differ.
    """
    number = tl.program_id(0)
    row = number // blocks
    block = number % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    to = out + row.to(tl.int64) * n
    tl.store(to + at, at * 0.0, mask=at < n)
    poisoned = row < 0
    for ahead in range(ranks):
        rank = row + ahead
        mine = indices + rank.to(tl.int64) * k
        codes = values + rank.to(tl.int64) * value_pitch
        slot = tl.load(starts + rank * (blocks + 1) + block)
        end = tl.load(starts + rank * (blocks + 1) + block + 1)
        head = received(tl.load(codes), FORM, VALUE)
        poisoned = poisoned | ((tl.load(mine) == n) & (not is_finite(head)))
        tl.debug_barrier()
        for j in range(slot, end, STEP):
            slots = j + tl.arange(0, STEP)
            place = tl.load(mine + slots, mask=slots < end, other=-1)
            inside = (place >= block * BLOCK) & (place < (block + 1) * BLOCK) & (place < n)
            value = received(tl.load(codes + slots, mask=inside, other=0), FORM, VALUE)
            if SUM:
                value += tl.load(to + place, mask=inside, other=0.0)
            tl.store(to + place, value, mask=inside)
    if poisoned:  # rare
        tl.debug_barrier()
        tl.store(to + at, at * 0.0 + float("nan"), mask=at < n)
