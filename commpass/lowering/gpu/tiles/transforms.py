"""Transforms on tiles ``[blocks, parts, part]`` of float32: see ``codecs.block.transforms``."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.numbers import bits_of, block_max, block_min, of_bits, sum_of


@tile
def halves(x, STEP: tl.constexpr, GROUP: tl.constexpr):
    """The values of a tile ``[blocks, size]`` that have a partner STEP further, and these
    partners: two tiles ``[blocks / GROUP, size / 2 / STEP, GROUP, STEP]``.

    Triton gives neighbouring threads the last two axes. So if ``GROUP * STEP`` is their number,
    each holds all values of a block that are a multiple of STEP apart.
    """
    BLOCKS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, (BLOCKS // GROUP, GROUP, SIZE // (2 * STEP), 2, STEP))
    return tl.split(tl.permute(pairs, (0, 2, 1, 4, 3)))


@tile
def sums_and_differences(a, b):
    """A tile ``[blocks, size]`` of the sums and the differences of ``halves``."""
    both = tl.permute(tl.join(a + b, a - b), (0, 2, 1, 4, 3))
    return tl.reshape(both, (a.shape[0] * a.shape[2], 2 * a.shape[1] * a.shape[3]))


@tile
def butterfly(x, STEP: tl.constexpr, GROUP: tl.constexpr):
    """One level of the fast Walsh-Hadamard transform of a tile ``[blocks, size]``."""
    a, b = halves(x, STEP, GROUP)
    return sums_and_differences(a, b)


@tile
def hadamard_steps(x, STEPS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr):
    """The first STEPS levels of the transform of a tile ``[blocks, size]``, from the nearest pairs
    outwards."""
    for step in tl.static_range(STEPS):
        x = butterfly(x, 1 << step, GROUP if (1 << step) == PART else 1)
    return x


@tile
def hadamard(x, WIDTH: tl.constexpr):
    """``H @ x`` for each WIDTH values, unnormalised."""
    whole = tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
    return tl.reshape(hadamard_steps(whole, WIDTH.bit_length() - 1, 1, 0), x.shape)


@tile
def hadamard_grouped(x, WIDTH: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr):
    """The same, ``grouped``. After ``log2(PART)`` levels a thread holds values that are PART apart:
    see ``halves``."""
    whole = tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
    whole = hadamard_steps(whole, WIDTH.bit_length() - 1, GROUP, PART)
    return grouped(tl.reshape(whole, x.shape), GROUP, PART)


@tile
def hadamard_and_peak(x, WIDTH: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr):
    """The same, and the peak of each block. The larger size of a sum and a difference
    is the sum of the sizes, rounded alike, so the sizes of all values are not computed."""
    ACROSS: tl.constexpr = GROUP if 2 * PART == WIDTH else 1
    whole = tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
    whole = hadamard_steps(whole, WIDTH.bit_length() - 2, GROUP, PART)
    a, b = halves(whole, WIDTH // 2, ACROSS)
    sizes = tl.permute(tl.abs(a) + tl.abs(b), (0, 2, 1, 3))
    sizes = tl.reshape(sizes, (whole.shape[0], 1, whole.shape[1] // 2))
    whole = tl.reshape(sums_and_differences(a, b), x.shape)
    # In this order: else Triton (3.7) computes the transform twice, in two layouts.
    whole = grouped(whole, GROUP, PART)
    sizes = grouped(sizes, GROUP, PART)
    return whole, of_bits(block_max(bits_of(sizes)))


@tile
def grouped(x, GROUP: tl.constexpr, PART: tl.constexpr):
    """A tile ``[blocks, parts, part]`` as ``[blocks / GROUP, size / PART, GROUP, PART]``: see
    ``halves``."""
    SIZE: tl.constexpr = x.shape[1] * x.shape[2]
    split = tl.reshape(x, (x.shape[0] // GROUP, GROUP, SIZE // PART, PART))
    return tl.permute(split, (0, 2, 1, 3))


@tile
def ungrouped(x, PARTS: tl.constexpr):
    """The inverse of ``grouped``, a tile ``[blocks, parts, part]``."""
    BLOCKS: tl.constexpr = x.shape[0] * x.shape[2]
    SIZE: tl.constexpr = x.shape[1] * x.shape[3]
    return tl.reshape(tl.permute(x, (0, 2, 1, 3)), (BLOCKS, PARTS, SIZE // PARTS))


@tile
def number_of_block(number):
    """A number of each block of a tile that was ``grouped``, as ``[blocks, 1, 1]``."""
    return tl.reshape(number, (number.shape[0] * number.shape[2], 1, 1))


@tile
def fixed_signs(inside, SCALE: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """SCALE with the fixed sign of each place: a bent function of it, whose low SPLIT bits and the
    others are paired apart. One of both is often the same for all values of a thread, so their
    signs are computed apart."""
    place = inside & (WIDTH - 1)
    low = sign_of_pairs(place & ((1 << SPLIT) - 1))
    high = sign_of_pairs(place >> SPLIT)
    return of_bits(bits_of(tl.full(inside.shape, SCALE, tl.float32)) ^ low ^ high)


@tile
def sign_of_pairs(bits):
    """The sign bit of ``(-1) ** pairs``, the number of pairs of ones among four pairs of bits. A
    product sums them in one place, whose lowest bit is the parity."""
    return (((bits & (bits >> 1) & 0x55) * 0x55) >> 6) << 31


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
