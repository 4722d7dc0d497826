"""Scales: by how much the values of a block are divided before they meet the grid, and how that
number travels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs.grids import Grid
from commpass.codecs.packing import as_bytes

RULES = ("absmax", "rms", "lsq", "dual", "static")
STORED = {"fp32": 4, "bf16": 2, "pow2": 1}
"""Bytes of a stored scale; 8 for float64 data, whose scales may lie outside the range of the
others."""


@dataclass(frozen=True)
class Scale:
    """``rule`` makes one scale a block, and ``stored`` is how it travels.

    absmax: the peak lands on the grid's largest number. rms: the root mean square lands on the
    grid's ``sigma``; what lies
    above the largest is cut. lsq: as rms or absmax (whichever fits the grid), then the
    least-squares factor ``<x, q> / <q, q>`` of what was coded replaces it. dual: divided by the
    root mean square, then by the peak of that (TACO, section 3.2); both travel. static: ``value``,
    which nobody sends. ``offset`` subtracts the middle between least and largest value first
    (asymmetric grids); it travels as well.
    """

    rule: str = "absmax"
    stored: str = "fp32"
    value: float = 0.0
    offset: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers travel for each block."""
        return {"static": 0, "dual": 2}.get(self.rule, 1) + self.offset

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of each, for data scaled in ``dtype``."""
        return 8 if dtype == torch.float64 else STORED[self.stored]

    def growth(self) -> float:
        """By what factor a scale may be larger than its rule says, since it is rounded when it is
        stored."""
        return {"fp32": 1.0, "bf16": 1 + 2**-7, "pow2": 2.0}[self.stored]


def peak_of(blocks: Tensor) -> Tensor:
    """``max|x|`` of each block, ``[..., 1]``; NaN where the block holds NaN, Inf where it holds
    Inf."""
    return blocks.abs().amax(dim=-1, keepdim=True)


def spoil(scale: Tensor, peak: Tensor) -> Tensor:
    """NaN where the block holds anything that is not finite, so that the whole block stays not
    finite (law 2)."""
    return scale + (peak - peak)  # inf - inf is NaN, and anything finite leaves the scale as it is


def rms_of(blocks: Tensor, peak: Tensor) -> Tensor:
    """Root mean square of each block, ``[..., 1]``; of values divided by the peak, whose squares
    cannot overflow."""
    safe = peak.clamp_min(torch.finfo(blocks.dtype).tiny)
    return (blocks / safe).square().mean(dim=-1, keepdim=True).sqrt() * peak


def measure(blocks: Tensor, scale: Scale, grid: Grid) -> list[Tensor]:
    """The numbers that the blocks are divided by, one after the other, each ``[..., 1]``, as they
    will be stored.

    None is below the smallest normal number, so that a block of zeros or subnormals is coded as
    zeros. On a grid without a zero the scale itself is zero for a block of zeros: all codes then
    stand for zero.
    """
    tiny = torch.finfo(blocks.dtype).tiny
    if scale.rule == "static":
        return []
    peak = peak_of(blocks)
    if scale.rule == "absmax" or (scale.rule == "lsq" and not rms_fits(grid)):
        made = [(peak / grid.largest).clamp_min(tiny)]
    elif scale.rule == "dual":
        sigma = rms_of(blocks, peak).clamp_min(tiny)
        made = [sigma, (peak_of(blocks / sigma) / grid.largest).clamp_min(tiny)]
    else:
        made = [
            (rms_of(blocks, peak) / grid.sigma).clamp(tiny, torch.finfo(blocks.dtype).max)
        ]  # sigma may be below 1
    if not grid.has_zero:
        made[-1] = torch.where(peak < grid.largest * tiny, 0.0, made[-1])
    return [round_up(spoil(number, peak), scale.stored) for number in made]


def rms_fits(grid: Grid) -> bool:
    """Whether a grid is made for values of deviation 1: least squares then starts from the root
    mean square."""
    return grid.sigma == 1.0


def refit(blocks: Tensor, decoded: Tensor, first: Tensor, stored: str) -> Tensor:
    """The factor of least squares, ``<x, q> / <q, q>``, to the nearest number that can be stored;
    ``first`` where q is zero."""
    size = first.clamp_min(torch.finfo(blocks.dtype).tiny)
    dot = (blocks / size * decoded).sum(dim=-1, keepdim=True)
    norm = decoded.square().sum(dim=-1, keepdim=True)
    factor = torch.where(norm > 0, dot / norm, 1.0).clamp(0.0, 2.0)
    return round_nearest(first * factor, stored)


def middle_of(blocks: Tensor, stored: str) -> Tensor:
    """Midway between the least and the largest value of each block, ``[..., 1]``, as it will be
    stored."""
    low, high = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    return round_nearest(low / 2 + high / 2, stored)


def round_up(scale: Tensor, stored: str) -> Tensor:
    """The least number of the stored form that is not below a positive scale (nothing of the block
    is then cut off)."""
    if stored == "fp32" or scale.dtype == torch.float64:
        return scale
    low = {"bf16": 16, "pow2": 23}[stored]  # bits that the form has not
    bits = scale.view(torch.int32)
    whole = (((bits + (2**low - 1)) >> low) << low).view(torch.float32)
    largest = {"bf16": torch.finfo(torch.bfloat16).max, "pow2": 2.0**127}[stored]
    return whole.clamp(max=largest) + (scale - scale)  # NaN, whatever its bits, stays one


def round_nearest(number: Tensor, stored: str) -> Tensor:
    """The nearest number of the stored form; of two equally near, the even one (of powers of two,
    the larger)."""
    if stored == "fp32" or number.dtype == torch.float64:
        return number
    bits = number.view(torch.int32)
    if stored == "pow2":  # half of the mantissa is midway to the next power
        return (((bits + (1 << 22)) >> 23) << 23).view(torch.float32).clamp(max=2.0**127) + (
            number - number
        )
    even = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).view(torch.float32)
    limit = torch.finfo(torch.bfloat16).max
    return even.clamp(-limit, limit) + (number - number)


def settled(number: Tensor, stored: str) -> Tensor:
    """The same number. On a CPU Inductor would compute it anew for every vector of its block; by
    way of its bytes, once. On a GPU it stays part of the one kernel."""
    if number.device.type != "cpu":
        return number
    return load(store(number.squeeze(-1), stored), stored, number.dtype).unsqueeze(-1)


def store(numbers: Tensor, stored: str) -> Tensor:
    """``[..., n]`` numbers of the stored form to bytes ``[..., n * itemsize]``."""
    if stored == "fp32" or numbers.dtype == torch.float64:
        return as_bytes(numbers)
    if stored == "bf16":
        return as_bytes(numbers.to(torch.bfloat16))
    return ((numbers.view(torch.int32) >> 23) & 255).to(torch.uint8)


def load(raw: Tensor, stored: str, dtype: torch.dtype) -> Tensor:
    """The inverse of ``store``, in ``dtype``. ``raw`` is a region of a wire, which lies at a
    multiple of 8 bytes."""
    if stored == "fp32" or dtype == torch.float64:
        return raw.view(dtype)
    if stored == "bf16":
        return raw.view(torch.bfloat16).to(dtype)
    power = raw.to(torch.int32)
    return torch.where(power == 255, math.nan, (power << 23).view(torch.float32))
