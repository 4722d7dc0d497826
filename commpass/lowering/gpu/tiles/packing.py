"""Pack codes of 1 to 8 bits into bytes, as ``codecs.block.packing`` does."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile


@tile
def packed(codes, LOW: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Bits LOW to LOW + WIDTH of codes ``[blocks, parts, part]`` of BITS bits, WIDTH a power of
    two: bytes ``[blocks, 1, bytes]`` as int32. Part i of a byte comes from part i of the block."""
    PARTS: tl.constexpr = 8 // WIDTH
    part = codes
    if codes.shape[1] != PARTS:
        part = tl.reshape(part, (codes.shape[0], PARTS, codes.numel // codes.shape[0] // PARTS))
    if LOW > 0:
        part = part >> LOW
    if LOW + WIDTH < BITS:
        part = part & ((1 << WIDTH) - 1)
    if PARTS == 1:
        result = part
    else:
        shifts = tl.arange(0, PARTS)[None, :, None] * WIDTH
        result = tl.sum(part << shifts, axis=1, keep_dims=True)
    return result


@tile
def unpacked(raw, WIDTH: tl.constexpr, OF: tl.constexpr):
    """The inverse: bytes ``[blocks, 1, bytes]`` as int32 to ``[blocks, OF, part]``."""
    PARTS: tl.constexpr = 8 // WIDTH
    result = raw
    if PARTS > 1:
        shifts = tl.arange(0, PARTS)[None, :, None] * WIDTH
        result = (raw >> shifts) & ((1 << WIDTH) - 1)
    if PARTS != OF:
        result = tl.reshape(result, (raw.shape[0], OF, raw.shape[2] * PARTS // OF))
    return result
