"""The peaks of rows, from which two-level scales are computed."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.numbers import INFINITY_BITS, size_bits, to_float32


@tile
def row_peaks(source, peaks, pitch, numel, tiles, TILE: tl.constexpr):
    """The largest size of the finite values of each row, as bits: of sizes, the larger has the
    larger bits. ``peaks`` are zeros before."""
    row = tl.program_id(0) // tiles
    place = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    source += tl.cast(row, tl.int64) * pitch
    bits = size_bits(to_float32(tl.load(source + place, mask=place < numel, other=0.0), False))
    most = tl.max(tl.where(bits < INFINITY_BITS, bits, 0), 0)
    tl.atomic_max(peaks + row, most, sem="relaxed")
