"""Layouts on tiles: the positions of a block's values in a row. See ``codecs.block.layouts``."""

from __future__ import annotations

import triton.language as tl

from commpass.codecs.rows import ALIGNMENT
from commpass.lowering.gpu.source import tile


@tile
def flat(block, inside, SIZE: tl.constexpr):
    """Consecutive values."""
    return block * SIZE + inside


@tile
def pairs(block, SIZE: tl.constexpr):
    """Consecutive values: the even places of a block in the first of two parts, the odd ones in the
    second. In ranges, so that Triton sees that places follow one another."""
    even = tl.arange(0, SIZE // 2)[None, None, :] * 2
    return block * SIZE + even + tl.arange(0, 2)[None, :, None]


@tile
def lanes(block, inside, SIZE: tl.constexpr, LANES: tl.constexpr):
    """The same place of SIZE registers of LANES values."""
    return ((block // LANES) * SIZE + inside) * LANES + block % LANES


@tile
def tiles(block, inside, numel, HEIGHT: tl.constexpr, ACROSS: tl.constexpr, WIDTH: tl.constexpr):
    """Rectangles of a matrix with WIDTH columns; what lies beside it is given as ``numel``."""
    ALONG: tl.constexpr = (WIDTH + ACROSS - 1) // ACROSS
    line = (block // ALONG) * HEIGHT + inside // ACROSS
    column = (block % ALONG) * ACROSS + inside % ACROSS
    place = line * WIDTH + column
    if WIDTH % ACROSS != 0:  # a choice for each value hides that places follow one another
        place = tl.where(column < WIDTH, place, numel)
    return place


@tile
def filled(region, length):
    """Zeros behind a region of a wire, up to the next multiple of ALIGNMENT bytes."""
    place = length + tl.arange(0, ALIGNMENT)
    end = (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    tl.store(region + place, tl.zeros((ALIGNMENT,), tl.uint8), mask=place < end)
