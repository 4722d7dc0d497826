"""Split floats into words of columns and join them: the tile functions for
``commpass.codecs.exponent.floats``. ``FORM`` is the number of a float type."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.exponent_bits import merged, unknown
from commpass.lowering.gpu.tiles.exponent_wire import LANES

BFLOAT16 = 0
FLOAT16 = 1
FLOAT32 = 2
LOW_BYTES = 0x00FF00FF
LOW_BITS = 0x01010101
BUT_HIGH_BITS = 0x7F7F7F7F


@tile
def column_words(source, first, lanes, inside, PACKED: tl.constexpr, HALVES: tl.constexpr):
    """The words of columns, a tuple of ``PACKED`` uint32 tiles; zero where a column is not inside.

    ``source``: int32 pointer to a row; with ``HALVES`` an int16 pointer, which need not lie at a
    whole word. ``first``: the number of a column's first word; the next ones are ``lanes`` apart.
    """
    out = ()
    for part in tl.static_range(PACKED):
        at = first + part * lanes
        if HALVES:
            # Two parts of a number of words may lie behind 2^31 halves.
            half = at.to(tl.int64) * 2
            low = tl.load(source + half, mask=inside, other=0)
            high = tl.load(source + half + 1, mask=inside, other=0)
            low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
            out = out + (low | (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16),)
        else:
            word = tl.load(source + at, mask=inside, other=0)
            out = out + (word.to(tl.uint32, bitcast=True),)
    return out


@tile
def whole_words(source, first, whole, PACKED: tl.constexpr):
    """As ``column_words`` without ``HALVES``, of a tile whose chunks are all whole; anything if not
    all are. The words of a column are at fixed distances, so that one address is enough."""
    out = ()
    for part in tl.static_range(PACKED):
        word = tl.load(source + first + part * LANES, mask=whole)
        out = out + (word.to(tl.uint32, bitcast=True),)
    return out


@tile
def low_bytes(packed, UNIT: tl.constexpr):
    """The lower bytes of the four halves of words 2 UNIT and 2 UNIT + 1: byte 0 of the first, byte
    0 of the second, then byte 2 of each."""
    return merged(unknown(LOW_BYTES), packed[2 * UNIT], packed[2 * UNIT + 1] << 8)


@tile
def high_bytes(packed, UNIT: tl.constexpr):
    """As ``low_bytes``, the upper ones."""
    return merged(unknown(LOW_BYTES), packed[2 * UNIT] >> 8, packed[2 * UNIT + 1])


@tile
def from_bytes(low, high, SECOND: tl.constexpr):
    """The inverse of both: the first word, or the second."""
    if SECOND:
        return merged(unknown(LOW_BYTES), low >> 8, high)
    else:
        return merged(unknown(LOW_BYTES), low, high << 8)


@tile
def exponents_of(packed, FORM: tl.constexpr):
    """8 words of 4 exponents, one in a byte: of 16-bit floats those of the two lower halves of two
    words, then those of the upper ones."""
    out = ()
    for unit in tl.static_range(8):
        if FORM == BFLOAT16:
            high = high_bytes(packed, unit)
            low = low_bytes(packed, unit)
            out = out + (merged(unknown(LOW_BITS), low >> 7, high << 1),)
        elif FORM == FLOAT16:
            out = out + ((high_bytes(packed, unit) >> 2) & 0x1F1F1F1F,)
        else:
            first = ((packed[4 * unit] >> 23) & 0xFF) | ((packed[4 * unit + 2] >> 15) & 0xFF00)
            second = (packed[4 * unit + 1] >> 7) & 0xFF0000
            out = out + (first | second | ((packed[4 * unit + 3] << 1) & 0xFF000000),)
    return out


@tile
def rest_of(packed, FORM: tl.constexpr):
    """Sign and mantissa: 8, 11 or 24 words."""
    if FORM == BFLOAT16:
        out = ()
        for unit in tl.static_range(8):
            low = low_bytes(packed, unit)
            out = out + (merged(unknown(BUT_HIGH_BITS), low, high_bytes(packed, unit)),)
        return out
    elif FORM == FLOAT16:
        out = ()
        above = ()
        for unit in tl.static_range(8):
            out = out + (low_bytes(packed, unit),)
        for pair in tl.static_range(16):
            word = packed[pair]
            above = above + (((word >> 8) & 0x00030003) | ((word >> 13) & 0x00040004),)
        for word in tl.static_range(3):
            five = above[5 * word]
            for place in tl.static_range(1, 5):
                five = five | (above[5 * word + place] << (3 * place))
            # 16 fields of 3 bits, 5 to each half of 3 words: the last one fills the free bits.
            out = out + (five | (((above[15] >> word) & 0x00010001) << 15),)
        return out
    else:
        out = ()
        for four in tl.static_range(8):
            last = (packed[4 * four + 3] & 0x007FFFFF) | ((packed[4 * four + 3] >> 8) & 0x00800000)
            for place in tl.static_range(3):
                word = packed[4 * four + place]
                number = (word & 0x007FFFFF) | ((word >> 8) & 0x00800000)
                out = out + (number | ((last >> (8 * place)) << 24),)
        return out


@tile
def pack_floats(exponents, rest, FORM: tl.constexpr):
    """The inverse of ``exponents_of`` and ``rest_of``."""
    out = ()
    if FORM == BFLOAT16:
        for unit in tl.static_range(8):
            low = merged(unknown(BUT_HIGH_BITS), rest[unit], exponents[unit] << 7)
            high = merged(unknown(BUT_HIGH_BITS), exponents[unit] >> 1, rest[unit])
            out = out + (from_bytes(low, high, False), from_bytes(low, high, True))
    elif FORM == FLOAT16:
        for pair in tl.static_range(16):
            low = (rest[pair // 2] >> (8 * (pair % 2))) & LOW_BYTES
            if pair < 15:
                above = (rest[8 + pair // 5] >> (3 * (pair % 5))) & 0x00070007
            else:
                above = (rest[8] >> 15) & 0x00010001
                above = above | (((rest[9] >> 15) & 0x00010001) << 1)
                above = above | (((rest[10] >> 15) & 0x00010001) << 2)
            high = ((above & 0x00030003) << 8) | ((above & 0x00040004) << 13)
            exponent = (exponents[pair // 2] >> (8 * (pair % 2))) & LOW_BYTES
            out = out + (low | high | (exponent << 10),)
    else:
        for four in tl.static_range(8):
            last = rest[3 * four] >> 24
            last = last | ((rest[3 * four + 1] >> 24) << 8)
            last = last | ((rest[3 * four + 2] >> 24) << 16)
            for place in tl.static_range(4):
                number = last
                if place < 3:
                    number = rest[3 * four + place] & 0x00FFFFFF
                # Bytes 0, 2, 1 and 3: see ``exponents_of``.
                exponent = exponents[four] >> (8 * (place % 2 * 2 + place // 2))
                sign = (number & 0x00800000) << 8
                out = out + ((number & 0x007FFFFF) | sign | ((exponent & 0xFF) << 23),)
    return out
