"""Helpers of all codecs: numbers as bytes, padding and cutting of rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 128
"""The regions of a row are padded to this many bytes: unaligned rows prevent vector stores and cost
a copy."""


def to_bytes(values: Tensor) -> Tensor:
    """Convert numbers ``[..., n]`` to little-endian bytes, ``[..., n * itemsize]``.

    Shifts are used because a view as a dtype of another size is not pointwise and would need its
    own kernel.
    """
    bits = (
        values
        if values.dtype in (torch.int16, torch.int32, torch.int64)
        else values.view(_integer_dtype(values.dtype))
    )
    return ((bits.unsqueeze(-1) >> _shifts(bits)) & 255).to(torch.uint8).flatten(-2)


def from_bytes(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``to_bytes``; ``dtype`` has 2, 4 or 8 bytes."""
    parts = raw.unflatten(-1, (raw.shape[-1] // dtype.itemsize, dtype.itemsize)).to(
        _integer_dtype(dtype)
    )
    return (
        (parts << _shifts(parts)).sum(dim=-1, dtype=parts.dtype).view(dtype)
    )  # no two parts share a bit


def _integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype of the same width."""
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _shifts(integer_dtype: Tensor) -> Tensor:
    """Return the shift of each byte of an integer, lowest byte first."""
    return 8 * torch.arange(
        integer_dtype.dtype.itemsize, device=integer_dtype.device, dtype=integer_dtype.dtype
    )


def pad(rows: Tensor, length: int) -> Tensor:
    """Pad the last dimension with zeros to ``length``, which may be symbolic; nothing is traced if
    no padding is needed."""
    missing = length - rows.shape[-1]
    return rows if isinstance(missing, int) and missing == 0 else F.pad(rows, (0, missing))


def cut(rows: Tensor, length: int) -> Tensor:
    """Return the first ``length`` of the last dimension; nothing is traced if that is all."""
    return (
        rows if isinstance(length, int) and length == rows.shape[-1] else rows.narrow(-1, 0, length)
    )


def cut_apart(rows: Tensor, length: int) -> Tensor:
    """As ``cut``, but prevent the compiler from fusing the producer of the rows with the consumer
    of the cut.

    On a CPU, Inductor (torch 2.11 to 2.15) splits a loop over ``length`` values that loads one
    scale per block into ``length // block`` whole blocks. If anything elementwise follows the cut,
    it leaves the tail *unwritten*. A cut of bytes is a view of a buffer, which Inductor does not
    look through.
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
    """View ``[..., n]`` numbers as bytes ``[..., n * itemsize]``."""
    if numbers.dtype == torch.uint8:
        return numbers
    if isinstance(numbers.shape[-1], int) and numbers.shape[-1] == 1:
        # Inductor of torch 2.11 may give a last dimension of size 1 any stride, but a view as bytes
        # needs a stride of 1.
        return (
            torch.cat([numbers, numbers], dim=-1).view(torch.uint8).narrow(-1, 0, numbers.itemsize)
        )
    return numbers.view(torch.uint8)


def finite_stays(values: Tensor, original: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp values to the largest number of ``dtype`` if the original is finite; leave the others
    unchanged (law 2)."""
    limit = torch.finfo(dtype).max
    return torch.where(original.isfinite(), values.clamp(-limit, limit), values)


def aligned(number: int) -> int:
    """Round ``number`` up to a multiple of ``ALIGNMENT``."""
    return ceil_to(number, ALIGNMENT)


def ceil_to(number: int, step: int) -> int:
    """Round ``number``, which may be symbolic, up to a multiple of ``step``."""
    return (number + step - 1) // step * step


def larger(a: int, b: int) -> int:
    """Return the larger of two numbers, each possibly symbolic. Dynamo of torch 2.11 does not
    support ``sym_max`` of plain numbers."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def smaller(a: int, b: int) -> int:
    """Return the smaller of two numbers; see ``larger``."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def is_power_of_two(number: int) -> bool:
    return number > 0 and math.log2(number).is_integer()
