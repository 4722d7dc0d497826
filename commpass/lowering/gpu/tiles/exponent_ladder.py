"""The code of an exponent on tiles: see ``commpass.codecs.exponent.ladder``.

A ladder comes as numbers: ``STEPS`` of them, the bits of step s in the s-th four bits of ``BITS``,
the offset of its code c in four bits of ``TABLES`` from bit ``32 s + 4 c`` on.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.exponent_bits import any_of, inverse, minus, plus, spread

ZERO_CODE = 15
"""Stands for the exponent zero in the tables."""


@tile
def four_of(low, high, also):
    """Where two planes hold 0, 1, 2 and 3."""
    return (
        inverse(low) & inverse(high) & also,
        low & inverse(high) & also,
        inverse(low) & high & also,
        low & high & also,
    )


@tile
def equal_to(planes, CODE: tl.constexpr, BITS: tl.constexpr):
    """Where planes hold a code."""
    found = tl.full(planes[0].shape, 0xFFFFFFFF, tl.uint32)
    for bit in tl.static_range(BITS):
        if (CODE >> bit) & 1:
            found = found & planes[bit]
        else:
            found = found & inverse(planes[bit])
    return found


@tile
def planes_of(terms, BITS: tl.constexpr):
    """Planes of codes: the first term says where code 1 is, and so on."""
    planes = ()
    for bit in tl.static_range(BITS):
        plane = tl.zeros_like(terms[0])
        for code in tl.static_range(1, 1 << BITS):
            if (code >> bit) & 1:
                plane = plane | terms[code - 1]
        planes = planes + (plane,)
    return planes


@tile
def codes_of(
    exponents,
    start,
    many,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Planes of exponents to a tuple for each step: the planes of its fields; and for each step
    the mask of its fields. The last step is the exponent itself, its planes are not cut to the
    mask.

    ``many``: words of ones where the zeros of a chunk are many, else zero.
    """
    offset = minus(exponents, spread(start, 9))
    near = inverse(offset[4] | offset[5] | offset[6] | offset[7] | offset[8])
    zero = inverse(any_of(exponents))
    low = four_of(offset[0], offset[1], near)
    high = four_of(offset[2], offset[3], near)
    LAST: tl.constexpr = (
        TABLES >> (32 * EARLY + 4 * ((1 << ((BITS >> (4 * EARLY)) & 15)) - 1))
    ) & 15
    moved = low[LAST & 3] & high[LAST >> 2]
    here = tl.full(zero.shape, 0xFFFFFFFF, tl.uint32)
    fields = ()
    masks = (here,)
    for step in tl.static_range(STEPS):
        terms = ()
        for code in tl.static_range(1, 1 << ((BITS >> (4 * step)) & 15)):
            if (TABLES >> (32 * step + 4 * code)) & 15 == ZERO_CODE:
                terms = terms + (((zero & inverse(many)) | (moved & many)) & here,)
            elif step == EARLY and code == (1 << ((BITS >> (4 * step)) & 15)) - 1:
                terms = terms + (((moved & inverse(many)) | (zero & many)) & here,)
            else:
                terms = terms + (
                    low[((TABLES >> (32 * step + 4 * code)) & 15) & 3]
                    & high[((TABLES >> (32 * step + 4 * code)) & 15) >> 2]
                    & here,
                )
        fields = fields + (planes_of(terms, (BITS >> (4 * step)) & 15),)
        here = here & inverse(any_of(terms))
        masks = masks + (here,)
    return fields + (exponents,), masks


@tile
def exponents_from(
    fields,
    start,
    many,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,
    EARLY: tl.constexpr,
    EXPONENT: tl.constexpr,
):
    """The inverse of ``codes_of``: ``fields`` is a tuple of tuples, the planes of each step, the
    last one the exponents as they are; ``EXPONENT`` planes of exponents."""
    nothing = tl.zeros_like(fields[0][0])
    offset = (nothing, nothing, nothing, nothing)
    named = nothing
    zeros = nothing
    LAST: tl.constexpr = (
        TABLES >> (32 * EARLY + 4 * ((1 << ((BITS >> (4 * EARLY)) & 15)) - 1))
    ) & 15
    for step in tl.static_range(STEPS):
        for code in tl.static_range(1, 1 << ((BITS >> (4 * step)) & 15)):
            inside = equal_to(fields[step], code, (BITS >> (4 * step)) & 15)
            if (TABLES >> (32 * step + 4 * code)) & 15 == ZERO_CODE:
                zeros = zeros | (inside & inverse(many))
                offset = marked(offset, inside & many, LAST)
            elif step == EARLY and (TABLES >> (32 * step + 4 * code)) & 15 == LAST:
                zeros = zeros | (inside & many)
                offset = marked(offset, inside & inverse(many), LAST)
            else:
                offset = marked(offset, inside, (TABLES >> (32 * step + 4 * code)) & 15)
        named = named | any_of(fields[step])
    named = named & inverse(zeros)
    total = plus(offset, spread(start, EXPONENT))
    out = ()
    for bit in tl.static_range(EXPONENT):
        out = out + ((total[bit] & named) | fields[STEPS][bit],)
    return out


@tile
def marked(offset, where, PLACE: tl.constexpr):
    """Planes of offsets, with ``PLACE`` where there are ones."""
    out = ()
    for bit in tl.static_range(4):
        if (PLACE >> bit) & 1:
            out = out + (offset[bit] | where,)
        else:
            out = out + (offset[bit],)
    return out
