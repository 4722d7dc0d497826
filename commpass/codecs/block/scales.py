"""Scales: the numbers that blocks are divided by before rounding.

A scale is plain data. The functions ``measure``, ``divide``, ``refit``, ``multiply``, ``bound`` and
``floor`` dispatch on its type. Every type is registered explicitly, because Dynamo of torch 2.11
does not trace a lookup through base classes. ``stored`` names the format of its numbers
(``storage``). ``numbers`` says how many are sent for each block, and ``row_numbers`` how many for
each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from commpass.codecs.block import storage
from commpass.codecs.block.grids import Grid, decode, largest_power
from commpass.codecs.dispatch import by_type

LEAST_E4M3 = 2.0**-6
"""The smallest normal number of e4m3, which is the smallest scale of a block in two levels."""
LEAST_ROW_SCALE = 2.0**-119
"""The smallest scale of a row in two levels. Its product with the smallest scale of a block, and
the reciprocal of that, are normal float32 numbers."""


@dataclass(frozen=True)
class Absmax:
    """Scale the peak of a block to the largest number of the grid."""

    stored: str = "fp32"
    numbers: ClassVar[int] = 1


@dataclass(frozen=True)
class Rms:
    """Scale the root mean square to the grid's ``sigma``; values above the largest number are
    clamped."""

    stored: str = "fp32"
    numbers: ClassVar[int] = 1


@dataclass(frozen=True)
class LeastSquares:
    """Start from ``Rms`` or ``Absmax`` (see ``start_of``), then replace the scale by the
    least-squares factor ``<x, q> / <q, q>`` of the codes."""

    stored: str = "fp32"
    numbers: ClassVar[int] = 1


@dataclass(frozen=True)
class Dual:
    """Divide by the root mean square, then by the peak of the result (TACO, section 3.2); both are
    sent."""

    stored: str = "fp32"
    numbers: ClassVar[int] = 2


@dataclass(frozen=True)
class Static:
    """The constant scale ``value``, which is not sent."""

    value: float
    stored: ClassVar[str] = "fp32"
    numbers: ClassVar[int] = 0


@dataclass(frozen=True)
class SharedExponent:
    """A power of two for each block, rounded down: the largest one not above the peak, over the
    largest one that the grid has (OCP MX v1.0, section 6.3). Values above the largest number are
    clamped."""

    stored: ClassVar[str] = "pow2"
    numbers: ClassVar[int] = 1


@dataclass(frozen=True)
class TwoLevel:
    """A float32 for each row and an e4m3 for each block (NVFP4): the product scales the peak of a
    block to the largest number of the grid, the row's alone is for the peak of the row.

    The e4m3 is rounded to nearest even, from 2^-6 to 448. A row is one message of a collective.
    """

    stored: ClassVar[str] = "e4m3"
    numbers: ClassVar[int] = 1


Scale = Absmax | Rms | LeastSquares | Dual | Static | SharedExponent | TwoLevel


def row_numbers(scale: Scale) -> int:
    """Return how many numbers are sent for each row: they follow those of the blocks, as fp32."""
    return int(isinstance(scale, TwoLevel))


@dataclass(frozen=True)
class Midrange:
    """The offset of asymmetric grids: the midpoint of the smallest and the largest value of a
    block. It is subtracted before the block is scaled, and is sent."""

    stored: str = "fp32"


# --- measure, divide, refit, multiply -------------------------------------------------------------


def measure(scale: Scale, blocks: Tensor, grid: Grid) -> list[Tensor]:
    """Return the numbers that blocks ``[rows, blocks, block]`` are divided by in turn, each ``[...,
    1]``, rounded to their storage format; then those of rows, ``[rows, 1, 1]``.

    No number is below the smallest normal number, so a block of zeros or subnormals is coded as
    zeros. On a grid without a zero the scale is zero for a block of zeros, so all codes decode to
    zero.
    """
    if not scale.numbers:
        return []
    peak = peak_of(blocks)
    numbers = _measure(scale, blocks, peak, grid)
    if not grid.has_zero:
        tiny = torch.finfo(blocks.dtype).tiny
        numbers[-1] = torch.where(peak < grid.largest * tiny, 0.0, numbers[-1])
    if isinstance(scale, TwoLevel):
        number, row = numbers
        return [storage.round_nearest(propagate_nonfinite(number, peak), scale.stored), row]
    return [storage.round_up(propagate_nonfinite(number, peak), scale.stored) for number in numbers]


@by_type
def _measure(scale: Scale, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    """Return the numbers of ``measure`` before rounding."""
    raise NotImplementedError(scale)


@_measure.register
def _absmax(scale: Absmax, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    return [(peak / grid.largest).clamp_min(torch.finfo(blocks.dtype).tiny)]


@_measure.register
def _rms(scale: Rms, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    limits = torch.finfo(blocks.dtype)
    return [(rms_of(blocks, peak) / grid.sigma).clamp(limits.tiny, limits.max)]  # sigma may be < 1


@_measure.register
def _least_squares(scale: LeastSquares, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    return _measure(start_of(scale, grid), blocks, peak, grid)


@_measure.register
def _shared_exponent(
    scale: SharedExponent, blocks: Tensor, peak: Tensor, grid: Grid
) -> list[Tensor]:
    power = power_below(peak) * (1 / largest_power(grid))
    return [power.clamp_min(torch.finfo(blocks.dtype).tiny)]


@_measure.register
def _two_level(scale: TwoLevel, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    row = row_scale(row_peak(blocks), grid)
    return [two_level(peak, row, grid), row]


@_measure.register
def _dual(scale: Dual, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    tiny = torch.finfo(blocks.dtype).tiny
    sigma = rms_of(blocks, peak).clamp_min(tiny)
    return [sigma, (peak_of(blocks / sigma) / grid.largest).clamp_min(tiny)]


def start_of(scale: LeastSquares, grid: Grid) -> Rms | Absmax:
    """Return the scale that least squares starts from: the root mean square if the grid is made for
    values of deviation 1."""
    return Rms(scale.stored) if grid.sigma == 1.0 else Absmax(scale.stored)


@by_type
def divide(scale: Scale, blocks: Tensor, numbers: Sequence[Tensor], grid: Grid) -> Tensor:
    """Divide blocks by the numbers of ``measure``: one division per block and one product per
    value."""
    raise NotImplementedError(scale)


@divide.register
def _divide_by_numbers(
    scale: Absmax | Rms | LeastSquares | Dual | SharedExponent,
    blocks: Tensor,
    numbers: Sequence[Tensor],
    grid: Grid,
) -> Tensor:
    tiny = torch.finfo(blocks.dtype).tiny
    for number in numbers:
        blocks = blocks * (
            1 / (number if grid.has_zero else torch.where(number == 0, tiny, number))
        )
    return blocks


@divide.register
def _divide_by_two_levels(
    scale: TwoLevel, blocks: Tensor, numbers: Sequence[Tensor], grid: Grid
) -> Tensor:
    number, row = numbers
    return blocks * ((1 / row) / number)


@divide.register
def _divide_static(scale: Static, blocks: Tensor, numbers: Sequence[Tensor], grid: Grid) -> Tensor:
    values, far = blocks / scale.value, 2 * grid.largest
    # A finite value that overflows in the division is large, not nonfinite: only nonfinite inputs
    # are marked.
    return torch.where(blocks.isfinite(), values.clamp(-far, far), values)


@by_type
def refit(
    scale: Scale, blocks: Tensor, codes: Tensor, numbers: list[Tensor], grid: Grid
) -> list[Tensor]:
    """Return the numbers to send once the codes are known: unchanged except for least squares."""
    raise NotImplementedError(scale)


@refit.register
def _unchanged(
    scale: Absmax | Rms | Dual | Static | SharedExponent | TwoLevel,
    blocks: Tensor,
    codes: Tensor,
    numbers: list[Tensor],
    grid: Grid,
) -> list[Tensor]:
    return numbers


@refit.register
def _refit_least_squares(
    scale: LeastSquares, blocks: Tensor, codes: Tensor, numbers: list[Tensor], grid: Grid
) -> list[Tensor]:
    """Return ``<x, q> / <q, q>`` rounded to the nearest number of the storage format; the first
    scale if q is zero."""
    decoded, first = decode(grid, codes, blocks.dtype), numbers[0]
    size = first.clamp_min(torch.finfo(blocks.dtype).tiny)
    dot = (blocks / size * decoded).sum(dim=-1, keepdim=True)
    norm = decoded.square().sum(dim=-1, keepdim=True)
    factor = torch.where(norm > 0, dot / norm, 1.0).clamp(0.0, 2.0)
    return [storage.round_nearest(first * factor, scale.stored)]


@by_type
def multiply(scale: Scale, values: Tensor, numbers: Sequence[Tensor]) -> Tensor:
    """The inverse of ``divide``."""
    raise NotImplementedError(scale)


@multiply.register
def _multiply_by_numbers(
    scale: Absmax | Rms | LeastSquares | Dual | SharedExponent,
    values: Tensor,
    numbers: Sequence[Tensor],
) -> Tensor:
    for number in reversed(numbers):
        values = values * number
    return values


@multiply.register
def _multiply_by_two_levels(scale: TwoLevel, values: Tensor, numbers: Sequence[Tensor]) -> Tensor:
    number, row = numbers
    return values * (number * row)


@multiply.register
def _multiply_static(scale: Static, values: Tensor, numbers: Sequence[Tensor]) -> Tensor:
    return values * scale.value


def middle_of(offset: Midrange, blocks: Tensor) -> Tensor:
    """Return the offset of each block, ``[..., 1]``, rounded to its storage format."""
    low, high = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    return storage.round_nearest(low / 2 + high / 2, offset.stored)


def peak_of(blocks: Tensor) -> Tensor:
    """Return ``max|x|`` of each block, ``[..., 1]``; NaN if the block contains NaN, Inf if it
    contains Inf."""
    return blocks.abs().amax(dim=-1, keepdim=True)


def row_peak(blocks: Tensor) -> Tensor:
    """Return ``max|x|`` of the finite values of each row ``[rows, ...]``, ``[rows, 1, 1]``; no
    number of an empty row, ``[rows, 0, 1]``."""
    size = torch.where(blocks.isfinite(), blocks.abs(), 0.0).flatten(1)
    if isinstance(size.shape[1], int) and size.shape[1] == 0:
        return size.unsqueeze(-1)
    return size.amax(dim=1).reshape(-1, 1, 1)


def row_scale(peak: Tensor, grid: Grid) -> Tensor:
    """Return the scale of rows with these peaks, in two levels: the largest number of e4m3 is then
    the scale of the block with the peak."""
    return (peak / (grid.largest * storage.LARGEST_E4M3)).clamp_min(LEAST_ROW_SCALE)


def two_level(peak: Tensor, row: Tensor, grid: Grid) -> Tensor:
    """Return the scales of blocks with these peaks in units of the scale of their row, before
    rounding."""
    return (peak / grid.largest / row).clamp(LEAST_E4M3, storage.LARGEST_E4M3)


def power_below(number: Tensor) -> Tensor:
    """Return the largest power of two that is not above a positive normal number; Inf and NaN
    become Inf."""
    if number.dtype == torch.float64:
        return (number.view(torch.int64) & (0x7FF << 52)).view(torch.float64)
    return (number.view(torch.int32) & 0x7F800000).view(torch.float32)


def propagate_nonfinite(scale: Tensor, peak: Tensor) -> Tensor:
    """Return NaN if the block contains any nonfinite value, so that the whole block decodes to
    nonfinite values (law 2)."""
    return scale + (peak - peak)  # inf - inf is NaN; a finite peak leaves the scale unchanged


def rms_of(blocks: Tensor, peak: Tensor) -> Tensor:
    """Return the root mean square of each block, ``[..., 1]``; computed from values divided by the
    peak, whose squares cannot overflow."""
    safe = peak.clamp_min(torch.finfo(blocks.dtype).tiny)
    return (blocks / safe).square().mean(dim=-1, keepdim=True).sqrt() * peak


# --- error bounds ---------------------------------------------------------------------------------


@by_type
def bound(scale: Scale, grid: Grid, half: float, size: int) -> float:
    """Return ``Codec.bound`` for blocks of ``size`` values, each with an error of ``half`` in grid
    units: ``sqrt(size)`` times the bound of one value."""
    raise NotImplementedError(scale)


@bound.register
def _bound_peak(scale: Absmax | Dual, grid: Grid, half: float, size: int) -> float:
    return math.sqrt(size) * half / grid.largest * storage.growth(scale.stored) * (1 + 2**-7)


@bound.register
def _bound_shared_exponent(scale: SharedExponent, grid: Grid, half: float, size: int) -> float:
    """In grid units the peak is from ``2^emax`` to ``2^(emax + 1)``, which may be above the largest
    number."""
    power = largest_power(grid)
    return math.sqrt(size) * max(half / power, 1 - grid.largest / (2 * power))


@bound.register
def _bound_two_level(scale: TwoLevel, grid: Grid, half: float, size: int) -> float:
    """All values of a block much smaller than its row may be lost: see ``bound_with_zero``."""
    return math.inf


@bound.register
def _bound_rms(scale: Rms, grid: Grid, half: float, size: int) -> float:
    """Clamping a value above the largest number loses at most the value itself."""
    gap = half / grid.sigma * storage.growth(scale.stored)
    return math.sqrt(1 + gap * gap) * (1 + 2**-8)


@bound.register
def _bound_least_squares(scale: LeastSquares, grid: Grid, half: float, size: int) -> float:
    return bound(start_of(scale, grid), grid, half, size)


@bound.register
def _bound_static(scale: Static, grid: Grid, half: float, size: int) -> float:
    return 1.0


def bound_with_zero(scale: Scale) -> float:
    """Return the same bound for a grid with a zero and rounding to nearest. The error of a value is
    at most its own size, unless the value is rescaled or clamped to a static range."""
    nearest = (Absmax, Dual, SharedExponent, TwoLevel)
    return 1 + 2**-7 if isinstance(scale, nearest) else math.inf


@by_type
def floor(scale: Scale, grid: Grid, half: float, dtype: torch.dtype) -> float:
    """Return the additional absolute error of a value scaled in ``dtype``. A block whose scale
    would be below the smallest normal number decodes to zero, on a grid without a zero level."""
    raise NotImplementedError(scale)


@floor.register
def _floor_of_numbers(
    scale: Absmax | Rms | LeastSquares | Dual | SharedExponent,
    grid: Grid,
    half: float,
    dtype: torch.dtype,
) -> float:
    steps = 2 * half if grid.has_zero else grid.largest + half
    return float(torch.finfo(dtype).tiny) * steps


@floor.register
def _floor_two_level(scale: TwoLevel, grid: Grid, half: float, dtype: torch.dtype) -> float:
    return LEAST_ROW_SCALE * LEAST_E4M3 * 2 * half


@floor.register
def _floor_static(scale: Static, grid: Grid, half: float, dtype: torch.dtype) -> float:
    return half * scale.value
