"""Grids: the values that a code can stand for, and how a number is rounded to one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

Encode = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Grid:
    """``encode`` takes numbers in grid units, and noise in [0, 1) for stochastic rounding or None
    for nearest, and gives uint8 codes below ``2**bits``; ``decode`` gives the numbers that they
    stand for.

    ``largest`` is the number that the peak of a block is scaled to; ``sigma`` is what a standard
    deviation is scaled to where the scale is made from that; ``half`` is half the largest gap, so
    the largest error of a number up to ``largest``.
    """

    name: str
    bits: int
    largest: float
    sigma: float
    half: float
    encode: Encode
    decode: Callable[[Tensor, torch.dtype], Tensor]
    has_zero: bool = True
    marks_nan: bool = False


LOAD = {2: 1.2, 3: 1.9, 4: 2.5, 5: 2.9, 6: 3.2, 7: 3.6, 8: 3.9}
"""How many standard deviations of a Gaussian the largest of ``2^b - 1`` even levels should be, for
the least square error; found by search (benchmarks/codecs.py shows the errors)."""


def int_grid(bits: int) -> Grid:
    """Symmetric integers ``-(2^(b-1)-1) ... 2^(b-1)-1``, to nearest even or stochastic. Code 0 is
    free: it marks NaN."""
    largest = 2 ** (bits - 1) - 1
    middle = 2 ** (bits - 1)

    def encode(values: Tensor, noise: Tensor | None) -> Tensor:
        whole = values.round() if noise is None else (values + noise).floor()
        return (whole.clamp(-largest, largest) + middle).to(torch.uint8)

    def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype) - middle

    return Grid(f"int{bits}", bits, float(largest), largest / LOAD[bits], 0.5, encode, decode)


def marking(grid: Grid) -> Grid:
    """A grid of integers in which what is not finite has a code of its own: for scales that cannot
    tell (static ones)."""

    def encode(values: Tensor, noise: Tensor | None) -> Tensor:
        finite = values.isfinite()
        return torch.where(finite, grid.encode(torch.where(finite, values, 0.0), noise), 0)

    def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.where(codes == 0, math.nan, grid.decode(codes, dtype))

    return Grid(
        grid.name, grid.bits, grid.largest, grid.sigma, grid.half, encode, decode, marks_nan=True
    )


def level_grid(bits: int) -> Grid:
    """All ``2^b`` even levels ``k - (2^b - 1) / 2``; none is zero. With an offset, the asymmetric
    integers."""
    largest = (2**bits - 1) / 2

    def encode(values: Tensor, noise: Tensor | None) -> Tensor:
        shifted = values + largest
        whole = shifted.round() if noise is None else (shifted + noise).floor()
        return whole.clamp(0, 2**bits - 1).to(torch.uint8)

    def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype) - largest

    return Grid(
        f"level{bits}",
        bits,
        largest,
        largest / LOAD.get(bits, 1.0),
        0.5,
        encode,
        decode,
        has_zero=False,
    )


def fp8_grid(form: str) -> Grid:
    """The 8-bit floats e4m3 (largest 448) and e5m2 (largest 57344), rounded to nearest even; NaN
    has codes of its own."""
    dtype8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form]
    largest = torch.finfo(dtype8).max
    gap = {"e4m3": 32.0, "e5m2": 8192.0}[form]

    def encode(values: Tensor, noise: Tensor | None) -> Tensor:
        return values.clamp(-largest, largest).to(torch.float32).to(dtype8).view(torch.uint8)

    def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(dtype8).to(dtype)

    return Grid(f"fp8-{form}", 8, largest, largest / 8, gap / 2, encode, decode)


def marking_fp8(grid: Grid) -> Grid:
    """The same for 8-bit floats, which would clamp an Inf to their largest number."""

    def encode(values: Tensor, noise: Tensor | None) -> Tensor:
        return grid.encode(torch.where(values.isfinite(), values, math.nan), noise)

    return Grid(
        grid.name,
        grid.bits,
        grid.largest,
        grid.sigma,
        grid.half,
        encode,
        grid.decode,
        marks_nan=True,
    )


def companded_grid(bits: int, block: int) -> Grid:
    """``2^b`` levels, close together near zero and wider apart at the peak of a block, for values
    like a Gaussian's.

    ``c(z) = z sqrt(1 + k) / sqrt(1 + k z^2)`` maps [-1, 1] onto itself and is cut into equal cells;
    a code stands for the middle of its cell. The density of levels falls as ``(1 + k z^2)^(-3/2)``,
    which near zero is the best one for a Gaussian of deviation s, ``exp(-z^2 / 6 s^2)`` (Panter and
    Dite, 1951), if ``k = 1 / 9 s^2``; of ``block`` values the peak is about ``sqrt(2 ln block)``
    deviations. Both ways are closed formulas, and the one scale is the peak.
    """
    k = 2 * math.log(block) / 9
    cells = 2 ** (bits - 1)

    def encode(values: Tensor, noise: Tensor | None) -> Tensor:
        z = values * (1 / LARGEST)
        c = (
            z * (math.sqrt(1 + k) * cells) * (1 + z * z * k).rsqrt()
        )  # sqrt differs between eager and compiled code
        return (c.floor().clamp(-cells, cells - 1) + cells).to(torch.uint8)

    def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
        c = (codes.to(dtype) - (cells - 0.5)) * (1 / cells)
        return c * LARGEST * (1 + k - c * c * k).rsqrt()

    outermost = 1 - (1 - 1 / cells) / math.sqrt(1 + k - k * (1 - 1 / cells) ** 2)
    middle = 1 - (1 - 0.5 / cells) / math.sqrt(1 + k - k * (1 - 0.5 / cells) ** 2)
    half = LARGEST * max(middle, outermost - middle)
    return Grid(
        f"companded{bits}",
        bits,
        LARGEST,
        LARGEST / math.sqrt(9 * k),
        half,
        encode,
        decode,
        has_zero=False,
    )


LARGEST = 8.0
"""What a companded peak is scaled to: above 1, so that a scale that is rounded up stays finite for
the largest numbers, and its reciprocal a normal number."""


def table_grid(bits: int) -> Grid:
    """The ``2^b`` levels of least square error for a Gaussian of deviation 1 (Lloyd, 1957; Max,
    1960)."""
    levels = lloyd_max(bits)
    half = 2 ** (bits - 1)
    edges = [(low + high) / 2 for low, high in pairwise(levels)]
    gaps = [high - low for low, high in pairwise(levels)]

    def encode(values: Tensor, noise: Tensor | None) -> Tensor:
        size = values.abs()
        rank = torch.zeros_like(values)
        for edge in edges:  # comparisons, not a look-up: they vectorise
            rank = rank + (size >= edge).to(values.dtype)
        return torch.where(values < 0, half - 1 - rank, half + rank).to(torch.uint8)

    def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
        place = codes.to(dtype) - (half - 0.5)
        size = torch.full_like(place, levels[0])
        for rank, gap in enumerate(gaps, start=1):
            size = size + (place.abs() >= rank).to(dtype) * gap
        return torch.where(place < 0, -size, size)

    reach = max(levels[0], *(gap / 2 for gap in gaps)) if gaps else levels[0]
    return Grid(f"table{bits}", bits, levels[-1], 1.0, reach, encode, decode, has_zero=False)


@lru_cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The positive levels, least first: each the mean of a Gaussian within its cell, each edge
    midway between two levels.

    Solved from the innermost cell outwards: a guess of the first level determines all others;
    bisect it until the last level is the mean of the tail.
    """
    count = 2 ** (bits - 1)
    low, high = 0.0, 2.0
    for _ in range(200):
        first = (low + high) / 2
        if _last_fits(_levels_from(first, count), count):
            low = first
        else:
            high = first
    levels = _levels_from(low, count)
    assert levels is not None
    return tuple(levels)


def _last_fits(levels: list[float] | None, count: int) -> bool:
    """Whether the last level lies at or below the mean of its tail; False if there was no room for
    all levels."""
    if levels is None:
        return False
    edge = (levels[-2] + levels[-1]) / 2 if count > 1 else 0.0
    return levels[-1] <= _mean(edge, math.inf)


def _levels_from(first: float, count: int) -> list[float] | None:
    """The levels that the first one determines: an edge is where the mean of the cell up to it is
    the level."""
    levels, edge = [first], 0.0
    for _ in range(count - 1):
        if _mean(edge, math.inf) <= levels[-1]:
            return None
        low, high = levels[-1], 12.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean(edge, middle) < levels[-1] else (low, middle)
        edge = (low + high) / 2
        levels.append(2 * edge - levels[-1])
    return levels


def _mean(low: float, high: float) -> float:
    """The mean of a Gaussian between two numbers."""
    density = math.exp(-low * low / 2) - (math.exp(-high * high / 2) if high < math.inf else 0.0)
    mass = math.erfc(low / math.sqrt(2)) - (
        math.erfc(high / math.sqrt(2)) if high < math.inf else 0.0
    )
    return density * math.sqrt(2 / math.pi) / mass if mass > 0 else low
