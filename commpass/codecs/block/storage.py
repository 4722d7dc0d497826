"""How the numbers of scales are stored on the wire: ``fp32``, ``bf16``, ``pow2`` (an exponent only:
e8m0 of OCP MX) or ``e4m3``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from commpass.codecs.rows import as_bytes

STORED = {"fp32": 4, "bf16": 2, "pow2": 1}
"""Bytes of a stored number. For float64 data it is 8 bytes, because scales may exceed the range of
the other formats."""
ITEMSIZE = STORED | {"e4m3": 1}
"""As ``STORED``, with e4m3, whose range only suffices for scales in units of another scale."""
LARGEST_E4M3 = 448.0


def itemsize(stored: str, dtype: torch.dtype) -> int:
    """Bytes of a stored number, for data scaled in ``dtype``."""
    return 8 if dtype == torch.float64 else ITEMSIZE[stored]


def growth(stored: str) -> float:
    """Return the factor by which rounding up for storage may enlarge a scale."""
    return {"fp32": 1.0, "bf16": 1 + 2**-7, "pow2": 2.0}[stored]


def round_up(scale: Tensor, stored: str) -> Tensor:
    """Round a positive scale up to its storage format, so that no value of the block is clamped."""
    return scale if scale.dtype == torch.float64 else UP[stored](scale)


def round_nearest(number: Tensor, stored: str) -> Tensor:
    """Round to the nearest number of the storage format, ties to even (for powers of two, to the
    larger)."""
    return number if number.dtype == torch.float64 else NEAREST[stored](number)


def materialized(number: Tensor, stored: str) -> Tensor:
    """Return the same number, and make Inductor compute it once per block on a CPU.

    On a CPU Inductor would recompute it for every vector of its block; a round trip through bytes
    prevents this. On a GPU the number is returned as is and stays part of the one kernel.
    """
    if number.device.type != "cpu":
        return number
    return load(store(number.squeeze(-1), stored), stored, number.dtype).unsqueeze(-1)


def in_form(numbers: Tensor, stored: str) -> Tensor:
    """Convert numbers to the storage format: its dtype, or the byte of an exponent."""
    return numbers if numbers.dtype == torch.float64 else STORE[stored](numbers)


def store(numbers: Tensor, stored: str) -> Tensor:
    """Convert ``[..., n]`` numbers of the storage format to bytes ``[..., n * itemsize]``."""
    return as_bytes(in_form(numbers, stored))


def load(raw: Tensor, stored: str, dtype: torch.dtype) -> Tensor:
    """The inverse of ``store``, in ``dtype``. ``raw`` is a region of a wire, aligned to 8 bytes."""
    return raw.view(dtype) if dtype == torch.float64 else LOAD[stored](raw)


def _same(number: Tensor) -> Tensor:
    return number


def _up_to_bits(scale: Tensor, low: int, largest: float) -> Tensor:
    """Round up to a float32 whose lowest ``low`` bits are zero."""
    bits = scale.view(torch.int32)
    whole = (((bits + (2**low - 1)) >> low) << low).view(torch.float32)
    return whole.clamp(max=largest) + (scale - scale)  # keeps NaN, whatever its bits


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
    """Half of the mantissa range is midway to the next power."""
    bits = number.view(torch.int32)
    power = (((bits + (1 << 22)) >> 23) << 23).view(torch.float32)
    return power.clamp(max=2.0**127) + (number - number)


def _nearest_e4m3(number: Tensor) -> Tensor:
    """Of normal numbers of e4m3, up to the largest."""
    bits = number.view(torch.int32)
    even = (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20).view(torch.float32)
    return even + (number - number)


def _store_bf16(numbers: Tensor) -> Tensor:
    return numbers.to(torch.bfloat16)


def _store_power(numbers: Tensor) -> Tensor:
    return ((numbers.view(torch.int32) >> 23) & 255).to(torch.uint8)


def _store_e4m3(numbers: Tensor) -> Tensor:
    """Normal numbers of e4m3, without a sign, or NaN."""
    bits = (numbers.view(torch.int32) & 0x7FFFFFFF) >> 20
    return (bits - (120 << 3)).clamp(max=0x7F).to(torch.uint8)


def _load_fp32(raw: Tensor) -> Tensor:
    return raw.view(torch.float32)


def _load_bf16(raw: Tensor) -> Tensor:
    return raw.view(torch.bfloat16).to(torch.float32)


def _load_power(raw: Tensor) -> Tensor:
    power = raw.to(torch.int32)
    return torch.where(power == 255, math.nan, (power << 23).view(torch.float32))


def _load_e4m3(raw: Tensor) -> Tensor:
    number = ((raw.to(torch.int32) << 20).view(torch.float32)) * 2.0**120
    return torch.where(raw == 0x7F, math.nan, number)


Numbers = Callable[[Tensor], Tensor]
UP: dict[str, Numbers] = {"fp32": _same, "bf16": _up_to_bf16, "pow2": _up_to_power}
NEAREST: dict[str, Numbers] = {
    **{"fp32": _same, "bf16": _nearest_bf16, "pow2": _nearest_power},
    "e4m3": _nearest_e4m3,
}
STORE: dict[str, Numbers] = {
    **{"fp32": _same, "bf16": _store_bf16, "pow2": _store_power},
    "e4m3": _store_e4m3,
}
LOAD: dict[str, Numbers] = {
    **{"fp32": _load_fp32, "bf16": _load_bf16, "pow2": _load_power},
    "e4m3": _load_e4m3,
}
