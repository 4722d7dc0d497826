"""Scales: by how much the values of a block are divided before they meet the grid, and how that
number travels.

A scale is plain data; what it computes are the functions ``measure``, ``divide``, ``refit`` and
``multiply``, dispatched on its type, and so are ``bound`` and ``floor``, what it costs. (Every type
is registered itself: Dynamo of torch 2.11 traces no search through base classes.) ``stored`` is how
its numbers travel: ``fp32``, ``bf16`` or ``pow2`` (an exponent alone). ``numbers`` says how many
travel for each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from commpass.codecs.block.grids import Grid, decode
from commpass.codecs.dispatch import by_type
from commpass.codecs.rows import as_bytes

STORED = {"fp32": 4, "bf16": 2, "pow2": 1}
"""Bytes of a stored number; 8 for float64 data, whose scales may lie outside the range of the
others."""


@dataclass(frozen=True)
class Absmax:
    """The peak of a block lands on the grid's largest number."""

    stored: str = "fp32"
    numbers: ClassVar[int] = 1


@dataclass(frozen=True)
class Rms:
    """The root mean square lands on the grid's ``sigma``; what lies above the largest is cut."""

    stored: str = "fp32"
    numbers: ClassVar[int] = 1


@dataclass(frozen=True)
class LeastSquares:
    """As ``Rms`` or ``Absmax`` (whichever fits the grid), then the least-squares factor ``<x, q> /
    <q, q>`` of what was coded replaces it."""

    stored: str = "fp32"
    numbers: ClassVar[int] = 1


@dataclass(frozen=True)
class Dual:
    """Divided by the root mean square, then by the peak of that (TACO, section 3.2); both
    travel."""

    stored: str = "fp32"
    numbers: ClassVar[int] = 2


@dataclass(frozen=True)
class Static:
    """``value``, which nobody sends."""

    value: float
    stored: ClassVar[str] = "fp32"
    numbers: ClassVar[int] = 0


Scale = Absmax | Rms | LeastSquares | Dual | Static


@dataclass(frozen=True)
class Midrange:
    """The offset of asymmetric grids: midway between the least and the largest value of a block. It
    is subtracted before the block is scaled, and travels."""

    stored: str = "fp32"


# --- what they compute ----------------------------------------------------------------------------


def measure(scale: Scale, blocks: Tensor, grid: Grid) -> list[Tensor]:
    """The numbers that blocks ``[..., block]`` are divided by, one after the other, each ``[...,
    1]``, as they will be stored.

    None is below the smallest normal number, so that a block of zeros or subnormals is coded as
    zeros. On a grid without a zero the scale itself is zero for a block of zeros: all codes then
    stand for zero.
    """
    if not scale.numbers:
        return []
    peak = peak_of(blocks)
    made = _measured(scale, blocks, peak, grid)
    if not grid.has_zero:
        tiny = torch.finfo(blocks.dtype).tiny
        made[-1] = torch.where(peak < grid.largest * tiny, 0.0, made[-1])
    return [round_up(propagate_nonfinite(number, peak), scale.stored) for number in made]


@by_type
def _measured(scale: Scale, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    """What ``measure`` gives, before it is rounded."""
    raise NotImplementedError(scale)


@_measured.register
def _absmax(scale: Absmax, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    return [(peak / grid.largest).clamp_min(torch.finfo(blocks.dtype).tiny)]


@_measured.register
def _rms(scale: Rms, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    limits = torch.finfo(blocks.dtype)
    return [(rms_of(blocks, peak) / grid.sigma).clamp(limits.tiny, limits.max)]  # sigma may be < 1


@_measured.register
def _first(scale: LeastSquares, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    return _measured(start_of(scale, grid), blocks, peak, grid)


@_measured.register
def _dual(scale: Dual, blocks: Tensor, peak: Tensor, grid: Grid) -> list[Tensor]:
    tiny = torch.finfo(blocks.dtype).tiny
    sigma = rms_of(blocks, peak).clamp_min(tiny)
    return [sigma, (peak_of(blocks / sigma) / grid.largest).clamp_min(tiny)]


def start_of(scale: LeastSquares, grid: Grid) -> Rms | Absmax:
    """From what least squares start: the root mean square for a grid made for values of deviation
    1."""
    return Rms(scale.stored) if grid.sigma == 1.0 else Absmax(scale.stored)


@by_type
def divide(scale: Scale, blocks: Tensor, numbers: Sequence[Tensor], grid: Grid) -> Tensor:
    """Blocks in units of the grid, by the numbers of ``measure``: one division a block, and a
    product a value."""
    raise NotImplementedError(scale)


@divide.register
def _divide_by_numbers(
    scale: Absmax | Rms | LeastSquares | Dual, blocks: Tensor, numbers: Sequence[Tensor], grid: Grid
) -> Tensor:
    tiny = torch.finfo(blocks.dtype).tiny
    for number in numbers:
        blocks = blocks * (
            1 / (number if grid.has_zero else torch.where(number == 0, tiny, number))
        )
    return blocks


@divide.register
def _divide_static(scale: Static, blocks: Tensor, numbers: Sequence[Tensor], grid: Grid) -> Tensor:
    values, far = blocks / scale.value, 2 * grid.largest
    # A finite value that the division makes infinite is a large one: only what was not finite is
    # marked so.
    return torch.where(blocks.isfinite(), values.clamp(-far, far), values)


@by_type
def refit(
    scale: Scale, blocks: Tensor, codes: Tensor, numbers: list[Tensor], grid: Grid
) -> list[Tensor]:
    """The numbers that travel, once the codes are known: the same, but for least squares."""
    raise NotImplementedError(scale)


@refit.register
def _as_they_are(
    scale: Absmax | Rms | Dual | Static,
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
    """``<x, q> / <q, q>``, to the nearest number that can be stored; the first one where q is
    zero."""
    decoded, first = decode(grid, codes, blocks.dtype), numbers[0]
    size = first.clamp_min(torch.finfo(blocks.dtype).tiny)
    dot = (blocks / size * decoded).sum(dim=-1, keepdim=True)
    norm = decoded.square().sum(dim=-1, keepdim=True)
    factor = torch.where(norm > 0, dot / norm, 1.0).clamp(0.0, 2.0)
    return [round_nearest(first * factor, scale.stored)]


@by_type
def multiply(scale: Scale, values: Tensor, numbers: Sequence[Tensor]) -> Tensor:
    """The inverse of ``divide``."""
    raise NotImplementedError(scale)


@multiply.register
def _multiply_by_numbers(
    scale: Absmax | Rms | LeastSquares | Dual, values: Tensor, numbers: Sequence[Tensor]
) -> Tensor:
    for number in reversed(numbers):
        values = values * number
    return values


@multiply.register
def _multiply_static(scale: Static, values: Tensor, numbers: Sequence[Tensor]) -> Tensor:
    return values * scale.value


def middle_of(offset: Midrange, blocks: Tensor) -> Tensor:
    """The offset of each block, ``[..., 1]``, as it will be stored."""
    low, high = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    return round_nearest(low / 2 + high / 2, offset.stored)


def peak_of(blocks: Tensor) -> Tensor:
    """``max|x|`` of each block, ``[..., 1]``; NaN where the block holds NaN, Inf where it holds
    Inf."""
    return blocks.abs().amax(dim=-1, keepdim=True)


def propagate_nonfinite(scale: Tensor, peak: Tensor) -> Tensor:
    """NaN where the block holds anything that is not finite, so that the whole block stays not
    finite (law 2)."""
    return scale + (peak - peak)  # inf - inf is NaN, and anything finite leaves the scale as it is


def rms_of(blocks: Tensor, peak: Tensor) -> Tensor:
    """Root mean square of each block, ``[..., 1]``; of values divided by the peak, whose squares
    cannot overflow."""
    safe = peak.clamp_min(torch.finfo(blocks.dtype).tiny)
    return (blocks / safe).square().mean(dim=-1, keepdim=True).sqrt() * peak


# --- what they cost -------------------------------------------------------------------------------


@by_type
def bound(scale: Scale, grid: Grid, half: float, size: int) -> float:
    """What ``Codec.bound`` says, for blocks of ``size`` values of which each is off by ``half`` in
    units of the grid, if all were: ``sqrt(size)`` times that of one."""
    raise NotImplementedError(scale)


@bound.register
def _bound_peak(scale: Absmax | Dual, grid: Grid, half: float, size: int) -> float:
    return math.sqrt(size) * half / grid.largest * growth(scale.stored) * (1 + 2**-7)


@bound.register
def _bound_rms(scale: Rms, grid: Grid, half: float, size: int) -> float:
    """Of values above the largest, which are cut, one loses no more than it was."""
    gap = half / grid.sigma * growth(scale.stored)
    return math.sqrt(1 + gap * gap) * (1 + 2**-8)


@bound.register
def _bound_least_squares(scale: LeastSquares, grid: Grid, half: float, size: int) -> float:
    return bound(start_of(scale, grid), grid, half, size)


@bound.register
def _bound_static(scale: Static, grid: Grid, half: float, size: int) -> float:
    return 1.0


def bound_with_zero(scale: Scale) -> float:
    """A bound of the same where zero is a number of the grid, and values are rounded to the nearest
    one: none is then off by more than its own size, unless it is cut or scaled anew."""
    return 1 + 2**-7 if isinstance(scale, (Absmax, Dual)) else math.inf


@by_type
def floor(scale: Scale, grid: Grid, half: float, dtype: torch.dtype) -> float:
    """The error that a value of a block may have besides, scaled in ``dtype``: a block whose scale
    would be below the smallest normal number is zero, on a grid that has none of its own."""
    raise NotImplementedError(scale)


@floor.register
def _floor_of_numbers(
    scale: Absmax | Rms | LeastSquares | Dual, grid: Grid, half: float, dtype: torch.dtype
) -> float:
    steps = 2 * half if grid.has_zero else grid.largest + half
    return float(torch.finfo(dtype).tiny) * steps


@floor.register
def _floor_static(scale: Static, grid: Grid, half: float, dtype: torch.dtype) -> float:
    return half * scale.value


# --- how they travel ------------------------------------------------------------------------------


def itemsize(stored: str, dtype: torch.dtype) -> int:
    """Bytes of a stored number, for data scaled in ``dtype``."""
    return 8 if dtype == torch.float64 else STORED[stored]


def growth(stored: str) -> float:
    """By what factor a scale may be larger than its rule says, since it is rounded up when it is
    stored."""
    return {"fp32": 1.0, "bf16": 1 + 2**-7, "pow2": 2.0}[stored]


def round_up(scale: Tensor, stored: str) -> Tensor:
    """The least number of the stored form that is not below a positive scale (nothing of the block
    is then cut off)."""
    return scale if scale.dtype == torch.float64 else UP[stored](scale)


def round_nearest(number: Tensor, stored: str) -> Tensor:
    """The nearest number of the stored form; of two equally near, the even one (of powers of two,
    the larger)."""
    return number if number.dtype == torch.float64 else NEAREST[stored](number)


def materialized(number: Tensor, stored: str) -> Tensor:
    """The same number. On a CPU Inductor would compute it anew for every vector of its block; by
    way of its bytes, once. On a GPU it stays part of the one kernel."""
    if number.device.type != "cpu":
        return number
    return load(store(number.squeeze(-1), stored), stored, number.dtype).unsqueeze(-1)


def in_form(numbers: Tensor, stored: str) -> Tensor:
    """Numbers as they are stored: in the dtype of the stored form, or the bytes of a power."""
    return numbers if numbers.dtype == torch.float64 else STORE[stored](numbers)


def store(numbers: Tensor, stored: str) -> Tensor:
    """``[..., n]`` numbers of the stored form to bytes ``[..., n * itemsize]``."""
    return as_bytes(in_form(numbers, stored))


def load(raw: Tensor, stored: str, dtype: torch.dtype) -> Tensor:
    """The inverse of ``store``, in ``dtype``. ``raw`` is a region of a wire, which lies at a
    multiple of 8 bytes."""
    return raw.view(dtype) if dtype == torch.float64 else LOAD[stored](raw)


def _same(number: Tensor) -> Tensor:
    return number


def _up_to_bits(scale: Tensor, low: int, largest: float) -> Tensor:
    """Rounded up to a float32 whose lowest ``low`` bits are zero."""
    bits = scale.view(torch.int32)
    whole = (((bits + (2**low - 1)) >> low) << low).view(torch.float32)
    return whole.clamp(max=largest) + (scale - scale)  # NaN, whatever its bits, stays one


def _up_to_bf16(scale: Tensor) -> Tensor:
    return _up_to_bits(scale, 16, torch.finfo(torch.bfloat16).max)


def _up_to_power(scale: Tensor) -> Tensor:
    return _up_to_bits(scale, 23, 2.0**127)


def _nearest_bf16(number: Tensor) -> Tensor:
    bits = number.view(torch.int32)
    even = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).view(torch.float32)
    limit = torch.finfo(torch.bfloat16).max
    return even.clamp(-limit, limit) + (number - number)


def _nearest_power(number: Tensor) -> Tensor:
    """Half of the mantissa is midway to the next power."""
    bits = number.view(torch.int32)
    power = (((bits + (1 << 22)) >> 23) << 23).view(torch.float32)
    return power.clamp(max=2.0**127) + (number - number)


def _store_bf16(numbers: Tensor) -> Tensor:
    return numbers.to(torch.bfloat16)


def _store_power(numbers: Tensor) -> Tensor:
    return ((numbers.view(torch.int32) >> 23) & 255).to(torch.uint8)


def _load_fp32(raw: Tensor) -> Tensor:
    return raw.view(torch.float32)


def _load_bf16(raw: Tensor) -> Tensor:
    return raw.view(torch.bfloat16).to(torch.float32)


def _load_power(raw: Tensor) -> Tensor:
    power = raw.to(torch.int32)
    return torch.where(power == 255, math.nan, (power << 23).view(torch.float32))


Numbers = Callable[[Tensor], Tensor]
UP: dict[str, Numbers] = {"fp32": _same, "bf16": _up_to_bf16, "pow2": _up_to_power}
NEAREST: dict[str, Numbers] = {"fp32": _same, "bf16": _nearest_bf16, "pow2": _nearest_power}
STORE: dict[str, Numbers] = {"fp32": _same, "bf16": _store_bf16, "pow2": _store_power}
LOAD: dict[str, Numbers] = {"fp32": _load_fp32, "bf16": _load_bf16, "pow2": _load_power}
