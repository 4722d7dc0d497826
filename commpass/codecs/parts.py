"""The parts that codecs are composed of: transforms, scales, grids and packing.

All functions work on blocks ``[..., block]`` in the accumulation dtype (float32, or float64 for float64 data), use plain
aten operations only, hold no tensor constants, and never look at values from Python: they trace under fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

# --- transforms -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transform:
    """A linear map of a block and its inverse. ``forward`` never enlarges the largest magnitude of a block."""

    name: str
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]


def _sylvester(width: int, like: Tensor) -> Tensor:
    """The Hadamard matrix of Sylvester's construction, ``H[i, j] = (-1)^popcount(i & j)``, unnormalised."""
    index = torch.arange(width, device=like.device)
    common = index[:, None] & index[None, :]
    parity = torch.zeros_like(common)
    for bit in range(width.bit_length() - 1):
        parity = parity ^ (common >> bit)
    return (1 - 2 * (parity & 1)).to(like.dtype)


def _hadamard(blocks: Tensor, *, normalised: bool) -> Tensor:
    """``H @ block``, divided by the width if ``normalised``, as two small matmuls: ``H(ab) = H(a) (x) H(b)``."""
    width = blocks.shape[-1]
    left = 1 << (width.bit_length() // 2)
    right = width // left
    rows, columns = _sylvester(left, blocks), _sylvester(right, blocks)
    if normalised:
        rows, columns = rows / left, columns / right
    return (rows @ (blocks.unflatten(-1, (left, right)) @ columns)).flatten(-2)


NO_TRANSFORM = Transform("none", lambda blocks: blocks, lambda blocks: blocks)

HADAMARD = Transform(
    "hadamard",
    # Scaled by 1/width (and not 1/sqrt(width)) on the way in: then |H x| <= max|x|, and a block of the largest finite
    # numbers cannot overflow. H H = width * I makes the plain H its inverse.
    partial(_hadamard, normalised=True),
    partial(_hadamard, normalised=False),
)
"""Walsh-Hadamard rotation of the block (TACO, section 3): spreads an outlier over all values of its block."""

# --- scales -----------------------------------------------------------------------------------------------------------


def absmax_scale(blocks: Tensor, largest_code: float) -> Tensor:
    """One scale a block, ``max|x| / largest_code``; shape ``[..., 1]``.

    Not below the smallest normal number, so that a block of zeros or subnormals is coded as zeros; NaN where the block
    holds anything that is not finite, so that the whole block stays not finite (law 2).
    """
    peak = blocks.abs().amax(dim=-1, keepdim=True)
    scale = (peak / largest_code).clamp_min(torch.finfo(blocks.dtype).tiny)
    return scale + (peak - peak)  # inf - inf is NaN, and anything finite leaves the scale as it is


# --- grids ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """The values that a code can stand for. ``encode`` gives uint8 codes below ``2**bits``; ``largest`` codes the peak."""

    name: str
    bits: int
    largest: float
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, torch.dtype], Tensor]


def int_grid(bits: int) -> Grid:
    """Symmetric integers ``-(2^(b-1)-1) ... 2^(b-1)-1``, rounded to nearest even."""
    largest = 2 ** (bits - 1) - 1
    middle = 2 ** (bits - 1)

    def encode(values: Tensor) -> Tensor:
        return (values.round().clamp(-largest, largest) + middle).to(torch.uint8)

    def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype) - middle

    return Grid(f"int{bits}", bits, float(largest), encode, decode)


def fp8_grid(form: str) -> Grid:
    """The 8-bit floats e4m3 (largest 448) and e5m2 (largest 57344), rounded to nearest even."""
    dtype8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form]
    largest = torch.finfo(dtype8).max

    def encode(values: Tensor) -> Tensor:
        return values.clamp(-largest, largest).to(torch.float32).to(dtype8).view(torch.uint8)

    def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(dtype8).to(dtype)

    return Grid(f"fp8-{form}", 8, largest, encode, decode)


# --- packing ----------------------------------------------------------------------------------------------------------


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[..., block]`` to bytes ``[..., block * bits / 8]``; part i of a byte comes from part i of the block."""
    if bits == 8:
        return codes
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (per_byte, codes.shape[-1] // per_byte)).unbind(-2)
    packed = parts[0]
    for position, part in enumerate(parts[1:], start=1):
        packed = packed | (part << (bits * position))
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``pack``."""
    if bits == 8:
        return packed
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1)


def to_bytes(values: Tensor) -> Tensor:
    """float32 or float64 ``[..., n]`` to its bytes, little end first, ``[..., n * itemsize]``.

    By shifts, since a view to a dtype of another size is no pointwise operation and would cost a kernel of its own.
    """
    bits = values.view(_whole(values.dtype))
    return ((bits.unsqueeze(-1) >> _shifts(bits)) & 255).to(torch.uint8).flatten(-2)


def from_bytes(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``to_bytes``."""
    parts = raw.unflatten(-1, (raw.shape[-1] // dtype.itemsize, dtype.itemsize)).to(_whole(dtype))
    return (parts << _shifts(parts)).sum(dim=-1, dtype=parts.dtype).view(dtype)  # no two parts share a bit


def _whole(dtype: torch.dtype) -> torch.dtype:
    """The integers as wide as a float."""
    return torch.int32 if dtype.itemsize == 4 else torch.int64


def _shifts(whole: Tensor) -> Tensor:
    """How far each byte of an integer lies from its little end."""
    return 8 * torch.arange(whole.dtype.itemsize, device=whole.device, dtype=whole.dtype)


def pad(rows: Tensor, length: int) -> Tensor:
    """Zeros behind the last dimension up to ``length``, which may be symbolic; nothing is traced where nothing is missing."""
    missing = length - rows.shape[-1]
    return rows if isinstance(missing, int) and missing == 0 else F.pad(rows, (0, missing))


def cut(rows: Tensor, length: int) -> Tensor:
    """The first ``length`` of the last dimension; nothing is traced where that is all."""
    return rows if isinstance(length, int) and length == rows.shape[-1] else rows.narrow(-1, 0, length)


def ceil_to(number: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``number`` (which may be symbolic)."""
    return (number + step - 1) // step * step


def is_power_of_two(number: int) -> bool:
    return number > 0 and math.log2(number).is_integer()
