"""Which exponents get the short codes: a contiguous window, from the theory of a Gaussian and
without a histogram."""

from __future__ import annotations

import math


def best_start(width: int) -> float:
    """``x - log2(sigma)`` for the window ``[2^x, 2^(x + width))`` that covers most of a Gaussian,
    for a continuous x.

    With ``u = 2^x / (sigma sqrt 2)`` the covered share is ``erf(2^k u) - erf(u)``; its derivative
    is zero where ``2^k exp(-4^k u^2) = exp(-u^2)``, so ``u^2 = k ln 2 / (4^k - 1)`` and ``x =
    log2(sigma) + log2(2 k ln 2 / (4^k - 1)) / 2`` (ZipCCL, equations 1 to 5, there for k = 7:
    -5.36).
    """
    return math.log2(2 * width * math.log(2) / (4.0**width - 1)) / 2


MEAN_EXPONENT = -(0.57721566490153286 + math.log(2)) / (2 * math.log(2)) - 0.5
"""Mean of ``floor(log2|x|) - log2(sigma)`` of a Gaussian: ``E ln|x / sigma| = -(Euler's gamma + ln
2) / 2``, and the fraction that the floor takes is 1/2 on average (it depends on sigma by less than
0.0004). Its opposite makes a sigma out of a mean
exponent: a sum of whole numbers, the same in any order, which one outlier cannot move and no square
can overflow."""


def _share(exponent: float) -> float:
    """How much of a unit Gaussian has its magnitude in ``[2^exponent, 2^(exponent + 1))``."""
    return math.erf(2 ** (exponent + 0.5)) - math.erf(2 ** (exponent - 0.5))


def window_shift(width: int) -> float:
    """What to add to a mean exponent, so that the floor of the sum is the best whole start of a
    window of ``width`` exponents.

    Exponents are whole: going from start x to x + 1 gives up the exponent x and wins x + width, so
    that x + 1 is better from the sigma on at which the two hold equally much. That lies within one
    of rounding ``best_start`` to nearest, but not there.
    """
    low, high = (
        best_start(width) - 1,
        best_start(width),
    )  # of x - log2(sigma); the gain from moving on falls with x
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share(middle + width) > _share(middle) else (low, middle)
    # Moving on pays up to x = low + log2(sigma): the best start is the first whole number above
    # that.
    return low + 1 - MEAN_EXPONENT
