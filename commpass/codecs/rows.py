"""Numbers as bytes; padding and cutting of rows: what all codecs are made with."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 128
"""Bytes to which the regions of a row are padded: odd rows lose vector stores and cost a copy."""


def to_bytes(values: Tensor) -> Tensor:
    """Numbers ``[..., n]`` to their bytes, little end first, ``[..., n * itemsize]``.

    By shifts, since a view to a dtype of another size is no pointwise operation and would cost a
    kernel of its own.
    """
    bits = (
        values
        if values.dtype in (torch.int16, torch.int32, torch.int64)
        else values.view(_integer_dtype(values.dtype))
    )
    return ((bits.unsqueeze(-1) >> _shifts(bits)) & 255).to(torch.uint8).flatten(-2)


def from_bytes(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``to_bytes``; ``dtype`` is float32, float64 or an integer of their width."""
    parts = raw.unflatten(-1, (raw.shape[-1] // dtype.itemsize, dtype.itemsize)).to(
        _integer_dtype(dtype)
    )
    return (
        (parts << _shifts(parts)).sum(dim=-1, dtype=parts.dtype).view(dtype)
    )  # no two parts share a bit


def _integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integers as wide as a number."""
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _shifts(integer_dtype: Tensor) -> Tensor:
    """How far each byte of an integer lies from its little end."""
    return 8 * torch.arange(
        integer_dtype.dtype.itemsize, device=integer_dtype.device, dtype=integer_dtype.dtype
    )


def pad(rows: Tensor, length: int) -> Tensor:
    """Zeros behind the last dimension up to ``length``, which may be symbolic; nothing is traced
    where nothing is missing."""
    missing = length - rows.shape[-1]
    return rows if isinstance(missing, int) and missing == 0 else F.pad(rows, (0, missing))


def cut(rows: Tensor, length: int) -> Tensor:
    """The first ``length`` of the last dimension; nothing is traced where that is all."""
    return (
        rows if isinstance(length, int) and length == rows.shape[-1] else rows.narrow(-1, 0, length)
    )


def cut_apart(rows: Tensor, length: int) -> Tensor:
    """As ``cut``, but what computes the rows stays apart from what takes the cut.

    On a CPU, Inductor (torch 2.11 to 2.15) splits a loop over ``length`` values that loads one
    scale a block into ``length // block`` whole blocks, and leaves the tail *unwritten*, if
    anything elementwise follows the cut. A cut of bytes is a view of a buffer, through which it
    does not see.
    """
    if rows.device.type != "cpu" or (isinstance(length, int) and length == rows.shape[-1]):
        return cut(rows, length)
    return (
        rows.contiguous()
        .view(torch.uint8)
        .narrow(-1, 0, length * rows.dtype.itemsize)
        .view(rows.dtype)
    )


def as_bytes(numbers: Tensor) -> Tensor:
    """``[..., n]`` numbers to their bytes ``[..., n * itemsize]``."""
    if numbers.dtype == torch.uint8:
        return numbers
    if isinstance(numbers.shape[-1], int) and numbers.shape[-1] == 1:
        # Inductor of torch 2.11 may give a last dimension of size 1 any stride, and a view of bytes
        # wants a stride of 1.
        return (
            torch.cat([numbers, numbers], dim=-1).view(torch.uint8).narrow(-1, 0, numbers.itemsize)
        )
    return numbers.view(torch.uint8)


def finite_stays(values: Tensor, original: Tensor, dtype: torch.dtype) -> Tensor:
    """Values cut at the largest number of ``dtype`` where the originals are finite; the others as
    they are (law 2)."""
    limit = torch.finfo(dtype).max
    return torch.where(original.isfinite(), values.clamp(-limit, limit), values)


def aligned(number: int) -> int:
    """The least multiple of ``ALIGNMENT`` that is not below ``number``."""
    return ceil_to(number, ALIGNMENT)


def ceil_to(number: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``number`` (which may be symbolic)."""
    return (number + step - 1) // step * step


def larger(a: int, b: int) -> int:
    """The larger of two numbers, of which either may be symbolic. Dynamo of torch 2.11 takes no
    ``sym_max`` of plain ones."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def smaller(a: int, b: int) -> int:
    """The smaller of two numbers; as ``larger``."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def is_power_of_two(number: int) -> bool:
    return number > 0 and math.log2(number).is_integer()
