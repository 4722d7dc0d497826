"""Noise for stochastic rounding, from a counter: the same on every rank and each time it is computed."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(blocks: Tensor, scale: Tensor, seed: int) -> Tensor:
    """Numbers in [0, 1) for blocks ``[rows, blocks, block]``: a hash of the seed, the place and the bits of the block's scale.

    The scale makes the noise of one step differ from that of the next, though nobody counts the steps; the same values get
    the same noise, so a recomputation in backward gives the same bits (law 4). The hash is two rounds of multiply and
    shift of 32 bits ("lowbias32").
    """
    shape = blocks.shape
    places = torch.arange(shape[0] * shape[1] * shape[2], device=blocks.device, dtype=torch.int32).reshape(shape)
    mixed = places * 0x2C1B3C6D + scale.to(torch.float32).view(torch.int32) * 0x297A2D39 + _signed(seed * 0x9E3779B1)
    mixed = _shifted(mixed, 16) * 0x7FEB352D
    mixed = _shifted(mixed, 15) * _signed(0x846CA68B)
    mixed = _shifted(mixed, 16)
    return ((mixed >> 8) & 0xFFFFFF).to(blocks.dtype) * 2.0**-24


def _shifted(number: Tensor, by: int) -> Tensor:
    """``n ^ (n >> by)`` with zeros shifted in."""
    return number ^ ((number >> by) & (2 ** (32 - by) - 1))


def _signed(number: int) -> int:
    """The low 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
