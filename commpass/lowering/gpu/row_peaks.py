"""The peaks of rows, before a kernel that scales each row by its own."""

from __future__ import annotations

import torch
from torch import Tensor

from commpass.lowering.gpu.call import call_of, launch
from commpass.lowering.gpu.tiles import row_peaks as kernels

TILE, WARPS = 8192, 4
"""Values and warps of a program: 8 loads of 16 bytes per thread, and an atomic maximum for 16 KiB
of 16-bit values."""


def row_peaks(rows: Tensor) -> Tensor:
    """Return ``max|x|`` of the finite values of each row ``[rows, n]``, float32 ``[rows]``."""
    count, numel = rows.shape
    peaks = torch.zeros(count, dtype=torch.int32, device=rows.device)
    tiles = (numel + TILE - 1) // TILE
    known: dict[str, Tensor | int] = {
        "source": rows,
        "peaks": peaks,
        "pitch": rows.stride(0),
        "numel": numel,
        "tiles": tiles,
        "TILE": TILE,
    }
    launch(call_of(kernels.row_peaks, known, count * tiles, WARPS))
    return peaks.view(torch.float32)
