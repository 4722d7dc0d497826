"""Codes and numbers as bytes; padding and cutting of rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 128
"""Bytes to which the regions of a row are padded: odd rows lose vector stores and cost a copy."""


def widths(bits: int) -> list[int]:
    """The powers of two that add up to ``bits``, largest first: codes of 6 bits travel as 4 bits
    and 2 bits."""
    return [part for part in (8, 4, 2, 1) if bits & part]


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[..., block]`` to bytes ``[..., block * bits / 8]``, without waste for any
    ``bits`` from 1 to 8.

    The low bits come first, in parts of 4, 2 and 1 bits; part i of a byte comes from part i of the
    block.
    """
    if bits == 8:
        return codes
    packed, low = [], 0
    for width in widths(bits):
        part = codes if width == bits else (codes >> low) & (2**width - 1)
        packed.append(_pack_even(part, width))
        low += width
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim=-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``pack``."""
    if bits == 8:
        return packed
    block = packed.shape[-1] * 8 // bits
    codes, low, start = None, 0, 0
    for width in widths(bits):
        length = block * width // 8
        part = _unpack_even(packed.narrow(-1, start, length), width)
        codes = part if codes is None else codes | (part << low)
        low, start = low + width, start + length
    assert codes is not None
    return codes


def _pack_even(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (per_byte, codes.shape[-1] // per_byte)).unbind(-2)
    packed = parts[0]
    for position, part in enumerate(parts[1:], start=1):
        packed = packed | (part << (bits * position))
    return packed


def _unpack_even(packed: Tensor, bits: int) -> Tensor:
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1)


def to_bytes(values: Tensor) -> Tensor:
    """Numbers ``[..., n]`` to their bytes, little end first, ``[..., n * itemsize]``.

    By shifts, since a view to a dtype of another size is no pointwise operation and would cost a
    kernel of its own.
    """
    bits = (
        values
        if values.dtype in (torch.int16, torch.int32, torch.int64)
        else values.view(_whole(values.dtype))
    )
    return ((bits.unsqueeze(-1) >> _shifts(bits)) & 255).to(torch.uint8).flatten(-2)


def from_bytes(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``to_bytes``; ``dtype`` is float32, float64 or an integer of their width."""
    parts = raw.unflatten(-1, (raw.shape[-1] // dtype.itemsize, dtype.itemsize)).to(_whole(dtype))
    return (
        (parts << _shifts(parts)).sum(dim=-1, dtype=parts.dtype).view(dtype)
    )  # no two parts share a bit


def _whole(dtype: torch.dtype) -> torch.dtype:
    """The integers as wide as a number."""
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _shifts(whole: Tensor) -> Tensor:
    """How far each byte of an integer lies from its little end."""
    return 8 * torch.arange(whole.dtype.itemsize, device=whole.device, dtype=whole.dtype)


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
    if isinstance(numbers.shape[-1], int) and numbers.shape[-1] == 1:
        # Inductor of torch 2.11 may give a last dimension of size 1 any stride, and a view of bytes
        # wants a stride of 1.
        return (
            torch.cat([numbers, numbers], dim=-1).view(torch.uint8).narrow(-1, 0, numbers.itemsize)
        )
    return numbers.view(torch.uint8)


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
