"""Tile functions of norms."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.numbers import TINY


@tile
def root_inverse(x):
    """``1 / sqrt(x)``. NVIDIA's instruction takes numbers below the normal ones for zeros, so those
    are multiplied by a power of four first."""
    small = x < TINY
    root = tl.rsqrt(tl.where(small, x * 2.0**48, x))
    return tl.where(small, root * 2.0**24, root)
