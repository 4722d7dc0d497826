"""The code of an exponent on tiles: see ``commpass.codecs.exponent.ladder``.

A ladder is passed as integers: ``STEPS`` is the number of steps. The s-th four bits of ``BITS``
hold the bits of step s. Four bits of ``TABLES`` from bit ``32 s + 4 c`` on hold the offset of its
code c.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.exponent_bits import any_of, inverse, less, plus, spread

ZERO_CODE = 15
"""The entry for the exponent zero in the tables."""


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
def code_mask(low, high, TABLES: tl.constexpr, STEP: tl.constexpr, CODE: tl.constexpr):
    """Where an offset is that of a code, from what ``four_of`` says of two planes and of two
    others."""
    PLACE: tl.constexpr = (TABLES >> (32 * STEP + 4 * CODE)) & 15
    return low[PLACE & 3] & high[PLACE >> 2]


@tile
def codes_of(
    exponents,
    offset,
    near,
    place,
    live,
    modes,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,
    STARTS: tl.constexpr,
):
    """Planes of exponents to a tuple for each step: the planes of its fields; and for each step
    the mask of its fields. The last step is the exponent itself, its planes are not cut to the
    mask.

    ``offset``, ``near`` and ``place`` are of ``choose``: every window lies inside the 16 exponents
    from the lowest start on, so that 4 planes say where in it an exponent is. ``live``: words of
    ones where there are values. ``modes``: the k-th has words of ones where zeros are named by step
    k, and zero elsewhere.
    """
    offset, below = less(offset, spread(place, 3 if STARTS <= 8 else 4))
    near = near & inverse(below)
    zero = inverse(any_of(exponents))
    low = four_of(offset[0], offset[1], near)
    high = four_of(offset[2], offset[3], near)
    here = live
    fields = ()
    masks = (here,)
    for step in tl.static_range(STEPS):
        terms = ()
        for code in tl.static_range(1, 1 << ((BITS >> (4 * step)) & 15)):
            if (TABLES >> (32 * step + 4 * code)) & 15 == ZERO_CODE:
                term = zero & inverse(any_of(modes))
                for mode in tl.static_range(len(modes)):
                    last = code_mask(
                        low, high, TABLES, mode, (1 << ((BITS >> (4 * mode)) & 15)) - 1
                    )
                    term = term | (last & modes[mode])
                terms = terms + (term & here,)
            else:
                term = code_mask(low, high, TABLES, step, code)
                if step < len(modes) and code == (1 << ((BITS >> (4 * step)) & 15)) - 1:
                    term = (term & inverse(modes[step])) | (zero & modes[step])
                terms = terms + (term & here,)
        fields = fields + (planes_of(terms, (BITS >> (4 * step)) & 15),)
        here = here & inverse(any_of(terms))
        masks = masks + (here,)
    return fields + (exponents,), masks


@tile
def exponents_from(
    fields,
    start,
    modes,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,
    EXPONENT: tl.constexpr,
):
    """The inverse of ``codes_of``: ``fields`` is a tuple of tuples, the planes of each step, the
    last one the exponents as they are; ``EXPONENT`` planes of exponents."""
    nothing = tl.zeros_like(fields[0][0])
    offset = (nothing, nothing, nothing, nothing)
    named = nothing
    zeros = nothing
    for step in tl.static_range(STEPS):
        for code in tl.static_range(1, 1 << ((BITS >> (4 * step)) & 15)):
            inside = equal_to(fields[step], code, (BITS >> (4 * step)) & 15)
            if (TABLES >> (32 * step + 4 * code)) & 15 == ZERO_CODE:
                zeros = zeros | (inside & inverse(any_of(modes)))
                for mode in tl.static_range(len(modes)):
                    last = inside & modes[mode]
                    offset = marked(
                        offset, last, TABLES, mode, (1 << ((BITS >> (4 * mode)) & 15)) - 1
                    )
            elif step < len(modes) and code == (1 << ((BITS >> (4 * step)) & 15)) - 1:
                zeros = zeros | (inside & modes[step])
                where = inside & inverse(modes[step])
                offset = marked(offset, where, TABLES, step, code)
            else:
                offset = marked(offset, inside, TABLES, step, code)
        named = named | any_of(fields[step])
    named = named & inverse(zeros)
    total = plus(offset, spread(start, EXPONENT))
    out = ()
    for bit in tl.static_range(EXPONENT):
        out = out + ((total[bit] & named) | fields[STEPS][bit],)
    return out


@tile
def marked(offset, mask, TABLES: tl.constexpr, STEP: tl.constexpr, CODE: tl.constexpr):
    """Planes of offsets, with that of a code where there are ones."""
    PLACE: tl.constexpr = (TABLES >> (32 * STEP + 4 * CODE)) & 15
    out = ()
    for bit in tl.static_range(4):
        if (PLACE >> bit) & 1:
            out = out + (offset[bit] | mask,)
        else:
            out = out + (offset[bit],)
    return out
