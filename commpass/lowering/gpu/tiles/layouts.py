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
def split_pairs(values):
    """Consecutive values ``[blocks, 1, size]`` to ``[blocks, 2, size / 2]``: the even places of a
    block, then its odd ones. Memory is accessed in whole words before it."""
    SIZE: tl.constexpr = values.shape[2]
    return tl.permute(tl.reshape(values, (values.shape[0], SIZE // 2, 2)), (0, 2, 1))


@tile
def join_pairs(x):
    """The inverse of ``split_pairs``."""
    SIZE: tl.constexpr = x.shape[1] * x.shape[2]
    return tl.reshape(tl.permute(x, (0, 2, 1)), (x.shape[0], 1, SIZE))


@tile
def lanes(block, inside, SIZE: tl.constexpr, LANES: tl.constexpr):
    """The same place of SIZE registers of LANES values."""
    return ((block // LANES) * SIZE + inside) * LANES + block % LANES


@tile
def rectangles(
    block, inside, numel, HEIGHT: tl.constexpr, ACROSS: tl.constexpr, WIDTH: tl.constexpr
):
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
