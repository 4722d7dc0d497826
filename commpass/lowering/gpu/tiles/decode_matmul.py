"""Tile functions of a matmul that decodes its left operand."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.numbers import through_bf16


@tile
def codes_of(raw, PART: tl.constexpr, WIDTH: tl.constexpr):
    """The codes of WIDTH bits in part PART of each byte, as int32."""
    codes = raw.to(tl.int32)
    if WIDTH < 8:
        codes = (codes >> (PART * WIDTH)) & ((1 << WIDTH) - 1)
    return codes


@tile
def left_bf16(x, CASTS: tl.constexpr):
    """Float32 values as an operand in bfloat16. Without ``CASTS``, they are rounded and stay
    float32, since Triton's interpreter has no products of bfloat16."""
    return x.to(tl.bfloat16) if CASTS else through_bf16(x, CASTS, False)


@tile
def left_fp16(x, CASTS: tl.constexpr):
    return x.to(tl.float16)
