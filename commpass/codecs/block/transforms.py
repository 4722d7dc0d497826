"""Transforms: invertible maps of a block that make its values easier to quantize.

A transform is plain data; the functions ``forward`` and ``inverse`` dispatch on its type. Both work
on blocks ``[..., block]`` in the accumulation dtype. They trace under fake tensors: they use plain
aten operations only, hold no tensor constants, and never read values from Python. ``side`` is the
number of extra bytes per block that the inverse needs. ``sums`` is the number of values that the
inverse adds up for one value. ``name`` is the name of its domain in plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from commpass.codecs.dispatch import by_type


@dataclass(frozen=True)
class NoTransform:
    """The identity."""

    name: ClassVar[str] = ""
    side: ClassVar[int] = 0
    sums: ClassVar[int] = 1


@dataclass(frozen=True)
class Hadamard:
    """Walsh-Hadamard rotation of each ``width`` values (TACO, section 3), which spreads an outlier
    over its whole block.

    With ``signed``, values are first multiplied by fixed signs: a bent function of the position,
    whose own spectrum is flat. A constant, or any other row of the Hadamard matrix, is then spread
    as well, which the plain rotation would gather in one value. With ``pivot``, an element more
    than twice as large as all others is first swapped to position 0. Its column is all ones, so an
    asymmetric grid covers the element by its offset (TahQuant).
    """

    width: int
    signed: bool = False
    pivot: bool = False

    name: ClassVar[str] = "hadamard"

    @property
    def side(self) -> int:
        return int(self.pivot)

    @property
    def sums(self) -> int:
        return self.width


Transform = NoTransform | Hadamard


@by_type
def forward(transform: Transform, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Transform blocks ``[..., block]`` without increasing their largest magnitude.

    Return the values, and ``side`` uint8 bytes for each block, ``[..., side]``; None if there are
    none.
    """
    raise NotImplementedError(transform)


@by_type
def inverse(transform: Transform, values: Tensor, side: Tensor | None) -> Tensor:
    """Invert ``forward``: from values divided by ``sums``, return the blocks divided by ``sums``,
    so that no intermediate sum overflows unless the block does."""
    raise NotImplementedError(transform)


@forward.register
def _identity(transform: NoTransform, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return blocks, None


@inverse.register
def _identity_inverse(transform: NoTransform, values: Tensor, side: Tensor | None) -> Tensor:
    return values


@forward.register
def _rotated(transform: Hadamard, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    if not transform.pivot:
        return _rotate(blocks, transform), None
    place = _pivot(blocks)
    return _rotate(_swap(blocks, place), transform), place.to(torch.uint8)


@inverse.register
def _rotated_back(transform: Hadamard, values: Tensor, side: Tensor | None) -> Tensor:
    blocks = _rotate_back(values, transform)
    return blocks if side is None else _swap(blocks, side.to(torch.int64))


def _bits(number: Tensor, width: int) -> list[Tensor]:
    return [(number >> bit) & 1 for bit in range(width.bit_length() - 1)]


def _sylvester(width: int, like: Tensor, signed: bool) -> Tensor:
    """Return the unnormalized ``H[i, j] = (-1)^popcount(i & j)``; if ``signed``, column j is
    multiplied by the sign of position j."""
    index = torch.arange(width, device=like.device)
    both = index[:, None] & index[None, :]
    parity = torch.zeros_like(both)
    for bit in _bits(both, width):
        parity = parity ^ bit
    if signed:
        places = _bits(index, width)
        for even, odd in zip(places[::2], places[1::2], strict=False):
            parity = parity ^ (even & odd)
    return (1 - 2 * parity).to(like.dtype)


def _factors(width: int) -> tuple[int, int]:
    """Two powers of two with this product, as equal as possible; the first is the larger one."""
    right = 1 << low_bits(width)
    return width // right, right


def low_bits(width: int) -> int:
    """Return how many low bits of a position in a rotation belong to its second factor.

    With signs, these bits and the others each have a bent function of their own.
    """
    return (width.bit_length() - 1) // 2


def _rotate(blocks: Tensor, by: Hadamard) -> Tensor:
    """Return ``H @ block / width`` as two small matmuls: ``H(ab) = H(a) (x) H(b)``.

    Scaled by 1/width and not 1/sqrt(width): then |H x| <= max|x|, and a block of the largest finite
    numbers cannot overflow. H H' = width * I makes the transpose its inverse.
    """
    rows, columns = _matrices(by, blocks)
    return _apply(blocks, rows / rows.shape[0], (columns / columns.shape[0]).t())


def _rotate_back(blocks: Tensor, by: Hadamard) -> Tensor:
    rows, columns = _matrices(by, blocks)
    return _apply(blocks, rows.t(), columns)


def _matrices(by: Hadamard, like: Tensor) -> tuple[Tensor, Tensor]:
    """The two matrices whose Kronecker product is the rotation; the same one if it is square."""
    left, right = _factors(by.width)
    rows = _sylvester(left, like, by.signed)
    return rows, rows if left == right else _sylvester(right, like, by.signed)


def _apply(blocks: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    left, right = rows.shape[0], columns.shape[0]
    parts = blocks.shape[-1] // (left * right)
    sides = (left, right) if parts == 1 else (parts, left, right)
    return (rows @ (blocks.unflatten(-1, sides) @ columns)).flatten(-len(sides))


def _pivot(blocks: Tensor) -> Tensor:
    """Return the position of an element more than twice as large as all others of its block, else
    0; ``[..., 1]``."""
    size = blocks.abs()
    place = size.argmax(dim=-1, keepdim=True)
    first = size.amax(dim=-1, keepdim=True)
    second = torch.where(_places(blocks) == place, 0.0, size).amax(dim=-1, keepdim=True)
    return torch.where(first > 2 * second, place, 0)


def _swap(blocks: Tensor, place: Tensor) -> Tensor:
    """Swap element 0 and the element at ``place`` of each block; self-inverse."""
    here = _places(blocks)
    chosen = torch.where(here == place, blocks, 0.0).sum(dim=-1, keepdim=True)
    return torch.where(here == 0, chosen, torch.where(here == place, blocks[..., :1], blocks))


def _places(blocks: Tensor) -> Tensor:
    return torch.arange(blocks.shape[-1], device=blocks.device)
