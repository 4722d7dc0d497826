"""Bit planes on tiles of columns: uint32 words that hold one bit of 32 numbers each.

These are the tile functions for ``commpass.codecs.exponent.bits`` and ``strings``, with the same
results. Tuples of words are planes, lowest first.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile


@tile
def inverse(x):
    """uint32 words with all bits turned; the interpreter has no ``~`` of them."""
    return x ^ 0xFFFFFFFF


@tile
def ones(x):
    """Ones of uint32 words, int32. In the form that LLVM knows as one instruction."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    # The minimum changes nothing. It keeps what follows (a product with a power of two is a shift)
    # from being merged into the form before LLVM knows it, which then drops the minimum.
    return tl.minimum(((x * 0x01010101) >> 24).to(tl.int32), 32)


@tile
def unknown(NUMBER: tl.constexpr):
    """A uint32 of which the compiler does not know that it is always the same (a grid has one
    program in its last dimension)."""
    return tl.full((), NUMBER, tl.uint32) * tl.num_programs(2).to(tl.uint32)


@tile
def merged(mask, a, b):
    """``a`` under the mask, ``b`` elsewhere.

    One instruction of three inputs, if the mask is ``unknown``: with a constant LLVM makes it two
    "and" and an "or", which ptxas does not put together again.
    """
    return ((a ^ b) & mask) ^ b


@tile
def any_of(planes):
    whole = planes[0]
    for plane in tl.static_range(1, len(planes)):
        whole = whole | planes[plane]
    return whole


@tile
def swapped(packed, DISTANCE: tl.constexpr, MASK: tl.constexpr):
    """Blocks of ``DISTANCE`` bits off the diagonal change places, in each pair of words that are
    as far apart. ``MASK``: the lower block of each pair of blocks."""
    mask = unknown(MASK)
    out = ()
    for place in tl.static_range(8):
        if place & DISTANCE == 0:
            out = out + (merged(mask, packed[place], packed[place + DISTANCE] << DISTANCE),)
        else:
            out = out + (merged(mask, packed[place - DISTANCE] >> DISTANCE, packed[place]),)
    return out


@tile
def transposed(packed):
    """8 words of 4 bytes to 8 bit planes, and back."""
    packed = swapped(packed, 4, 0x0F0F0F0F)
    packed = swapped(packed, 2, 0x33333333)
    return swapped(packed, 1, 0x55555555)


@tile
def spread(number, BITS: tl.constexpr):
    """An int32 number as planes that hold it 32 times."""
    bits = number.to(tl.uint32, bitcast=True)
    planes = ()
    for bit in tl.static_range(BITS):
        planes = planes + (0 - ((bits >> bit) & 1),)
    return planes


@tile
def minus(a, b):
    """``a - b``, as many planes as ``b``; those that ``a`` lacks are zero."""
    borrow = tl.zeros_like(a[0])
    difference = ()
    for bit in tl.static_range(len(b)):
        if bit < len(a):
            difference = difference + (a[bit] ^ b[bit] ^ borrow,)
            borrow = (inverse(a[bit]) & (b[bit] ^ borrow)) | (b[bit] & borrow)
        else:
            difference = difference + (b[bit] ^ borrow,)
            borrow = b[bit] | borrow
    return difference


@tile
def less(a, b):
    """``a - b``, as many planes as ``a``, and where it is below zero; planes that ``b`` lacks are
    zero."""
    borrow = tl.zeros_like(a[0])
    difference = ()
    for bit in tl.static_range(len(a)):
        if bit < len(b):
            difference = difference + (a[bit] ^ b[bit] ^ borrow,)
            borrow = (inverse(a[bit]) & (b[bit] ^ borrow)) | (b[bit] & borrow)
        else:
            difference = difference + (a[bit] ^ borrow,)
            borrow = inverse(a[bit]) & borrow
    return difference, borrow


@tile
def plus(a, b):
    """``a + b``, as many planes as ``b``; those that ``a`` lacks are zero."""
    carry = tl.zeros_like(a[0])
    total = ()
    for bit in tl.static_range(len(b)):
        if bit < len(a):
            total = total + (a[bit] ^ b[bit] ^ carry,)
            carry = (a[bit] & (b[bit] ^ carry)) | (b[bit] & carry)
        else:
            total = total + (b[bit] ^ carry,)
            carry = b[bit] & carry
    return total


@tile
def moves(mask):
    """Which bits go 1, 2, 4, 8 and 16 places down, so that those under ``mask`` come together: see
    ``commpass.codecs.exponent.bits.moves``."""
    plan = ()
    zeros = inverse(mask) << 1
    for turn in tl.static_range(5):
        parity = zeros ^ (zeros << 1)
        parity = parity ^ (parity << 2)
        parity = parity ^ (parity << 4)
        parity = parity ^ (parity << 8)
        parity = parity ^ (parity << 16)
        going = parity & mask
        plan = plan + (going,)
        mask = (mask ^ going) | (going >> (1 << turn))
        zeros = zeros & inverse(parity)
    return plan


@tile
def compressed(planes, plan, mask):
    """The bits of planes under a mask at the low end, in order."""
    out = ()
    for number in tl.static_range(len(planes)):
        word = planes[number] & mask
        for turn in tl.static_range(5):
            going = word & plan[turn]
            word = word ^ going ^ (going >> (1 << turn))
        out = out + (word,)
    return out


@tile
def expanded(planes, plan, mask):
    """The inverse of ``compressed``; bits beyond the ones of the mask are dropped."""
    out = ()
    for number in tl.static_range(len(planes)):
        word = planes[number]
        for turn in tl.static_range(5):
            word = merged(plan[4 - turn], word << (1 << (4 - turn)), word)
        out = out + (word & mask,)
    return out


@tile
def picked(planes, mask, limit):
    """As ``compressed``, one field at a time: quicker where there are few.

    ``limit``: no mask has more ones.
    """
    out = ()
    for _ in tl.static_range(len(planes)):
        out = out + (tl.zeros_like(mask),)
    place = unknown(1)
    for _ in range(limit):
        others = mask & (mask + unknown(0xFFFFFFFF))
        lowest = mask ^ others
        mask = others
        longer = ()
        for number in tl.static_range(len(planes)):
            longer = longer + (out[number] + bit_of(planes[number], lowest) * place,)
        out = longer
        place = place << 1
    return out


@tile
def bit_of(plane, lowest):
    """1 where a plane has the one bit of ``lowest``, else 0: by a count of ones, since that is not
    done where logic is. The compiler must not know that there is one bit, or it compares."""
    return ones(plane & lowest).to(tl.uint32)


@tile
def put_back(planes, mask, limit):
    """The inverse of ``picked``; bits beyond the ones of the mask are dropped."""
    out = ()
    for _ in tl.static_range(len(planes)):
        out = out + (tl.zeros_like(mask),)
    place = unknown(1)
    for _ in range(limit):
        others = mask & (mask + unknown(0xFFFFFFFF))
        lowest = mask ^ others
        mask = others
        fuller = ()
        for number in tl.static_range(len(planes)):
            fuller = fuller + (out[number] + bit_of(planes[number], place) * lowest,)
        out = fuller
        place = place << 1
    return out


@tile
def unpacked(string, fields, BITS: tl.constexpr):
    """Planes of ``fields`` fields each, one behind the other in ``string``; what follows is left in
    them: mask it off."""
    planes = ()
    for number in tl.static_range(BITS):
        planes = planes + (string >> (fields * number).to(tl.uint32),)
    return planes
