"""Tile functions of pointwise operations on the result of a matmul."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile


@tile
def relu(x):
    """The larger of x and 0; NaN stays NaN."""
    return tl.where(x < 0, 0.0, x)


@tile
def quotient(x, y):
    """x / y, rounded to the nearest. One of them may be a row, y a number."""
    return tl.div_rn(x, y + tl.zeros(x.shape, tl.float32))


@tile
def tanh_of(x):
    """The hyperbolic tangent: by exponentials, and near 0, where their difference has few bits, by
    its series (the next term is below 2^-27 of it)."""
    size = tl.abs(x)
    less = tl.exp(size * -2.0)
    far = (1.0 - less) / (1.0 + less)
    square = x * x
    series = ((square * (62.0 / 2835.0) - 17.0 / 315.0) * square + 2.0 / 15.0) * square - 1.0 / 3.0
    near = x + x * square * series
    return tl.where(size < 0.25, near, tl.where(x < 0, far * -1.0, far))
