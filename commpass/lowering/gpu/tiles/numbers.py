"""The bits of numbers, and rounding to narrower formats. Only integer and plain float32 operations
are used, so that the interpreter and every GPU give the same bits.

A float32 whose unit in the last place is 1 (from 2^23 on) holds a rounded integer in its lowest
bits. Adding 1.5 * 2^23 rounds to the nearest, ties to even, without a slow conversion.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.packing import unpacked

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
def full_like(x, NUMBER: tl.constexpr):
    return tl.full(x.shape, NUMBER, tl.float32)


@tile
def reciprocal(x):
    return tl.div_rn(full_like(x, 1.0), x)


@tile
def reciprocal_of_short(x, NORMAL: tl.constexpr):
    """The same for a number of at most 11 bits, without a branch: on NVIDIA a quotient is off by
    two roundings at most, and one step of Newton's method leaves an error far below the distance of
    such an inverse from the middle of two floats. ``NORMAL``: neither x nor its inverse is below
    the normal numbers, or x is NaN."""
    if NORMAL:
        near = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        near = full_like(x, 1.0) / x
    return tl.fma(near, tl.fma(-x, near, full_like(x, 1.0)), near)


@tile
def divided(x, BY: tl.constexpr):
    """By the usual powers of two: multiplied by their inverse, which gives the same bits."""
    if BY == 1 or BY == 2 or BY == 4 or BY == 8 or BY == 16 or BY == 32:
        quotient = x * (1.0 / BY)
    else:
        quotient = tl.div_rn(x, full_like(x, BY))
    return quotient


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
    """The largest of each block of a tile ``[blocks, parts, part]``, ``[blocks, 1, 1]``, or of one
    that is ``grouped``."""
    if len(x.shape) == 4:
        most = tl.max(tl.max(x, axis=1, keep_dims=True), axis=3, keep_dims=True)
    else:
        most = tl.max(tl.max(x, axis=2, keep_dims=True), axis=1, keep_dims=True)
    return most


@tile
def most_of_all(x):
    """The largest of a tile, NaN passed over."""
    return tl.max(tl.max(tl.max(x, axis=2), axis=1), axis=0)


@tile
def block_min(x):
    return tl.min(tl.min(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@tile
def sum_of(x):
    if len(x.shape) == 4:
        total = tl.sum(tl.sum(x, axis=1, keep_dims=True), axis=3, keep_dims=True)
    else:
        total = tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)
    return total


@tile
def whole_below(x):
    """The largest whole number that is not above x, |x| < 2^22, as int32."""
    near = x + MAGIC
    above = (near - MAGIC) > x
    return bits_of(near) - MAGIC_BITS - above.to(tl.int32)


@tile
def number_of(code, LESS: tl.constexpr, POWER: tl.constexpr, BYTES: tl.constexpr):
    """A whole number below 2^15, less a multiple of 2^-8, times 2^POWER, as a float: exact. The
    code is put into the mantissa of a power of two, of which a part is then subtracted; a
    conversion would be several times as slow. ``BYTES``: codes are below 256, LESS is whole, and
    NVIDIA's instructions are at hand, of which one puts a byte into its place."""
    if BYTES:
        number = byte_within(code, 0x4B000000 + (POWER << 23), 0x7650, 1)
        number = number - (8388608.0 + LESS) * 2.0**POWER
    elif LESS == LESS // 1:
        number = of_bits(code + (0x4B000000 + (POWER << 23)))
        number = number - (8388608.0 + LESS) * 2.0**POWER
    else:
        number = of_bits(code * 256 + (0x47000000 + (POWER << 23)))
        number = number - (32768.0 + LESS) * 2.0**POWER
    return number


@tile
def byte_within(codes, FIRST: tl.constexpr, SELECTOR: tl.constexpr, STEP: tl.constexpr):
    """The float with the bits FIRST, one of its bytes being the code. A selector of PTX's ``prmt``
    names byte i of four codes by SELECTOR + i * STEP."""
    return tl.inline_asm_elementwise(
        f"prmt.b32 $0, $4, {FIRST}, {SELECTOR}; prmt.b32 $1, $4, {FIRST}, {SELECTOR + STEP};"
        f"prmt.b32 $2, $4, {FIRST}, {SELECTOR + 2 * STEP};"
        f"prmt.b32 $3, $4, {FIRST}, {SELECTOR + 3 * STEP};",
        "=f,=f,=f,=f,r",
        [codes.to(tl.uint8)],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@tile
def numbers_of_pairs(raw, LESS: tl.constexpr, POWER: tl.constexpr, NVIDIA: tl.constexpr):
    """``number_of`` less a whole number, for codes of four bits, two in each byte of
    ``raw [blocks, 1, bytes]``: numbers ``[blocks, 2, bytes]``. On NVIDIA, eight codes are separated
    at a time."""
    if NVIDIA:
        both = nibbles_within(raw, 0, 0, 0x4B000000 + (POWER << 23), 0x7650, 1)
        numbers = side_by_side(both[0], both[1]) - (8388608.0 + LESS) * 2.0**POWER
    else:
        numbers = number_of(unpacked(raw.to(tl.int32), 4, 2), LESS, POWER, False)
    return numbers


@tile
def nibbles_within(
    raw,
    UP: tl.constexpr,
    REST: tl.constexpr,
    FIRST: tl.constexpr,
    SELECTOR: tl.constexpr,
    STEP: tl.constexpr,
):
    """``byte_within`` for the low and the high four bits of bytes, which become bits UP to UP + 3
    of bytes that otherwise have the bits of REST (of four bytes)."""
    return tl.inline_asm_elementwise(
        f"{{.reg .b32 low, high; shl.b32 low, $8, {UP}; and.b32 low, low, {0x0F0F0F0F << UP};"
        f"or.b32 low, low, {REST}; shr.b32 high, $8, {4 - UP};"
        f"and.b32 high, high, {0x0F0F0F0F << UP}; or.b32 high, high, {REST};"
        f"prmt.b32 $0, low, {FIRST}, {SELECTOR};"
        f"prmt.b32 $1, low, {FIRST}, {SELECTOR + STEP};"
        f"prmt.b32 $2, low, {FIRST}, {SELECTOR + 2 * STEP};"
        f"prmt.b32 $3, low, {FIRST}, {SELECTOR + 3 * STEP};"
        f"prmt.b32 $4, high, {FIRST}, {SELECTOR};"
        f"prmt.b32 $5, high, {FIRST}, {SELECTOR + STEP};"
        f"prmt.b32 $6, high, {FIRST}, {SELECTOR + 2 * STEP};"
        f"prmt.b32 $7, high, {FIRST}, {SELECTOR + 3 * STEP};"
        "}",
        "=f,=f,=f,=f,=f,=f,=f,=f,r",
        [raw],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=4,
    )


@tile
def fused_product(a, b, c, PAIRS: tl.constexpr):
    """``a * b + c``, rounded once; with ``PAIRS`` for two values by one instruction."""
    if PAIRS:
        result = tl.inline_asm_elementwise(
            "{.reg .b64 a, b, c; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; mov.b64 c, {$6, $7};"
            "fma.rn.f32x2 a, a, b, c; mov.b64 {$0, $1}, a;}",
            "=f,=f,f,f,f,f,f,f",
            [a, b, c],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        result = tl.fma(a, b, c)
    return result


@tile
def scaled_pairs(raw, number, LESS: tl.constexpr, PAIRS: tl.constexpr):
    """``numbers_of_pairs`` times ``number``, positive and below 2^100, rounded as their products
    are, with an instruction less for each. On NVIDIA.

    Four bits are the mantissa of a subnormal float16, which a conversion makes a float32. A product
    with 2^24 or 2^20 times the number is then exact, and so is LESS, a power of two, times it.
    """
    both = tl.inline_asm_elementwise(
        "{.reg .b32 odd, low, high, odd_low, odd_high;"
        ".reg .b16 l0, l1, l2, l3, h0, h1, h2, h3; shr.b32 odd, $8, 8;"
        "and.b32 low, $8, 0x000F000F; and.b32 high, $8, 0x00F000F0;"
        "and.b32 odd_low, odd, 0x000F000F; and.b32 odd_high, odd, 0x00F000F0;"
        "mov.b32 {l0, l2}, low; mov.b32 {l1, l3}, odd_low;"
        "mov.b32 {h0, h2}, high; mov.b32 {h1, h3}, odd_high;"
        "cvt.f32.f16 $0, l0; cvt.f32.f16 $1, l1; cvt.f32.f16 $2, l2; cvt.f32.f16 $3, l3;"
        "cvt.f32.f16 $4, h0; cvt.f32.f16 $5, h1; cvt.f32.f16 $6, h2; cvt.f32.f16 $7, h3;"
        "}",
        "=f,=f,=f,=f,=f,=f,=f,=f,r",
        [raw],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=4,
    )
    less = tl.broadcast_to(number * -LESS, raw.shape)
    low = fused_product(both[0], tl.broadcast_to(number * 2.0**24, raw.shape), less, PAIRS)
    high = fused_product(both[1], tl.broadcast_to(number * 2.0**20, raw.shape), less, PAIRS)
    return side_by_side(low, high)


@tile
def middle_of_cell(codes, UNIT: tl.constexpr, BITS: tl.constexpr):
    """The middle of cell ``codes`` of ``2^BITS``, of which all together reach from -128 to 128
    times UNIT: as a float, rounded once. ``257 * UNIT`` must be a float. On NVIDIA.

    A code and a half are put into the mantissa of 2^15, the code as the upper bits of a byte.
    """
    if BITS == 8:
        number = byte_within(codes, 0x47000080, 0x7604, 16)
    else:
        number = of_bits((codes << (16 - BITS)) + (0x47000000 + (1 << (15 - BITS))))
    return from_middle(number, UNIT)


@tile
def middles_of_pairs(raw, UNIT: tl.constexpr):
    """``middle_of_cell`` for codes of four bits, two in each byte of ``raw [blocks, 1, bytes]``:
    numbers ``[blocks, 2, bytes]``."""
    both = nibbles_within(raw, 4, 0x08080808, 0x47000000, 0x7604, 16)
    return from_middle(side_by_side(both[0], both[1]), UNIT)


@tile
def from_middle(number, UNIT: tl.constexpr):
    """``2^15 + 2^7`` less, times UNIT."""
    return tl.fma(number, full_like(number, UNIT), full_like(number, -32896.0 * UNIT))


@tile
def side_by_side(low, high):
    """Two tiles ``[blocks, 1, part]`` as one ``[blocks, 2, part]``."""
    pairs = tl.permute(tl.join(low, high), (0, 3, 1, 2))
    return tl.reshape(pairs, (low.shape[0], 2, low.shape[2]))


# --- storage formats ------------------------------------------------------------------------------


@tile
def up_to_bits(scale, LOW: tl.constexpr, LARGEST: tl.constexpr):
    """A positive number rounded up to one whose lowest bits are zero. NaN may become finite."""
    bits = ((bits_of(scale) + ((1 << LOW) - 1)) >> LOW) << LOW
    return tl.minimum(of_bits(bits), LARGEST)


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
def to_float32(x, NVIDIA: tl.constexpr):
    """Values of a 16-bit or 32-bit float as float32, which holds them all. ``NVIDIA``: a register
    with two bfloat16 is split by two instructions, where Triton's cast takes three."""
    if NVIDIA and x.dtype == tl.bfloat16:
        values = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        values = x.to(tl.float32)
    return values


@tile
def clamp_to(x, LIMIT_OF: tl.constexpr):
    """Cut at the largest number of a dtype; NaN stays NaN. One instruction on NVIDIA from sm_86."""
    return tl.clamp(x, -LIMIT_OF, LIMIT_OF, propagate_nan=tl.PropagateNan.ALL)


@tile
def rounded_bf16(x):
    """A float32 as the bits of the nearest bfloat16, int32; ties to even, NaN stays NaN."""
    return tl.where(x == x, nearest_bf16_bits(x), 0x7FC0)


@tile
def through_fp32(x, CASTS: tl.constexpr, NVIDIA: tl.constexpr):
    return x


@tile
def through_bf16(x, CASTS: tl.constexpr, NVIDIA: tl.constexpr):
    """Rounded to bfloat16, as a float32. ``NVIDIA``: two values by one conversion; Triton's cast
    takes a slow one for each. ``CASTS``: by the card's own cast. Triton's interpreter cuts off
    where a card rounds, so there it is done in whole numbers."""
    if NVIDIA:
        values = tl.inline_asm_elementwise(
            "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16;"
            "and.b32 $1, both, 0xFFFF0000;}",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif CASTS:
        values = x.to(tl.bfloat16).to(tl.float32)
    else:
        values = of_bits(rounded_bf16(x) << 16)
    return values


@tile
def through_fp16(x, CASTS: tl.constexpr, NVIDIA: tl.constexpr):
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
