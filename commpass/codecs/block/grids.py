"""Grids: the numbers that codes represent, and rounding to them.

A grid is plain data with these properties: ``largest`` is the number that the peak of a block is
scaled to. ``sigma`` is the number that a standard deviation is scaled to, for scales computed from
it. ``half`` is half the largest gap, which is the largest error of a number up to ``largest``.
``has_zero`` says whether zero is a level. The functions ``encode`` and ``decode`` dispatch on the
type of the grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from commpass.codecs.dispatch import by_type

LOAD = {2: 1.2, 3: 1.9, 4: 2.5, 5: 2.9, 6: 3.2, 7: 3.6, 8: 3.9}
"""The largest of ``2^b - 1`` evenly spaced levels, in standard deviations of a Gaussian, that gives
the least square error. Found by search (benchmarks/codecs.py shows the errors)."""


@dataclass(frozen=True)
class IntGrid:
    """Symmetric integers ``-(2^(b-1)-1) ... 2^(b-1)-1``, rounded to nearest even or stochastically.

    Code 0 is not needed for a level. With ``marks`` it represents nonfinite values, for scales that
    cannot encode them (static scales).
    """

    bits: int
    marks: bool = False

    half: ClassVar[float] = 0.5
    has_zero: ClassVar[bool] = True

    @property
    def largest(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    @property
    def sigma(self) -> float:
        return self.largest / LOAD[self.bits]


@dataclass(frozen=True)
class LevelGrid:
    """All ``2^b`` evenly spaced levels ``k - (2^b - 1) / 2``, none of which is zero. With an
    offset, these are the asymmetric integers."""

    bits: int

    half: ClassVar[float] = 0.5
    has_zero: ClassVar[bool] = False

    @property
    def largest(self) -> float:
        return (2**self.bits - 1) / 2

    @property
    def sigma(self) -> float:
        return self.largest / LOAD[self.bits]


@dataclass(frozen=True)
class Fp8Grid:
    """The 8-bit floats e4m3 (largest 448) and e5m2 (largest 57344), rounded to nearest even; NaN
    has its own codes.

    Without ``marks`` an Inf is clamped to the largest number; with ``marks`` it becomes NaN, for
    scales that cannot encode nonfinite values (static scales).
    """

    form: str
    marks: bool = False

    bits: ClassVar[int] = 8
    has_zero: ClassVar[bool] = True

    @property
    def largest(self) -> float:
        return torch.finfo(FP8[self.form]).max

    @property
    def sigma(self) -> float:
        return self.largest / 8

    @property
    def half(self) -> float:
        """Half the gap between the largest numbers, which is ``2^-mantissa`` of their power of
        two."""
        return {"e4m3": 32.0, "e5m2": 8192.0}[self.form] / 2


FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""The dtypes of the 8-bit floats."""


@dataclass(frozen=True)
class MiniFloatGrid:
    """The 4-bit and 6-bit floats of OCP MX v1.0: e2m1 (largest 6), e2m3 (7.5) and e3m2 (28).

    Rounded to nearest even. They have neither Inf nor NaN, so the scale must mark nonfinite values.
    """

    form: str

    has_zero: ClassVar[bool] = True

    @property
    def mantissa(self) -> int:
        """The bits of a mantissa."""
        return {"e2m1": 1, "e2m3": 3, "e3m2": 2}[self.form]

    @property
    def bias(self) -> int:
        """The bias of the exponent: the smallest normal number is ``2^(1 - bias)``."""
        return {"e2m1": 1, "e2m3": 1, "e3m2": 3}[self.form]

    @property
    def bits(self) -> int:
        return {"e2m1": 4, "e2m3": 6, "e3m2": 6}[self.form]

    @property
    def largest(self) -> float:
        return {"e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0}[self.form]

    @property
    def sigma(self) -> float:
        return self.largest / LOAD[self.bits]

    @property
    def half(self) -> float:
        """Half the gap between the largest numbers, which is ``2^-mantissa`` of their power of
        two."""
        return largest_power(self) * 2.0**-self.mantissa / 2


@dataclass(frozen=True)
class CompandedGrid:
    """``2^b`` levels, dense near zero and sparse near the peak of a block, for Gaussian-like
    values.

    ``c(z) = z sqrt(1 + k) / sqrt(1 + k z^2)`` maps [-1, 1] onto itself and is divided into equal
    cells; a code represents the middle of its cell. The density of levels falls as ``(1 + k
    z^2)^(-3/2)``. Near zero this is the optimum for a Gaussian of deviation s, ``exp(-z^2 / 6
    s^2)`` (Panter and Dite, 1951), if ``k = 1 / 9 s^2``: see ``companding``. Encode and decode are
    closed formulas, and the only scale is the peak.
    """

    bits: int
    k: float

    has_zero: ClassVar[bool] = False

    @property
    def largest(self) -> float:
        """The number that the peak is scaled to. It is above 1, so that a scale that is rounded up
        stays finite for the largest numbers and its reciprocal is a normal number."""
        return LARGEST

    @property
    def sigma(self) -> float:
        return LARGEST / math.sqrt(9 * self.k)

    @property
    def half(self) -> float:
        k, cells = self.k, 2 ** (self.bits - 1)
        outermost = 1 - (1 - 1 / cells) / math.sqrt(1 + k - k * (1 - 1 / cells) ** 2)
        middle = 1 - (1 - 0.5 / cells) / math.sqrt(1 + k - k * (1 - 0.5 / cells) ** 2)
        return LARGEST * max(middle, outermost - middle)


LARGEST = 8.0
"""The number that the peak is scaled to for a companded grid."""
ROOT_BITS = 15
"""The bits of the root of ``companding``."""


def companding_of(grid: CompandedGrid) -> tuple[float, float]:
    """Return ``g`` and ``h`` of ``y / sqrt(1 + h y^2)`` with ``y = g x``, which equals ``cells *
    c(x / LARGEST)`` with fewer products."""
    cells = 2 ** (grid.bits - 1)
    gain = math.sqrt(1 + grid.k) * cells
    return gain / LARGEST, grid.k / gain**2


def companding(block: int) -> float:
    """Return the k of a companded grid for blocks of ``block`` values, whose peak is about ``sqrt(2
    ln block)`` standard deviations of a Gaussian.

    Its root has ROOT_BITS bits, so products with short numbers are exact in float32.
    """
    fraction, power = math.frexp(math.sqrt(2 * math.log(block) / 9))
    return math.ldexp(round(math.ldexp(fraction, ROOT_BITS)), power - ROOT_BITS) ** 2


@dataclass(frozen=True)
class TableGrid:
    """The ``2^b`` levels of least square error for a Gaussian of deviation 1 (Lloyd, 1957; Max,
    1960)."""

    bits: int
    levels: tuple[float, ...] = field(init=False, compare=False, repr=False)
    """The positive levels, ascending; computed once from ``bits``."""

    sigma: ClassVar[float] = 1.0
    has_zero: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", lloyd_max(self.bits))

    @property
    def largest(self) -> float:
        return self.levels[-1]

    @property
    def half(self) -> float:
        gaps = [high - low for low, high in pairwise(self.levels)]
        return max(self.levels[0], *(gap / 2 for gap in gaps))


Grid = IntGrid | LevelGrid | Fp8Grid | MiniFloatGrid | CompandedGrid | TableGrid


def largest_power(grid: Grid) -> float:
    """Return the largest power of two that is not above the largest number: ``2^emax`` of a float
    format (OCP MX v1.0, section 6.3)."""
    return 2.0 ** math.floor(math.log2(grid.largest))


# --- encode and decode ----------------------------------------------------------------------------


@by_type
def encode(grid: Grid, values: Tensor, noise: Tensor | None) -> Tensor:
    """Round numbers in grid units, of any shape, to uint8 codes below ``2**bits``.

    With ``noise`` in [0, 1) rounding is stochastic; with None it is to nearest.
    """
    raise NotImplementedError(grid)


@by_type
def decode(grid: Grid, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers in grid units that uint8 codes represent, in ``dtype``."""
    raise NotImplementedError(grid)


@encode.register
def _encode_int(grid: IntGrid, values: Tensor, noise: Tensor | None) -> Tensor:
    finite = values.isfinite() if grid.marks else None
    if finite is not None:
        values = torch.where(finite, values, 0.0)
    largest, middle = 2 ** (grid.bits - 1) - 1, 2 ** (grid.bits - 1)
    whole = values.round() if noise is None else (values + noise).floor()
    codes = (whole.clamp(-largest, largest) + middle).to(torch.uint8)
    return codes if finite is None else torch.where(finite, codes, 0)


@decode.register
def _decode_int(grid: IntGrid, codes: Tensor, dtype: torch.dtype) -> Tensor:
    middle = 2 ** (grid.bits - 1)
    if grid.marks:
        return torch.where(codes == 0, math.nan, codes.to(dtype) - middle)
    return codes.to(dtype) - middle


@encode.register
def _encode_level(grid: LevelGrid, values: Tensor, noise: Tensor | None) -> Tensor:
    shifted = values + grid.largest
    whole = shifted.round() if noise is None else (shifted + noise).floor()
    return whole.clamp(0, 2**grid.bits - 1).to(torch.uint8)


@decode.register
def _decode_level(grid: LevelGrid, codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) - grid.largest


@encode.register
def _encode_fp8(grid: Fp8Grid, values: Tensor, noise: Tensor | None) -> Tensor:
    if grid.marks:
        values = torch.where(values.isfinite(), values, math.nan)
    cut = values.clamp(-grid.largest, grid.largest)
    return cut.to(torch.float32).to(FP8[grid.form]).view(torch.uint8)


@decode.register
def _decode_fp8(grid: Fp8Grid, codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.view(FP8[grid.form]).to(dtype)


@dataclass(frozen=True)
class FloatBits:
    """Numbers that relate a small float format to float32, as bits of float32.

    ``drop`` is the number of bits of a float32's mantissa that the format lacks. ``least`` is the
    smallest normal number. ``unit`` is a number whose last place is the step between subnormals.
    """

    drop: int
    largest: int
    least: int
    unit: int


def float_bits(grid: MiniFloatGrid) -> FloatBits:
    """Return the numbers of a format: its codes, without the sign, are the bits of float32 from
    ``drop`` on, less those of half the smallest normal number."""
    drop, least = 23 - grid.mantissa, (128 - grid.bias) << 23
    largest = ((2 ** (grid.bits - 1) - 1) << drop) + least - (1 << 23)
    return FloatBits(drop, largest, least, least + (drop << 23))


@encode.register
def _encode_minifloat(grid: MiniFloatGrid, values: Tensor, noise: Tensor | None) -> Tensor:
    """NaN becomes the largest number, as its block has no other number."""
    form, bits = float_bits(grid), values.to(torch.float32).view(torch.int32)
    size = bits & 0x7FFFFFFF
    cut = size.clamp(max=form.largest)
    rounded = (cut + (2 ** (form.drop - 1) - 1) + ((cut >> form.drop) & 1)) >> form.drop
    normal = rounded - ((form.least - (1 << 23)) >> form.drop)
    unit = 2.0 ** ((form.unit >> 23) - 127)
    subnormal = (cut.view(torch.float32) + unit).view(torch.int32) - form.unit
    sign = torch.where(size > 0x7F800000, 0, (bits >> (32 - grid.bits)) & 2 ** (grid.bits - 1))
    return (torch.where(cut < form.least, subnormal, normal) | sign).to(torch.uint8)


@decode.register
def _decode_minifloat(grid: MiniFloatGrid, codes: Tensor, dtype: torch.dtype) -> Tensor:
    form, bits = float_bits(grid), codes.to(torch.int32)
    size = bits & (2 ** (grid.bits - 1) - 1)
    above = (size << form.drop) + form.least
    normal = (above - (1 << 23)).view(torch.float32)
    subnormal = above.view(torch.float32) - 2.0 ** (1 - grid.bias)
    number = torch.where(size < 2**grid.mantissa, subnormal, normal).view(torch.int32)
    return (number | ((bits >> (grid.bits - 1)) << 31)).view(torch.float32).to(dtype)


@encode.register
def _encode_companded(grid: CompandedGrid, values: Tensor, noise: Tensor | None) -> Tensor:
    cells = 2 ** (grid.bits - 1)
    gain, k = companding_of(grid)
    y = values * gain
    c = y * (1 + y * y * k).rsqrt()  # sqrt differs between eager and compiled code
    return (c.floor().clamp(-cells, cells - 1) + cells).to(torch.uint8)


@decode.register
def _decode_companded(grid: CompandedGrid, codes: Tensor, dtype: torch.dtype) -> Tensor:
    k, cells = grid.k, 2 ** (grid.bits - 1)
    c = (codes.to(dtype) - (cells - 0.5)) * (1 / cells)
    return c * LARGEST * (1 + k - c * c * k).rsqrt()


@encode.register
def _encode_table(grid: TableGrid, values: Tensor, noise: Tensor | None) -> Tensor:
    half = 2 ** (grid.bits - 1)
    size = values.abs()
    rank = torch.zeros_like(values)
    for low, high in pairwise(grid.levels):  # comparisons vectorize, a table lookup does not
        rank = rank + (size >= (low + high) / 2).to(values.dtype)
    return torch.where(values < 0, half - 1 - rank, half + rank).to(torch.uint8)


@decode.register
def _decode_table(grid: TableGrid, codes: Tensor, dtype: torch.dtype) -> Tensor:
    place = codes.to(dtype) - (2 ** (grid.bits - 1) - 0.5)
    size = torch.full_like(place, grid.levels[0])
    for rank, level in enumerate(grid.levels[1:], start=1):
        size = torch.where(place.abs() >= rank, level, size)
    return torch.where(place < 0, -size, size)


# --- the levels of least square error -------------------------------------------------------------


@lru_cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """Return the positive levels, ascending: each level is the mean of a Gaussian within its cell,
    and each edge is midway between two levels.

    The levels are solved from the innermost cell outwards: a guess of the first level determines
    all others. It is bisected to float precision until the last level is the mean of the tail.
    """
    count = 2 ** (bits - 1)
    low, high = 0.0, 2.0
    while (first := (low + high) / 2) not in (low, high):
        if _last_fits(_levels_from(first, count), count):
            low = first
        else:
            high = first
    levels = _levels_from(low, count)
    assert levels is not None
    return tuple(levels)


def _last_fits(levels: list[float] | None, count: int) -> bool:
    """Whether the last level is at or below the mean of its tail; False if not all levels fit."""
    if levels is None:
        return False
    edge = (levels[-2] + levels[-1]) / 2 if count > 1 else 0.0
    return levels[-1] <= _mean(edge, math.inf)


def _levels_from(first: float, count: int) -> list[float] | None:
    """Return the levels determined by the first one: each edge is placed so that the mean of the
    cell below it equals the level. Return None if not all levels fit."""
    levels, edge = [first], 0.0
    for _ in range(count - 1):
        if _mean(edge, math.inf) <= levels[-1]:
            return None
        low, high = levels[-1], 12.0
        while (middle := (low + high) / 2) not in (low, high):
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
