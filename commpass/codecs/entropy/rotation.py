"""The rotation of codec ``ecq`` as tensor operations, with the sums of the C++ in the same order.

The matmuls of ``transforms`` may add in another order on each processor. A rank that decodes
without C++ would then not have the bits of the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commpass.codecs.entropy.coder import BLOCK

SIDE = 16
"""A block is a square of values."""


def forward(blocks: Tensor) -> Tensor:
    """Return ``H @ (signs * block) / BLOCK`` for blocks ``[..., BLOCK]``, as the transform
    ``Hadamard(BLOCK, signed=True)``."""
    return _hadamard(blocks * _sign_row(blocks), 1 / SIDE)


def inverse(values: Tensor) -> Tensor:
    """Return the blocks divided by ``BLOCK``, from values divided by it."""
    return _hadamard(values, 1.0) * _sign_row(values)


def _hadamard(blocks: Tensor, by: float) -> Tensor:
    """Return ``H @ block`` over both dimensions of the square in turn, each with a factor."""
    square = blocks.unflatten(-1, (SIDE, SIDE))
    for _ in range(2):
        square = _butterflies(square * by).transpose(-1, -2)
    return square.flatten(-2)


def _butterflies(square: Tensor) -> Tensor:
    apart = 1
    while apart < SIDE:
        first, second = square.unflatten(-2, (-1, 2, apart)).unbind(-3)
        square = torch.stack([first + second, first - second], dim=-3).flatten(-4, -2)
        apart *= 2
    return square


def _sign_row(like: Tensor) -> Tensor:
    """Return the parity of the pairs of bits of a position that are set, as 1 or -1."""
    place = torch.arange(BLOCK, device=like.device)
    pairs = place & place >> 1
    parity = (pairs ^ pairs >> 2 ^ pairs >> 4 ^ pairs >> 6) & 1
    return (1 - 2 * parity).to(like.dtype)
