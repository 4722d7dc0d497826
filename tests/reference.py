"""The codecs a second time, from their formulas, in float64 and NumPy: what the tests compare the package with.

Nothing here uses commpass, torch or an 8-bit float of anybody's. ``round_trip`` gives with each value how far a
computation in lower precision may lie from it: far only where a value is so near the middle of two codes that
rounding decides between them.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import numpy as np

SINGLE, DOUBLE = 2.0**-24, 2.0**-53
"""Unit roundoff of float32 and float64."""
SMALLEST = {SINGLE: (2.0**-126, 2.0**-149), DOUBLE: (2.0**-1022, 2.0**-1074)}
"""The smallest normal and the smallest subnormal number by unit roundoff."""


# --- grids: the values from zero up; the k-th is an even code if k is even, and each has its negative ------------------


def integers(bits: int) -> np.ndarray:
    """``0 ... 2^(b-1) - 1``."""
    return np.arange(2 ** (bits - 1), dtype=np.float64)


def small_floats(exponent_bits: int, mantissa_bits: int, *, infinities: bool) -> np.ndarray:
    """All finite values of an 8-bit float: ``m / 2^M * 2^(1-bias)`` for exponent 0, else ``(1 + m / 2^M) * 2^(e-bias)``.

    With ``infinities`` (e5m2) the whole last exponent is Inf and NaN, without (e4m3fn) only its last mantissa is NaN.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    steps, last = 2**mantissa_bits, 2**exponent_bits - 1
    values = [
        m / steps * 2.0 ** (1 - bias) if e == 0 else (1 + m / steps) * 2.0 ** (e - bias)
        for e in range(last + 1)
        for m in range(steps)
        if not (e == last and (infinities or m == steps - 1))
    ]
    return np.array(values)


GRIDS = {
    "int8": integers(8),
    "int4": integers(4),
    "e4m3": small_floats(4, 3, infinities=False),
    "e5m2": small_floats(5, 2, infinities=True),
}


def nearest(values: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nearest value of a grid, of two equally near the even one; the distance to the nearest tie; the gap there."""
    size = np.minimum(np.abs(values), grid[-1])
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    middle = (low + high) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    # The tie one gap further may be the nearer one, for a value just beside a code: look at the three around it.
    ties = np.concatenate([[-np.inf], (grid[1:] + grid[:-1]) / 2, [np.inf]])
    gaps = np.concatenate([[0.0], np.diff(grid), [0.0]])
    around = np.stack([above - 1, above, above + 1])
    distances = np.abs(ties[around] - size)
    closest = distances.argmin(axis=0)[None]
    distance = np.take_along_axis(distances, closest, 0)[0]
    gap = np.take_along_axis(gaps[around], closest, 0)[0]
    return np.copysign(np.where(up, high, low), values), distance, gap


@functools.cache
def hadamard(width: int) -> np.ndarray:
    """Sylvester's construction: ``H(1) = 1``, ``H(2n) = [[H(n), H(n)], [H(n), -H(n)]]``."""
    if width == 1:
        return np.ones((1, 1))
    half = hadamard(width // 2)
    return np.block([[half, half], [half, -half]])


# --- codecs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What decode(encode(x)) should give: flat values, how far off a value may be, and the scale of its block."""

    values: np.ndarray
    tolerance: np.ndarray
    scale: np.ndarray
    near_ties: float


def blocks_of(x: np.ndarray, block: int) -> np.ndarray:
    """Consecutive values, ``[blocks, block]``, zeros behind the last."""
    flat = np.asarray(x, dtype=np.float64).reshape(-1)
    missing = -len(flat) % block
    return np.concatenate([flat, np.zeros(missing)]).reshape(-1, block)


def round_trip(x: np.ndarray, grid: str, block: int, *, rotate: bool, roundoff: float, limit: float) -> Expected:
    """Absmax-scaled codes of each block, of its Hadamard transform if ``rotate``; a block with NaN or Inf is all NaN.

    ``scale = max|t| / largest`` but no subnormal, ``code = nearest(t / scale)``, ``value = code * scale``, where ``t`` is
    the block or ``H block / width``, and then the value is ``H (code * scale)``. Values are cut at ``limit``, the largest
    number of the tensor's dtype. ``roundoff`` is that of the arithmetic that will be compared with this.
    """
    levels = GRIDS[grid]
    numel = np.asarray(x).size
    blocks = blocks_of(x, block)
    smallest_normal, smallest = SMALLEST[roundoff]
    bad = ~np.isfinite(blocks).all(axis=1, keepdims=True)
    blocks = np.where(bad, 0.0, blocks)
    eps = 4 * roundoff + (4 * SINGLE if grid.startswith("e") else 0)  # 8-bit floats are made from float32
    transformed, blur = blocks, 0.0
    if rotate:
        # H / width first: its sums cannot overflow. Summing n numbers rounds by at most n * roundoff of their magnitudes;
        # two sums of sqrt(width) numbers, generously counted.
        transformed = blocks @ (hadamard(block) / block)
        magnitude = np.abs(blocks).mean(axis=1, keepdims=True)
        blur = 4 * np.sqrt(2 * block) * roundoff * magnitude + block * smallest
    peak = np.abs(transformed).max(axis=1, keepdims=True, initial=0.0)
    scale = np.maximum(peak / levels[-1], smallest_normal)
    ratio = transformed / scale
    codes, distance, gap = nearest(ratio, levels)
    near = distance <= np.abs(ratio) * eps + 2 * blur / scale
    flips = np.where(near, gap, 0.0)
    scale_error = eps + blur / (levels[-1] * scale)
    with np.errstate(over="ignore"):
        if rotate:
            values = (codes @ hadamard(block)) * scale
            sums = np.abs(codes).sum(axis=1, keepdims=True) * scale
            tolerance = flips.sum(axis=1, keepdims=True) * scale + sums * 4 * np.sqrt(2 * block) * roundoff
        else:
            values = codes * scale
            tolerance = flips * scale
        tolerance = tolerance + np.abs(values) * scale_error + 2 * smallest
    values = np.where(bad, np.nan, np.clip(values, -limit, limit))
    cut = [np.broadcast_to(part, blocks.shape).reshape(-1)[:numel] for part in (values, tolerance, scale)]
    return Expected(*cut, near_ties=float(near.mean()) if near.size else 0.0)


# --- theory -----------------------------------------------------------------------------------------------------------


def gaussian_error(grid: str, block: int, points: int = 200) -> float:
    """Root mean square error of a unit Gaussian, coded with absmax scales: ``sqrt(E[step^2] / 12)``, by numeric integration.

    ``P(max|x| < m) = (2 Phi(m) - 1)^block`` gives the scales; an error is uniform within the step of its grid; the largest
    value of a block has none.
    A Hadamard transform of a Gaussian is one again, so that this holds for rotated codecs as well.
    """
    levels = GRIDS[grid]
    normal = statistics.NormalDist()
    shares = (np.arange(points) + 0.5) / points
    x = np.array([normal.inv_cdf((1 + share) / 2) for share in (np.arange(4000) + 0.5) / 4000])
    total = 0.0
    for share in shares:
        peak = normal.inv_cdf((1 + share ** (1 / block)) / 2)
        scale = peak / levels[-1]
        above = np.clip(np.searchsorted(levels, x[x < peak] / scale), 1, len(levels) - 1)
        total += np.mean(((levels[above] - levels[above - 1]) * scale) ** 2 / 12)
    return float(np.sqrt(total / points * (block - 1) / block))
