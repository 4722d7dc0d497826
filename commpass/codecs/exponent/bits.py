"""Arithmetic on bit planes: one int32 word holds bit b of 32 numbers, so one operation processes 32
numbers.

All functions are pointwise on lists of words, lowest plane first, and accept any shape. int32 right
shifts are arithmetic; the copies of the sign are masked off if they matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

SWAPS = ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555))


def transpose(rows: Sequence[Tensor]) -> list[Tensor]:
    """Transpose 8 words of 4 bytes to 8 bit planes: bit k of byte q of plane b is bit b of byte q
    of word k. Self-inverse.

    Three rounds swap the off-diagonal blocks of 4, 2 and 1 bits (Warren, Hacker's Delight, 7-3).
    """
    planes = list(rows)
    for distance, mask in SWAPS:
        for low in range(8):
            if low & distance == 0:
                high = low + distance
                swapped = ((planes[low] >> distance) ^ planes[high]) & mask
                planes[high] = planes[high] ^ swapped
                planes[low] = planes[low] ^ (swapped << distance)
    return planes


def spread(number: Tensor, bits: int) -> list[Tensor]:
    """Return ``bits`` planes that hold one int32 number 32 times, in two's complement."""
    return [-((number >> bit) & 1) for bit in range(bits)]


def subtract(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Return ``a - b`` in two's complement, with as many planes as ``b``; missing planes of ``a``
    are zero."""
    difference = []
    borrow: Tensor | None = None
    for bit, other in enumerate(b):
        take = other if borrow is None else other ^ borrow
        twice = None if borrow is None else other & borrow
        if bit < len(a):
            difference.append(a[bit] ^ take)
            borrow = ~a[bit] & take if twice is None else (~a[bit] & take) | twice
        else:
            difference.append(take)
            borrow = take if twice is None else take | twice
    return difference


def add(a: Sequence[Tensor], b: Sequence[Tensor], bits: int) -> list[Tensor]:
    """Return the lowest ``bits`` planes of ``a + b``; missing planes of ``a`` are zero."""
    total = []
    carry: Tensor | None = None
    for bit in range(bits):
        other = b[bit] if carry is None else b[bit] ^ carry
        both = None if carry is None else b[bit] & carry
        if bit < len(a):
            total.append(a[bit] ^ other)
            carry = a[bit] & other if both is None else (a[bit] & other) | both
        else:
            total.append(other)
            carry = both
    return total


def materialized(x: Tensor) -> Tensor:
    """Return the same word, and make the compiler keep its value instead of recomputing it for each
    use.

    Inductor fuses pointwise operations by substitution: a chain of n steps that each use the
    previous one twice would be expanded 2^n times. It does not substitute across ``as_strided``,
    and still fuses (and keeps the value in a register).
    """
    return x.as_strided(x.shape, x.stride())


def any_of(planes: Sequence[Tensor]) -> Tensor:
    whole = planes[0]
    for plane in planes[1:]:
        whole = whole | plane
    return whole


def equals(planes: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """For each of the ``numbers``, return the word with ones where the planes equal it."""
    half = (len(planes) + 1) // 2
    low = {
        number: _all_equal(planes[:half], number)
        for number in {number & ((1 << half) - 1) for number in numbers}
    }
    if half == len(planes):
        return [low[number] for number in numbers]
    high = {
        number: _all_equal(planes[half:], number)
        for number in {number >> half for number in numbers}
    }
    return [low[number & ((1 << half) - 1)] & high[number >> half] for number in numbers]


def _all_equal(planes: Sequence[Tensor], number: int) -> Tensor:
    found = None
    for bit, plane in enumerate(planes):
        literal = plane if number >> bit & 1 else ~plane
        found = literal if found is None else found & literal
    assert found is not None
    return found


def count(x: Tensor) -> Tensor:
    """Count the ones of an int32 word."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


def _right(x: Tensor, distance: int) -> Tensor:
    return (x >> distance) & ((1 << (32 - distance)) - 1)


def moves(mask: Tensor) -> list[Tensor]:
    """Return which bits ``compress`` moves by 1, 2, 4, 8 and 16 places to pack the bits under
    ``mask``.

    A bit moves by the number of zeros below it in the mask. Bit i of that number is a parity of
    parities, computed by xor with shifted copies (Warren, Hacker's Delight, 7-4).
    """
    plan = []
    zeros = ~mask << 1
    for round_ in range(5):
        parity = zeros
        for distance in (1, 2, 4, 8, 16):
            parity = parity ^ (parity << distance)
        going = materialized(parity & mask)
        plan.append(going)
        mask = (mask ^ going) | _right(going, 1 << round_)
        zeros = materialized(zeros & ~parity)
    return plan


def compress(x: Tensor, plan: Sequence[Tensor]) -> Tensor:
    """Pack the bits of ``x`` under the mask at its low end, in order; ``x`` must be zero
    elsewhere."""
    for round_, going in enumerate(plan):
        x = (x & ~going) | _right(x & going, 1 << round_)
    return x


def expand(x: Tensor, plan: Sequence[Tensor], mask: Tensor) -> Tensor:
    """The inverse of ``compress``; bits of ``x`` beyond the number of ones of the mask are
    dropped."""
    for round_ in reversed(range(len(plan))):
        x = (x & ~plan[round_]) | ((x << (1 << round_)) & plan[round_])
    return x & mask
