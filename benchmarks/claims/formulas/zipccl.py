"""ZipCCL: the exponents of a Gaussian (equations 1 to 5), and the switch of its reduce_scatter
(equations 6 and 7)."""

from __future__ import annotations

import math
from functools import cache

import torch

from benchmarks.claims.formulas.equation import Equation, relative
from benchmarks.paper_models.sites import FP32, FREE, coded, plain, site
from commpass.codecs import codec
from commpass.codecs.exponent.codec import BIAS, START_BITS
from commpass.costmodel import Link

EXPONENTS = 7
MANY, SIZES = 1 << 18, tuple(2.0 ** (step / 8 - 3) for step in range(16))
"""Number of values of each Gaussian, and their deviations: two octaves."""


# --- the formulas ---------------------------------------------------------------------------------


def covered(start: float, sigma: float) -> float:
    """Equations 1 and 2: return the share of N(0, sigma^2) with magnitudes from ``2^start`` up to
    ``2^(start + 7)``."""
    u = 2.0**start / (sigma * math.sqrt(2))
    return math.erf(2**EXPONENTS * u) - math.erf(u)


def best_u() -> float:
    """Equation 4."""
    return math.sqrt(EXPONENTS * math.log(2) / (4**EXPONENTS - 1))


def best_start(sigma: float) -> float:
    """Equation 5: return where the window begins that covers most."""
    return math.log2(sigma) + math.log2(2 * EXPONENTS * math.log(2) / (4**EXPONENTS - 1)) / 2


def slope(u: float) -> float:
    """Equation 3, divided by a factor without zeros: its zero is that of the derivative."""
    wide = 2.0**EXPONENTS
    return wide * math.exp(-((wide * u) ** 2)) - math.exp(-(u**2))


def zero_of_slope() -> float:
    """Return the zero of equation 3, by bisection."""
    low, high = 1e-3, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return low


def reduce_scatter_us(alpha_us: float, beta_us: float, nbytes: float) -> float:
    """Equation 6."""
    return alpha_us + beta_us * nbytes


def zipped_us(alpha_us: float, beta_us: float, e: float, s: float, nbytes: float) -> float:
    """Equation 7: ``e`` is the remaining share of bytes, ``s`` that of the narrower dtype."""
    return alpha_us + beta_us * e * s * nbytes


# --- commpass -------------------------------------------------------------------------------------


def gaussian(sigma: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(MANY, generator=generator) * sigma).bfloat16()


@cache
def windows(sigma: float) -> tuple[float, ...]:
    """Return where the windows of codec ``exponent(planes=3)`` begin, one for each 1,024 values, as
    exponents of two."""
    coder = codec("exponent(planes=3)")
    wire = coder.encode_rows(gaussian(sigma).unsqueeze(0))
    at = MANY * (8 + 3) // 8  # signs and mantissas, then three planes
    marks = wire[0, at : at + MANY // 1024 * 4].view(torch.int32)
    starts = (marks & ((1 << START_BITS) - 1)) - BIAS - 127
    return tuple(starts.double().tolist())


def coverage() -> float:
    """Return the largest excess of the share of values outside the counted windows over that of
    equation 2.

    Equation 2 is evaluated for the window that begins at the best whole exponent.
    """
    coder, found = codec("exponent(planes=3)"), []
    for sigma in SIZES:
        exponents = torch.frexp(gaussian(sigma).float()).exponent.double() - 1
        starts = torch.tensor(windows(sigma)).repeat_interleave(1024)
        inside = (exponents >= starts) & (exponents < starts + EXPONENTS)
        best = math.floor(best_start(sigma))
        predicted = max(covered(best, sigma), covered(best + 1, sigma))
        found.append(predicted - float(inside.double().mean()))
        used = coder.used_bytes(
            coder.encode_rows(gaussian(sigma).unsqueeze(0)), MANY, torch.bfloat16
        )
        escapes = MANY - int(inside.sum())
        least = MANY * (8 + 3) // 8 + MANY // 1024 * 4 + escapes
        if not least <= int(used) <= least + MANY // 1024 * 2 + 32:
            raise ValueError(f"{int(used)} bytes are used, but {escapes} escapes need {least}")
    return max(found)


def window_distance() -> float:
    """Return the largest distance of the most often counted window from equation 5, in
    exponents."""
    return max(
        abs(max(set(windows(sigma)), key=windows(sigma).count) - best_start(sigma))
        for sigma in SIZES
    )


LINK = Link(30.0, 12.5)
RANKS, VALUES = 8, 8 << 20


def native_deviation() -> float:
    """Return the deviation of a reduce_scatter in float32, with alpha and beta from the smallest
    and another size."""
    beta = (RANKS - 1) / RANKS / (LINK.gbytes_per_s * 1e3)
    alpha = (RANKS - 1) * LINK.alpha_us
    got = [plain(site("reduce_scatter", VALUES * k, RANKS, FP32), LINK) for k in (1, 2, 5)]
    return relative(got, [reduce_scatter_us(alpha, beta, 4 * VALUES * k) for k in (1, 2, 5)])


def zipped_deviation() -> float:
    """Return the deviation of coded bfloat16 in place of float32, if kernels take no time.

    The static and the dynamic part are two exchanges.
    """
    beta = (RANKS - 1) / RANKS / (LINK.gbytes_per_s * 1e3)
    alpha, code = 2 * (RANKS - 1) * LINK.alpha_us, "exponent(planes=3)"
    got, expected = [], []
    for k in (1, 2, 5):
        values = VALUES * k
        of = site("reduce_scatter", values, RANKS)
        got.append(coded(of, "direct", code, LINK, FREE))
        e = codec(code).expected_bytes(values // RANKS, torch.bfloat16) / (values // RANKS * 2)
        expected.append(zipped_us(alpha, beta, e, 0.5, 4 * values))
    return relative(got, expected)


EQUATIONS = (
    Equation(
        "equations 1 and 2",
        "the share of a Gaussian outside of the window: how much more of it is outside",
        coverage,
        1e-3,
        f"samples of {MANY:,} values, with a window for each 1,024",
    ),
    Equation(
        "equations 3 and 4",
        "where the derivative is zero, by bisection",
        lambda: relative(zero_of_slope(), best_u()),
        1e-12,
    ),
    Equation(
        "equation 5",
        "the window that is counted, against the formula: in exponents",
        window_distance,
        1.0,
        "a window begins at a whole exponent",
    ),
    Equation(
        "equation 6",
        "the time of a native reduce_scatter",
        native_deviation,
        1e-6,
        "plans have times in whole nanoseconds",
    ),
    Equation(
        "equation 7", "the time of a coded one, by the share of bytes", zipped_deviation, 1e-12
    ),
)
