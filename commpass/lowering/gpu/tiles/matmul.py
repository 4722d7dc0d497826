"""Tile functions of a matmul: the order of tiles, the product of one tile, and the operations on it
before it is encoded.

Rows of ``a`` belong to shards, one for each rank, in the order of the ranks. A tile never spans two
shards.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.layouts import ALIGNMENT
from commpass.lowering.gpu.tiles.numbers import bits_of, of_bits, to_float32


@tile
def tile_place(
    number,
    ranks,
    rows,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The shard, and in it the first row and the first column, of the ``number``-th tile.

    Shards come in order, so the first ones are complete while the last are computed. ``GROUP``
    tiles of rows share their tiles of columns, which the second-level cache then holds.
    """
    down = (rows + BLOCK_M - 1) // BLOCK_M
    along = (columns + BLOCK_N - 1) // BLOCK_N
    group = number // (GROUP * along)
    inside = number % (GROUP * along)
    height = min(ranks * down - group * GROUP, GROUP)
    line = group * GROUP + inside % height
    return line // down, line % down * BLOCK_M, inside // height * BLOCK_N


@tile
def product_by_pointers(
    a,
    b,
    row,
    column,
    rows,
    columns,
    depth,
    a_down,
    a_along,
    b_down,
    b_along,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    CASTS: tl.constexpr,
):
    """A tile of ``a @ b`` in fp32, ``a`` at its shard's first row. Rows and columns that there
    are not are those at 0 again: nobody stores them."""
    down = row + tl.arange(0, BLOCK_M)
    along = column + tl.arange(0, BLOCK_N)
    down = tl.where(down < rows, down, 0)
    along = tl.where(along < columns, along, 0)
    down = tl.max_contiguous(tl.multiple_of(down, BLOCK_M), BLOCK_M)
    along = tl.max_contiguous(tl.multiple_of(along, BLOCK_N), BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, (depth + BLOCK_K - 1) // BLOCK_K):
        deep = step * BLOCK_K + tl.arange(0, BLOCK_K)
        left_at = a + down[:, None] * a_down + deep[None, :] * a_along
        right_at = b + deep[:, None] * b_down + along[None, :] * b_along
        if WHOLE_K:
            left = tl.load(left_at)
            right = tl.load(right_at)
        else:
            left = tl.load(left_at, mask=deep[None, :] < depth, other=0.0)
            right = tl.load(right_at, mask=deep[:, None] < depth, other=0.0)
        total = multiply_add(left, right, total, CASTS)
    return total


@tile
def product_by_descriptors(
    a,
    b,
    batch,
    row,
    column,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    A_BY_ROWS: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    A_BATCHED: tl.constexpr,
    B_BATCHED: tl.constexpr,
    CASTS: tl.constexpr,
):
    """As ``product_by_pointers``, through tensor descriptors of the whole ``a`` and ``b``: ``row``
    counts from the first row of ``a``, or of its matrix for this batch. What lies outside is
    zero."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, (depth + BLOCK_K - 1) // BLOCK_K):
        deep = step * BLOCK_K
        left = part_of(a, batch, row, deep, BLOCK_M, BLOCK_K, A_BY_ROWS, A_BATCHED)
        right = part_of(b, batch, deep, column, BLOCK_K, BLOCK_N, B_BY_ROWS, B_BATCHED)
        total = multiply_add(left, right, total, CASTS)
    return total


@tile
def part_of(
    operand,
    batch,
    row,
    column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BATCHED: tl.constexpr,
):
    """A tile ``[ROWS, COLUMNS]`` of an operand through its descriptor."""
    if BATCHED:
        if BY_ROWS:
            part = tl.reshape(operand.load([batch, row, column]), (ROWS, COLUMNS))
        else:
            part = tl.reshape(operand.load([batch, column, row]), (COLUMNS, ROWS)).T
    else:
        part = operand.load([row, column]) if BY_ROWS else operand.load([column, row]).T
    return part


@tile
def multiply_add(a, b, total, CASTS: tl.constexpr):
    """``total + a @ b``. ``CASTS`` is false in Triton's interpreter, which has no products
    of bf16; those of float32 hold them all."""
    if not CASTS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@tile
def place_of_held(stored_at, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The places of values in rows that follow each other, from ``stored_at`` on."""
    return stored_at + (tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])


@tile
def part_of_held(
    held, stored_at, turn, number, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr
):
    """The ``number``-th ROWS rows of a tile that lies in memory from ``stored_at`` on."""
    place = place_of_held(stored_at + number * (ROWS * COLUMNS), ROWS, COLUMNS)
    return to_float32(tl.load(held + place, mask=mask_after(turn, ROWS, COLUMNS), other=0.0), FP8)


@tile
def mask_after(turn, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A mask of all values. What needs it must wait for the operation that returns ``turn``."""
    return tl.zeros((ROWS, COLUMNS), tl.int32) + (turn | 1) != 0


@tile
def after_stores(held, stored_at):
    """A number, once all threads of the program have stored their part of a tile. One thread adds
    nothing to the tile's first bytes and gives the others their number, behind a barrier. Triton's
    own barrier would keep a loop from being pipelined."""
    first = (held + stored_at).to(tl.pointer_type(tl.int32))
    return tl.atomic_add(first, 0, sem="acq_rel", scope="cta")


@tile
def cut_of(x, number: tl.constexpr, SLICES: tl.constexpr):
    """A part of a tile ``[rows, columns]``: of each 8 * SLICES rows the ``number``-th 8, ``[rows /
    SLICES, columns]``. Rows that lie 8 apart are in the same thread after a matmul on sm_80 and
    sm_90: nothing is moved, and an epilogue that takes one part after the other needs fewer
    registers."""
    if SLICES == 1:
        part = x
    else:
        HIGH: tl.constexpr = x.shape[0] // (8 * SLICES)
        bits = bits_of(tl.reshape(x, (HIGH, SLICES, 8, x.shape[1])))
        here = tl.arange(0, SLICES)[None, :, None, None] == number
        bits = tl.sum(tl.where(here, bits, 0), axis=1).to(tl.int32)
        part = tl.reshape(of_bits(bits), (x.shape[0] // SLICES, x.shape[1]))
    return part


@tile
def line_of(each, number: tl.constexpr, SLICES: tl.constexpr):
    """The row of a tile that is a row of a part of it."""
    return each // 8 * (8 * SLICES) + number * 8 + each % 8


@tile
def butterfly_in_place(x, STEP: tl.constexpr):
    """One level of the fast Walsh-Hadamard transform of a tile ``[blocks, size]``: sums and
    differences of what lies STEP apart.

    Each value takes the other one of its pair as the sum of both less itself, in whole numbers:
    exact, and compiled to a move, or to a shuffle between threads. No value changes its place: the
    tile keeps the layout in the registers that the tensor cores left it in.
    """
    BLOCKS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    mine = bits_of(tl.reshape(x, (BLOCKS, SIZE // (2 * STEP), 2, STEP)))
    other = (tl.sum(mine, axis=2, keep_dims=True) - mine).to(tl.int32)
    sign = tl.arange(0, 2)[None, None, :, None] << 31
    return tl.reshape(of_bits(other) + of_bits(mine ^ sign), (BLOCKS, SIZE))


@tile
def hadamard(x, WIDTH: tl.constexpr):
    """As that of ``transforms``, whose place it takes here: the same bits, without shared memory
    for a tile of this size."""
    STEPS: tl.constexpr = WIDTH.bit_length() - 1
    whole = tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
    for step in tl.static_range(STEPS):
        whole = butterfly_in_place(whole, 1 << step)
    return tl.reshape(whole, x.shape)


@tile
def filled_by_first(region, length, line, column):
    """Zeros behind a region of a wire, up to the next multiple of ALIGNMENT bytes, from the first
    tile of its row."""
    place = length + tl.arange(0, ALIGNMENT)
    end = (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    # Nothing is written by others: their end is their beginning. A mask of a number and a vector
    # is none for every interpreter.
    end = tl.where((line == 0) & (column == 0), end, length)
    tl.store(region + place, tl.zeros((ALIGNMENT,), tl.uint8), mask=place < end)
