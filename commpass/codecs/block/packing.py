"""Pack codes of 1 to 8 bits into bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def widths(bits: int) -> list[int]:
    """The powers of two that add up to ``bits``, descending: codes of 6 bits are sent as 4 bits and
    2 bits."""
    return [part for part in (8, 4, 2, 1) if bits & part]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``[..., block]`` to bytes ``[..., block * bits / 8]``, without gaps for any
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
