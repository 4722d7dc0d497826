"""Transforms on tiles ``[blocks, parts, part]`` of float32: see ``codecs.block.transforms``."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.numbers import bits_of, block_max, block_min, of_bits, sum_of


@tile
def butterfly(x, STEP: tl.constexpr):
    """One level of the fast Walsh-Hadamard transform: sums and differences of what lies STEP
    apart, of a tile ``[blocks, size]``."""
    BLOCKS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, (BLOCKS, SIZE // (2 * STEP), 2, STEP))
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    both = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(both, (BLOCKS, SIZE))


@tile
def hadamard(x, WIDTH: tl.constexpr):
    """``H @ x`` for each WIDTH values, unnormalised, from the nearest pairs outwards."""
    STEPS: tl.constexpr = WIDTH.bit_length() - 1
    whole = tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
    for step in tl.static_range(STEPS):
        whole = butterfly(whole, 1 << step)
    return tl.reshape(whole, x.shape)


@tile
def fixed_signs(inside, SCALE: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """SCALE with the fixed sign of each place: a bent function of it, whose low SPLIT bits and the
    others are paired apart. A product sums the pairs in one place, whose lowest bit is the
    parity."""
    place = inside & (WIDTH - 1)
    low = place & ((1 << SPLIT) - 1)
    high = place >> SPLIT
    both = (low & (low >> 1) & 0x55) ^ (high & (high >> 1) & 0x55)
    return of_bits(bits_of(tl.full(inside.shape, SCALE, tl.float32)) ^ (((both * 0x55) >> 6) << 31))


@tile
def pivot_of(x, inside):
    """The place of a value that is more than twice as large as all others of its block, else 0;
    the first of equals."""
    size = tl.abs(x)
    first = block_max(size)
    at = block_min(tl.where(size == first, inside, x.shape[1] * x.shape[2] - 1))
    second = block_max(tl.where(inside == at, 0.0, size))
    return tl.where(first > 2 * second, at, 0)


@tile
def swapped(x, inside, at):
    """The first value of each block and the one at a place change places; its own inverse."""
    chosen = sum_of(tl.where(inside == at, x, 0.0))
    first = sum_of(tl.where(inside == 0, x, 0.0))
    return tl.where(inside == 0, chosen, tl.where(inside == at, first, x))
