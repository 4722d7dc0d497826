"""The bits of numbers, and rounding to narrower formats. Only integer and plain float32 operations
are used, so that the interpreter and every GPU give the same bits.

A float32 whose unit in the last place is 1 (from 2^23 on) holds a rounded integer in its lowest
bits. Adding 1.5 * 2^23 rounds to the nearest, ties to even, without a slow conversion.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile

TINY = 2.0**-126
LIMIT = (2 - 2**-23) * 2.0**127
BF16_LIMIT = (2 - 2**-7) * 2.0**127
INFINITY_BITS = 0x7F800000
SIGN = -0x80000000
MAGIC = 12582912.0
MAGIC_BITS = 0x4B400000


@tile
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@tile
def of_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@tile
def size_bits(x):
    """The bits of |x|: larger for larger sizes, largest for NaN."""
    return bits_of(x) & 0x7FFFFFFF


@tile
def is_finite(x):
    return size_bits(x) < INFINITY_BITS


@tile
def reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@tile
def divided(x, BY: tl.constexpr):
    return tl.div_rn(x, tl.full(x.shape, BY, tl.float32))


@tile
def maximum(x, LOWER: tl.constexpr):
    """NaN stays NaN."""
    return tl.where(x < LOWER, LOWER, x)


@tile
def minimum(x, UPPER: tl.constexpr):
    """NaN stays NaN."""
    return tl.where(x > UPPER, UPPER, x)


@tile
def round_to_even(x):
    """The nearest whole number of |x| < 2^22, as int32; of two, the even one."""
    return bits_of(x + MAGIC) - MAGIC_BITS


@tile
def block_max(x):
    """The largest of each block of a tile ``[blocks, parts, part]``, ``[blocks, 1, 1]``."""
    return tl.max(tl.max(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@tile
def most_of_all(x):
    """The largest of a tile, NaN passed over."""
    return tl.max(tl.max(tl.max(x, axis=2), axis=1), axis=0)


@tile
def block_min(x):
    return tl.min(tl.min(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@tile
def sum_of(x):
    return tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@tile
def whole_below(x):
    """The largest whole number that is not above x, |x| < 2^22, as int32."""
    near = x + MAGIC
    above = (near - MAGIC) > x
    return bits_of(near) - MAGIC_BITS - above.to(tl.int32)


@tile
def number_of(code, LESS: tl.constexpr, POWER: tl.constexpr):
    """A whole number below 2^15, less a multiple of 2^-8, times 2^POWER, as a float: exact. The
    code is put into the mantissa of a power of two, of which a part is then subtracted; a
    conversion would be several times as slow."""
    if LESS == LESS // 1:
        bits = code + (0x4B000000 + (POWER << 23))
        number = of_bits(bits) - (8388608.0 + LESS) * 2.0**POWER
    else:
        bits = code * 256 + (0x47000000 + (POWER << 23))
        number = of_bits(bits) - (32768.0 + LESS) * 2.0**POWER
    return number


# --- storage formats ------------------------------------------------------------------------------


@tile
def up_to_bits(scale, LOW: tl.constexpr, LARGEST: tl.constexpr):
    """A positive number rounded up to one whose lowest bits are zero; NaN stays NaN."""
    bits = ((bits_of(scale) + ((1 << LOW) - 1)) >> LOW) << LOW
    return tl.minimum(of_bits(bits), LARGEST) + (scale - scale)


@tile
def nearest_bf16_bits(x):
    """The upper half of what a float32 is rounded to, ties to even. NaN may become infinite."""
    bits = bits_of(x)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@tile
def up_fp32(scale):
    return scale


@tile
def up_bf16(scale):
    return up_to_bits(scale, 16, BF16_LIMIT)


@tile
def up_pow2(scale):
    return up_to_bits(scale, 23, 2.0**127)


@tile
def nearest_fp32(number):
    return number


@tile
def nearest_bf16(number):
    """Nothing finite becomes infinite; NaN stays NaN."""
    even = of_bits(nearest_bf16_bits(number) << 16)
    return tl.maximum(tl.minimum(even, BF16_LIMIT), -BF16_LIMIT) + (number - number)


@tile
def nearest_pow2(number):
    """Half of the mantissa is midway to the next power."""
    power = ((bits_of(number) + (1 << 22)) >> 23) << 23
    return tl.minimum(of_bits(power), 2.0**127) + (number - number)


@tile
def nearest_e4m3(number):
    """Of normal numbers of e4m3."""
    bits = bits_of(number)
    even = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20
    return of_bits(even) + (number - number)


@tile
def store_fp32(place, number, mask):
    tl.store(place.to(tl.pointer_type(tl.float32)), number, mask=mask)


@tile
def store_bf16(place, number, mask):
    """The upper half of a number whose lower half is zero; NaN stays NaN."""
    upper = bits_of(number) >> 16
    upper = tl.where(number == number, upper, upper | 0x40)
    tl.store(place.to(tl.pointer_type(tl.int16)), upper.to(tl.int16), mask=mask)


@tile
def store_pow2(place, number, mask):
    exponent = (bits_of(number) >> 23) & 255
    tl.store(place.to(tl.pointer_type(tl.uint8)), exponent.to(tl.uint8), mask=mask)


@tile
def store_e4m3(place, number, mask):
    """Normal numbers of e4m3 without a sign, or NaN."""
    code = tl.minimum((size_bits(number) >> 20) - 960, 0x7F)
    tl.store(place.to(tl.pointer_type(tl.uint8)), code.to(tl.uint8), mask=mask)


@tile
def load_fp32(place, mask):
    return tl.load(place.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)


@tile
def load_bf16(place, mask):
    upper = tl.load(place.to(tl.pointer_type(tl.int16)), mask=mask, other=0)
    return of_bits(upper.to(tl.int32) << 16)


@tile
def load_pow2(place, mask):
    power = tl.load(place.to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.int32)
    return tl.where(power == 255, float("nan"), of_bits(power << 23))


@tile
def load_e4m3(place, mask):
    code = tl.load(place.to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.int32)
    return tl.where(code == 0x7F, float("nan"), of_bits(code << 20) * (2.0**120))


@tile
def load_row(place, block):
    """The float32 of a row, for each block of a tile."""
    return tl.load(place.to(tl.pointer_type(tl.float32)) + block * 0)


@tile
def store_row(place, number, block):
    """By the program with the first block."""
    tl.store(place.to(tl.pointer_type(tl.float32)) + block * 0, number, mask=block == 0)


# --- values ---------------------------------------------------------------------------------------


@tile
def to_float32(x):
    """Values of a 16-bit or 32-bit float as float32, which holds them all."""
    return x.to(tl.float32)


@tile
def clamp_to(x, LIMIT_OF: tl.constexpr):
    """Cut at the largest number of a dtype; NaN stays NaN."""
    x = tl.maximum(x, -LIMIT_OF, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LIMIT_OF, propagate_nan=tl.PropagateNan.ALL)


@tile
def rounded_bf16(x):
    """A float32 as the bits of the nearest bfloat16, int32; ties to even, NaN stays NaN."""
    return tl.where(x == x, nearest_bf16_bits(x), 0x7FC0)


@tile
def through_fp32(x, CASTS: tl.constexpr):
    return x


@tile
def through_bf16(x, CASTS: tl.constexpr):
    """Rounded to bfloat16, as a float32. ``CASTS``: by the card's own cast. Triton's interpreter
    cuts off where a card rounds, so there it is done in whole numbers."""
    return x.to(tl.bfloat16).to(tl.float32) if CASTS else of_bits(rounded_bf16(x) << 16)


@tile
def through_fp16(x, CASTS: tl.constexpr):
    return x.to(tl.float16).to(tl.float32)


@tile
def store_values_fp32(place, x, mask, CASTS: tl.constexpr):
    tl.store(place, x, mask=mask)


@tile
def store_values_fp16(place, x, mask, CASTS: tl.constexpr):
    tl.store(place, x.to(tl.float16), mask=mask)


@tile
def store_values_bf16(place, x, mask, CASTS: tl.constexpr):
    if CASTS:
        tl.store(place, x.to(tl.bfloat16), mask=mask)
    else:
        bits = rounded_bf16(x).to(tl.int16)
        tl.store(place, bits.to(tl.bfloat16, bitcast=True), mask=mask)
