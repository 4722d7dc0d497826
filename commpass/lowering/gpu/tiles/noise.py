"""Noise of stochastic rounding on tiles, equal to that of ``codecs.block.noise``."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.numbers import nearest_bf16_bits

GOLDEN = 0x9E3779B1 - (1 << 32)
PLACES = 0x2C1B3C6D
INSIDES = 0x85EBCA6B - (1 << 32)
FIRST = 0x7FEB352D
SECOND = 0x846CA68B - (1 << 32)


@tile
def shifted(number, BY: tl.constexpr):
    """``n ^ (n >> by)`` with zeros shifted in."""
    return number ^ ((number >> BY) & ((1 << (32 - BY)) - 1))


@tile
def mixed(number):
    number = shifted(number, 16) * FIRST
    number = shifted(number, 15) * SECOND
    return shifted(number, 16)


@tile
def _added(a, b):
    return a + b


@tile
def uniform(x, block, inside, key):
    """Numbers in [0, 1) for a tile ``[blocks, parts, part]``; ``block`` are the
    numbers of its blocks among those of all rows, ``[blocks, 1, 1]``."""
    terms = nearest_bf16_bits(x) + (inside + 1) * GOLDEN
    terms = terms * (2 * terms + 1)
    # Sums of whole numbers that wrap around, in any order.
    digest = tl.reduce(tl.reduce(terms, 2, _added, keep_dims=True), 1, _added, keep_dims=True)
    number = mixed(digest + block * PLACES + key + inside * INSIDES)
    return ((number >> 8) & 0xFFFFFF).to(tl.float32) * (2.0**-24)
