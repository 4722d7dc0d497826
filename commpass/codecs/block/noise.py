"""Rounding, and the noise of stochastic rounding, from a counter: the same each time it is
computed, and another for each rank, hop and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from commpass.codecs.dispatch import by_type

MASK = 2**32 - 1


@dataclass(frozen=True)
class Nearest:
    """To the nearest level: off by half a gap at most."""

    halves: ClassVar[int] = 1


@dataclass(frozen=True)
class Stochastic:
    """Up with the probability of the remainder: off by a whole gap at most, and right on
    average."""

    seed: int
    halves: ClassVar[int] = 2


Rounding = Nearest | Stochastic


@by_type
def noise_of(rounding: Rounding, blocks: Tensor, salt: tuple[int, ...]) -> Tensor | None:
    """Numbers in [0, 1) of the shape of blocks ``[rows, blocks, block]`` and their dtype; None for
    the nearest."""
    raise NotImplementedError(rounding)


@noise_of.register
def _no_noise(rounding: Nearest, blocks: Tensor, salt: tuple[int, ...]) -> None:
    return None


@noise_of.register
def _noise(rounding: Stochastic, blocks: Tensor, salt: tuple[int, ...]) -> Tensor:
    return uniform(blocks, key_of(rounding.seed, salt))


def key_of(seed: int, salt: tuple[int, ...]) -> int:
    """32 bits for a seed and who draws: the rank, the hop of the algorithm, the piece sent.

    Ranks whose errors are summed must not draw the same: the sum of n equal errors is n times one
    of them, that of n independent ones sqrt(n) times.
    """
    key = 0
    for number in (seed, seed >> 32, *salt):
        key = _mixed((key + number * 0x9E3779B1 + 1) & MASK)
    return key


def uniform(blocks: Tensor, key: int) -> Tensor:
    """Numbers in [0, 1) for blocks ``[rows, blocks, block]``, of their shape and dtype: a hash of
    the key, the place, and the values of the block.

    The values make the noise of one step differ from that of the next, though nobody counts the
    steps: it is another as soon as one value of the block is. The same values get the same noise,
    so a recomputation in backward gives the same bits (law 4). They are read as bfloat16: a
    compiler may hand over what a 16-bit tensor was before it was rounded, or differ in the last
    bit between forward and recomputation.
    """
    rows, count, size = blocks.shape
    inside = torch.arange(size, device=blocks.device, dtype=torch.int32)
    # t (2 t + 1) is one to one modulo 2^32 (as in RC6), and not linear: two changes do not cancel.
    terms = _bfloat16_bits(blocks) + (inside + 1) * _signed(0x9E3779B1)
    digest = (terms * (2 * terms + 1)).sum(dim=-1, keepdim=True, dtype=torch.int32)
    place = torch.arange(rows * count, device=blocks.device, dtype=torch.int32)
    start = digest + place.reshape(rows, count, 1) * 0x2C1B3C6D + _signed(key)
    number = _mixed(start + inside * _signed(0x85EBCA6B))
    return ((number >> 8) & 0xFFFFFF).to(blocks.dtype) * 2.0**-24


def _bfloat16_bits(values: Tensor) -> Tensor:
    """The bits of the nearest bfloat16, ties to even, as a signed number. By whole numbers alone:
    what a cast makes of a NaN differs between kernels."""
    bits = values.to(torch.float32).view(torch.int32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _mixed(number: Any) -> Any:
    """Two rounds of multiply and shift of 32 bits ("lowbias32"): of int32, or of a plain number
    from 0 to 2^32 - 1."""
    number = _product(_shifted(number, 16), 0x7FEB352D)
    number = _product(_shifted(number, 15), 0x846CA68B)
    return _shifted(number, 16)


def _product(number: Any, by: int) -> Any:
    return number * _signed(by) if isinstance(number, Tensor) else number * by & MASK


def _shifted(number: Any, by: int) -> Any:
    """``n ^ (n >> by)`` with zeros shifted in."""
    return number ^ ((number >> by) & (2 ** (32 - by) - 1))


def _signed(number: int) -> int:
    """The low 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
