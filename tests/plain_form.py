"""The codecs' plain form with the kernels' order of additions, and values to compare it on.

A kernel rotates by a butterfly. The plain form uses small matmuls, which add in another order. In
``plainly()`` the plain form uses a butterfly, written here.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import torch

from commpass.codecs.block import transforms

BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def butterfly(blocks: torch.Tensor, by: transforms.Hadamard, back: bool) -> torch.Tensor:
    """Return ``H x`` by sums and differences of values at distance 1, 2, 4 ...

    The signs of the rotation's two factors are applied before it, or after it on the way back.
    """
    width, shape = by.width, blocks.shape
    x = blocks.unflatten(-1, (-1, width))
    place = torch.arange(width)
    low = (width.bit_length() - 1) - width.bit_length() // 2
    bits = [(place >> bit) & 1 for bit in range(width.bit_length() - 1)]
    parity = torch.zeros(width, dtype=torch.int64)
    for part in (bits[:low], bits[low:]):
        for even, odd in zip(part[::2], part[1::2], strict=False):
            parity ^= even & odd
    signs = (1 - 2 * parity).to(x.dtype) if by.signed else torch.ones(width, dtype=x.dtype)
    x = x if back else x * (1 / width) * signs
    step = 1
    while step < width:
        a, b = x.unflatten(-1, (width // (2 * step), 2, step)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        step *= 2
    return (x * signs if back else x).reshape(shape)


class plainly(ExitStack):
    """Make rotations butterflies in this context."""

    def __enter__(self) -> ExitStack:
        there, back = (
            (lambda x, by: butterfly(x, by, False)),
            (lambda x, by: butterfly(x, by, True)),
        )
        self.enter_context(patch.object(transforms, "_rotate", there))
        self.enter_context(patch.object(transforms, "_rotate_back", back))
        return super().__enter__()


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.itemsize])


def same(found: torch.Tensor, want: torch.Tensor) -> None:
    """Check for equal bits, where any NaN equals any other."""
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    if found.is_floating_point():
        assert torch.equal(found.isnan(), want.isnan())
        found, want = (
            found.nan_to_num(nan=0.0, posinf=torch.inf),
            want.nan_to_num(nan=0.0, posinf=torch.inf),
        )
    assert torch.equal(bits_of(found), bits_of(want))


def sample(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return three rows of values of all sizes: a block of zeros, outliers, subnormals, minus
    zero."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(3, numel, generator=random) * torch.randn(3, numel, generator=random).exp()
    x[0, ::37] *= 40
    x[1, : numel // 3] = 0
    x[1, -1] = -0.0
    x[2, numel // 2 :] *= 1e-30 if dtype != torch.float16 else 1e-6
    return x.to(dtype)
