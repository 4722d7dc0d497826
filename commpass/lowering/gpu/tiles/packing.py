"""Pack codes of 1 to 8 bits into bytes, as ``codecs.block.packing`` does."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile


@tile
def packed(codes, LOW: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Bits LOW to LOW + WIDTH of codes ``[blocks, parts, part]`` of BITS bits, WIDTH a power of
    two: bytes ``[blocks, 1, bytes]``. Part i of a byte comes from part i of the block. Codes may be
    ``grouped``."""
    PARTS: tl.constexpr = 8 // WIDTH
    part = codes
    if LOW > 0:
        part = part >> LOW
    if LOW + WIDTH < BITS:
        part = part & ((1 << WIDTH) - 1)
    if len(codes.shape) == 4:
        result = packed_in_threads(part, PARTS, WIDTH)
    else:
        if codes.shape[1] != PARTS:
            part = tl.reshape(part, (codes.shape[0], PARTS, codes.numel // codes.shape[0] // PARTS))
        if PARTS > 1:
            shifts = tl.arange(0, PARTS)[None, :, None] * WIDTH
            part = tl.sum(part << shifts, axis=1, keep_dims=True)
        result = part.to(tl.uint8)
    return result


@tile
def packed_in_threads(codes, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """``packed``, of codes that are ``grouped``: only bytes change threads."""
    GROUPS: tl.constexpr = codes.shape[0]
    GROUP: tl.constexpr = codes.shape[2]
    PART: tl.constexpr = codes.shape[3]
    part = codes
    if PARTS > 1:
        several = tl.reshape(codes, (GROUPS, PARTS, codes.shape[1] // PARTS, GROUP, PART))
        shifts = tl.arange(0, PARTS)[None, :, None, None, None] * WIDTH
        part = tl.sum(several << shifts, axis=1)
    bytes = tl.permute(part.to(tl.uint8), (0, 2, 1, 3))
    return tl.reshape(bytes, (GROUPS * GROUP, 1, part.shape[1] * PART))


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
