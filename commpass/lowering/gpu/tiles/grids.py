"""Grids on tiles: numbers in grid units to codes below 2^bits, as int32, and back. One pair of
functions for each type of ``codecs.block.grids``, with its parameters as constants."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.numbers import (
    INFINITY_BITS,
    MAGIC,
    MAGIC_BITS,
    SIGN,
    bits_of,
    full_like,
    is_finite,
    middle_of_cell,
    middles_of_pairs,
    number_of,
    numbers_of_pairs,
    of_bits,
    round_to_even,
    scaled_pairs,
    size_bits,
    whole_below,
)
from commpass.lowering.gpu.tiles.packing import unpacked


@tile
def clamped(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.minimum(tl.maximum(x, LOW), HIGH)


@tile
def encode_int(x, noise, BITS: tl.constexpr, CUT: tl.constexpr, MARKS: tl.constexpr):
    """``CUT``: whether values may lie outside the grid. ``noise`` is 0 for the nearest."""
    LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
    MIDDLE: tl.constexpr = 2 ** (BITS - 1)
    if noise is None:
        if CUT:
            x = clamped(x, -LARGEST, LARGEST)
        # MIDDLE is even, so a tie goes where it would without it; the sum is there for nothing.
        codes = bits_of(x + (MAGIC + MIDDLE)) - MAGIC_BITS
    else:
        # One below the least is enough to be cut off, and far values stay in reach of `whole`.
        x = clamped(x, -LARGEST - 2.0, LARGEST + 2.0) + noise
        codes = tl.minimum(tl.maximum(whole_below(x), -LARGEST), LARGEST) + MIDDLE
    return codes


@tile
def marked(codes, x):
    """Code 0 where a value is not finite."""
    return tl.where(is_finite(x), codes, 0)


@tile
def decode_int(codes, BITS: tl.constexpr, MARKS: tl.constexpr, BYTES: tl.constexpr):
    values = number_of(codes, 2 ** (BITS - 1), 0, BYTES and BITS == 8)
    if MARKS:
        values = tl.where(codes == 0, float("nan"), values)
    return values


@tile
def decode_int4(raw, NVIDIA: tl.constexpr):
    """Bytes ``[blocks, 1, bytes]`` with two codes each to numbers ``[blocks, 2, bytes]``."""
    return numbers_of_pairs(raw, 8, 0, NVIDIA)


@tile
def scaled_int4(raw, number, PAIRED: tl.constexpr, NVIDIA: tl.constexpr):
    """``decode_int4`` times a positive number below 2^100. ``PAIRED``: see
    ``parts.scaled_bytes``."""
    if NVIDIA == 1 or (NVIDIA == 2 and PAIRED):
        values = scaled_pairs(raw, number, 8, NVIDIA == 2)
    else:
        values = decode_int4(raw, NVIDIA) * number
    return values


@tile
def encode_level(x, noise, BITS: tl.constexpr, LARGEST: tl.constexpr):
    MOST: tl.constexpr = 2**BITS - 1
    shifted = clamped(x + LARGEST, -1.0, MOST + 1.0)
    codes = round_to_even(shifted) if noise is None else whole_below(shifted + noise)
    return tl.minimum(tl.maximum(codes, 0), MOST)


@tile
def decode_level(codes, LARGEST: tl.constexpr):
    return number_of(codes, LARGEST, 0, False)


@tile
def encode_companded(
    y,
    K: tl.constexpr,
    GAIN: tl.constexpr,
    CELLS: tl.constexpr,
    CUT: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    """Of numbers in grid units times ``gain / (2 * CELLS)``.

    ``NVIDIA``: of numbers times ``sqrt(k) / largest``, which fused products round down without
    comparisons. ``CUT``: whether they may lie outside the grid.
    """
    if NVIDIA:
        root = tl.rsqrt(tl.fma(y, y, full_like(y, 1.0)))
        # Half a cell less, so that the nearest whole number is the one below, also of zero.
        share = tl.fma(y, root, full_like(y, (2.0**-22 - 0.5) / GAIN))
        c = tl.fma(share, full_like(y, GAIN), full_like(y, MAGIC + CELLS))
        if CUT:
            c = clamped(c, MAGIC, MAGIC + (2 * CELLS - 1))
        codes = bits_of(c) & (2 * CELLS - 1)
    else:
        y = y * (2 * CELLS)
        c = y * tl.rsqrt(y * y * K + 1.0)  # below CELLS * 1.5, however large y is
        codes = tl.minimum(tl.maximum(tl.floor(c).to(tl.int32) + CELLS, 0), 2 * CELLS - 1)
    return codes


@tile
def decode_companded(
    codes,
    POWER: tl.constexpr,
    ONE_K: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    """Numbers in grid units; ``NVIDIA``, with an INNER of 1: times ``sqrt(k) / largest``."""
    if NVIDIA:
        values = uncompanded(middle_of_cell(codes, UNIT, BITS), ONE_K, INNER)
    else:
        # The middle of a cell times the largest number, which is a power of two.
        c = number_of(codes, 2 ** (BITS - 1) - 0.5, POWER, False)
        values = c * tl.rsqrt(ONE_K - c * c * K)
    return values


@tile
def decode_companded4(
    raw,
    POWER: tl.constexpr,
    ONE_K: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    INNER: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    """As ``decode_companded``, of bytes as in ``decode_int4``."""
    if NVIDIA:
        values = uncompanded(middles_of_pairs(raw, UNIT), ONE_K, INNER)
    else:
        codes = unpacked(raw.to(tl.int32), 4, 2)
        values = decode_companded(codes, POWER, ONE_K, K, UNIT, INNER, 4, False)
    return values


@tile
def uncompanded(c, ONE_K: tl.constexpr, INNER: tl.constexpr):
    """``c / sqrt(ONE_K - INNER c^2)``, one product less for an INNER of 1."""
    product = c if INNER == 1 else c * INNER
    # Taking the size is free, a minus sign is not.
    return c * tl.rsqrt(tl.abs(tl.fma(c, product, full_like(c, -ONE_K))))


@tile
def of_companded(x, SCALE: tl.constexpr, NVIDIA: tl.constexpr):
    """Decoded numbers, or a scale that they are multiplied by, times what decode leaves out."""
    return x * SCALE if NVIDIA else x


@tile
def encode_rank(rank, x, BITS: tl.constexpr):
    """The code of the level of a rank among the positive ones, with the sign of x."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    return tl.where(x < 0, HALF - 1 - rank, HALF + rank)


@tile
def rank_of(codes, BITS: tl.constexpr):
    """The inverse: the bits below the highest, inverted where that is 0."""
    return (codes ^ ((codes >> (BITS - 1)) - 1)) & (2 ** (BITS - 1) - 1)


@tile
def signed(size, codes, BITS: tl.constexpr):
    return of_bits(bits_of(size) | (((codes >> (BITS - 1)) - 1) & SIGN))


# --- 4-bit and 6-bit floats ----------------------------------------------------------------------


@tile
def encode_minifloat(x, BITS: tl.constexpr, MANTISSA: tl.constexpr, POWER: tl.constexpr):
    """The least number above zero is 2^POWER. NaN becomes the largest number.

    Codes are a concave function of sizes, with a line for each exponent: they are the least of all
    lines. Products with powers of two are exact, so a sum rounds once.
    """
    positive = tl.minimum(x, 1.0)  # also of NaN
    size = tl.abs(x)
    LARGEST: tl.constexpr = (1 << (BITS - 1)) - 1
    codes = tl.full(x.shape, MAGIC_BITS + LARGEST, tl.int32)
    for line in tl.static_range(LARGEST >> MANTISSA):
        code = tl.fma(size, 2.0 ** (-POWER - line), MAGIC + (line << MANTISSA))
        codes = tl.minimum(codes, bits_of(code))
    sign = (bits_of(positive) >> (32 - BITS)) & (1 << (BITS - 1))
    return (codes & LARGEST) | sign


@tile
def decode_minifloat(codes, BITS: tl.constexpr, DROP: tl.constexpr, POWER: tl.constexpr):
    """The bits of a float32, times 2^POWER: its exponent is also that of the smallest numbers."""
    size = (codes << DROP) & (((1 << (BITS - 1)) - 1) << DROP)
    sign = (codes << (32 - BITS)) & SIGN
    return of_bits(size | sign) * 2.0**POWER


# --- 8-bit floats ---------------------------------------------------------------------------------


@tile
def encode_e4m3(x, LARGEST: tl.constexpr, MARKS: tl.constexpr, HARDWARE: tl.constexpr):
    if MARKS:
        x = tl.where(is_finite(x), x, float("nan"))
    if HARDWARE:
        if LARGEST != 448:  # the cast itself cuts at the largest number
            x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        a = size_bits(x)
        cut = tl.minimum(a, bits_of(tl.full(x.shape, LARGEST, tl.float32)))
        normal = ((cut + 0x7FFFF + ((cut >> 20) & 1)) >> 20) - (120 << 3)
        # From 2^14 on a float32 has a unit of 2^-9, that of the smallest numbers of e4m3.
        small = bits_of(of_bits(cut) + 16384.0) - 0x46800000
        code = tl.where(cut < (121 << 23), small, normal)
        code = tl.where(a > INFINITY_BITS, 0x7F, code) | ((bits_of(x) >> 24) & 0x80)
    return code


@tile
def decode_e4m3(codes, HARDWARE: tl.constexpr):
    if HARDWARE:
        values = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        size = codes & 0x7F
        number = of_bits(size << 20) * (2.0**120)
        number = tl.where(size == 0x7F, float("nan"), number)
        values = of_bits(bits_of(number) | ((codes & 0x80) << 24))
    return values


@tile
def encode_e5m2(x, LARGEST: tl.constexpr, MARKS: tl.constexpr, HARDWARE: tl.constexpr):
    if MARKS:
        x = tl.where(is_finite(x), x, float("nan"))
    if HARDWARE:
        if LARGEST != 57344:  # the cast itself cuts at the largest number
            x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        code = x.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        a = size_bits(x)
        cut = tl.minimum(a, bits_of(tl.full(x.shape, LARGEST, tl.float32)))
        normal = ((cut + 0xFFFFF + ((cut >> 21) & 1)) >> 21) - (112 << 2)
        small = bits_of(of_bits(cut) + 128.0) - 0x43000000  # a unit of 2^-16
        code = tl.where(cut < (113 << 23), small, normal)
        code = tl.where(a > INFINITY_BITS, 0x7F, code) | ((bits_of(x) >> 24) & 0x80)
    return code


@tile
def decode_e5m2(codes):
    """Its bits are the upper half of a float16's."""
    return (codes << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
