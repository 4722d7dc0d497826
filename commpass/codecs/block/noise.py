"""Rounding modes, and the noise of stochastic rounding from a counter-based generator.

The noise is the same each time it is computed, and differs between ranks, hops and steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from commpass.codecs.dispatch import by_type

MASK = 2**32 - 1


@dataclass(frozen=True)
class Nearest:
    """Round to the nearest level: the error is at most half a gap."""

    halves: ClassVar[int] = 1


@dataclass(frozen=True)
class Stochastic:
    """Round up with the probability of the remainder: the error is at most a whole gap and zero on
    average."""

    seed: int
    halves: ClassVar[int] = 2


Rounding = Nearest | Stochastic


@by_type
def noise_of(rounding: Rounding, blocks: Tensor, salt: tuple[int, ...]) -> Tensor | None:
    """Return numbers in [0, 1) in the shape ``[rows, blocks, block]`` and dtype of ``blocks``; None
    for rounding to nearest."""
    raise NotImplementedError(rounding)


@noise_of.register
def _no_noise(rounding: Nearest, blocks: Tensor, salt: tuple[int, ...]) -> None:
    return None


@noise_of.register
def _noise(rounding: Stochastic, blocks: Tensor, salt: tuple[int, ...]) -> Tensor:
    return uniform(blocks, key_of(rounding.seed, salt))


def key_of(seed: int, salt: tuple[int, ...]) -> int:
    """Return a 32-bit key from the seed and the salt: the rank, the hop of the algorithm, the piece
    sent.

    Ranks whose errors are summed must use different noise: the sum of n equal errors is n times one
    of them, the sum of n independent errors sqrt(n) times.
    """
    key = 0
    for number in (seed, seed >> 32, *salt):
        key = _mix((key + number * 0x9E3779B1 + 1) & MASK)
    return key


def uniform(blocks: Tensor, key: int) -> Tensor:
    """Return numbers in [0, 1) in the shape ``[rows, blocks, block]`` and dtype of ``blocks``: a
    hash of the key, the position, and the values of the block.

    Hashing the values makes the noise differ between steps without a step counter: one changed
    value changes the noise of its block. Equal values get equal noise, so a recomputation in
    backward gives the same bits (law 4). The values are hashed as bfloat16, because a compiler may
    pass a 16-bit tensor before it was rounded, or differ in the last bit between forward and
    recomputation.
    """
    rows, count, size = blocks.shape
    inside = torch.arange(size, device=blocks.device, dtype=torch.int32)
    # t (2 t + 1) is a bijection modulo 2^32 (as in RC6) and nonlinear: two changes do not cancel.
    terms = _bfloat16_bits(blocks) + (inside + 1) * _signed(0x9E3779B1)
    digest = (terms * (2 * terms + 1)).sum(dim=-1, keepdim=True, dtype=torch.int32)
    place = torch.arange(rows * count, device=blocks.device, dtype=torch.int32)
    start = digest + place.reshape(rows, count, 1) * 0x2C1B3C6D + _signed(key)
    number = _mix(start + inside * _signed(0x85EBCA6B))
    return ((number >> 8) & 0xFFFFFF).to(blocks.dtype) * 2.0**-24


def _bfloat16_bits(values: Tensor) -> Tensor:
    """Return the bits of the nearest bfloat16, ties to even, as a signed integer. Integer
    arithmetic only, because kernels differ in how they cast a NaN."""
    bits = values.to(torch.float32).view(torch.int32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _mix(number: Any) -> Any:
    """Two 32-bit rounds of multiply and shift ("lowbias32"), on int32 or on a Python integer from 0
    to 2^32 - 1."""
    number = _product(_xor_shifted(number, 16), 0x7FEB352D)
    number = _product(_xor_shifted(number, 15), 0x846CA68B)
    return _xor_shifted(number, 16)


def _product(number: Any, by: int) -> Any:
    return number * _signed(by) if isinstance(number, Tensor) else number * by & MASK


def _xor_shifted(number: Any, by: int) -> Any:
    """Return ``n ^ (n >> by)`` with a logical shift."""
    return number ^ ((number >> by) & (2 ** (32 - by) - 1))


def _signed(number: int) -> int:
    """Return the low 32 bits as a signed integer."""
    return (number + 2**31) % 2**32 - 2**31
