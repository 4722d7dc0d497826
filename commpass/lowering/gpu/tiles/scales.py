"""Scales on tiles ``[blocks, parts, part]``: numbers ``[blocks, 1, 1]`` that blocks are divided by.
One set of functions for each type of ``codecs.block.scales``."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.numbers import (
    INFINITY_BITS,
    LIMIT,
    TINY,
    bits_of,
    block_max,
    block_min,
    divided,
    is_finite,
    maximum,
    minimum,
    of_bits,
    reciprocal,
    reciprocal_of_short,
    size_bits,
    sum_of,
)


@tile
def peak_of(x):
    """``max|x|`` of each block; not finite where the block holds anything that is not. Compared as
    whole numbers: no NaN is passed over."""
    return of_bits(block_max(size_bits(x)))


@tile
def propagate_nonfinite(number, peak):
    """NaN where the block holds anything that is not finite (law 2)."""
    return number + (peak - peak)


@tile
def without_zero(number, peak, LARGEST: tl.constexpr):
    """Zero for a block of zeros: of a grid without a zero."""
    return tl.where(peak < LARGEST * TINY, 0.0, number)


@tile
def absmax(peak, LARGEST: tl.constexpr):
    return maximum(divided(peak, LARGEST), TINY)


@tile
def safe_peak(peak):
    return maximum(peak, TINY)


@tile
def shares(x, peak):
    return x * reciprocal(peak)


@tile
def rms_of(x, peak):
    """Of values divided by the peak, whose squares cannot overflow."""
    part = shares(x, safe_peak(peak))
    size: tl.constexpr = x.numel // peak.numel
    mean = sum_of(part * part) * (1.0 / size)  # of a power of two: exact
    return tl.sqrt_rn(mean) * peak


@tile
def rms(x, peak, SIGMA: tl.constexpr):
    return minimum(maximum(divided(rms_of(x, peak), SIGMA), TINY), LIMIT)


@tile
def dual_sigma(x, peak):
    return maximum(rms_of(x, peak), TINY)


@tile
def dual_peak(peak, sigma, LARGEST: tl.constexpr):
    """A quotient grows with its dividend, rounded or not: that of the peak is the largest."""
    return absmax(tl.div_rn(peak, sigma), LARGEST)


@tile
def shared_exponent(peak, POWER: tl.constexpr):
    """The power of two below the peak, over POWER, itself one."""
    return maximum(of_bits(bits_of(peak) & INFINITY_BITS) * (1 / POWER), TINY)


@tile
def row_scale(peak, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    return maximum(divided(peak, LARGEST), SMALLEST)


@tile
def two_level(peak, row, LARGEST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """In units of the scale of the row."""
    return minimum(maximum(tl.div_rn(divided(peak, LARGEST), row), LOW), HIGH)


@tile
def in_two_units(x, number, row):
    return x * tl.div_rn(reciprocal(row), number)


@tile
def in_units(
    x,
    number,
    SHORT: tl.constexpr,
    NORMAL: tl.constexpr,
    TIMES: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    """In units of ``number / TIMES``: one division a block, a product a value. ``SHORT`` and
    ``NORMAL``: see ``reciprocal_of_short``. ``NVIDIA``: values are not rounded before they are
    multiplied by TIMES."""
    if SHORT:
        inverse = reciprocal_of_short(number, NORMAL)
    else:
        inverse = reciprocal(number)
    if NVIDIA:
        units = x * (inverse * TIMES)
    else:
        units = x * inverse * TIMES
    return units


@tile
def in_units_of_power(x, number):
    """As ``in_units``, of a power of two or NaN; 2^-127, the inverse of the largest, is below the
    normal numbers."""
    inverse = of_bits(tl.maximum((254 << 23) - bits_of(number), 1 << 22))
    return x * (inverse + (number - number))


@tile
def in_units_of_some(
    x,
    number,
    SHORT: tl.constexpr,
    NORMAL: tl.constexpr,
    TIMES: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    """As ``in_units``, of a number that may be zero."""
    return in_units(x, tl.where(number == 0, TINY, number), SHORT, NORMAL, TIMES, NVIDIA)


@tile
def in_units_static(x, VALUE: tl.constexpr, OUTSIDE: tl.constexpr):
    """Only what was not finite is marked so: a large finite value stays one."""
    values = divided(x, VALUE)
    return tl.where(is_finite(x), tl.minimum(tl.maximum(values, -OUTSIDE), OUTSIDE), values)


@tile
def least_squares(x, decoded, first):
    """``<x, q> / <q, q>`` of blocks in units of the first number; that one where q is zero."""
    dot = sum_of(x * reciprocal(maximum(first, TINY)) * decoded)
    norm = sum_of(decoded * decoded)
    factor = tl.where(norm > 0, tl.div_rn(dot, norm), 1.0)
    return first * minimum(maximum(factor, 0.0), 2.0)


@tile
def middle_of(x):
    """Midway between the least and the largest value of each block, NaN passed over."""
    return block_min(x) * 0.5 + block_max(x) * 0.5
