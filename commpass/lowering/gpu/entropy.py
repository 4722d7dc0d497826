"""Kernels of codec ``ecq``: their order, and the buffers between them. The tiles are in
``tiles/entropy.py``.

Encode and decode are two kernels each: one for the blocks, and one for the chunks. All sizes follow
from shapes; nothing is read on the host.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from commpass.codecs.entropy import coder
from commpass.codecs.entropy.coder import BLOCK, Form
from commpass.codecs.entropy.operators import BLOCKS, chunks
from commpass.codecs.entropy.tables import TOTAL_BITS, roots, tables
from commpass.lowering.gpu.call import Arguments, call_of, launch
from commpass.lowering.gpu.tiles.entropy import (
    CLASSES,
    entropy_code,
    entropy_numbers,
    entropy_rotate,
    entropy_rotate_back,
)
from commpass.utils.ambient import making_lasting_tensors

MOST = 1 << 30
"""Rows of this many values or more are not supported: places in a row are counted in 32 bits."""
TILE = 4
"""Blocks that a program rotates."""
WARPS = 4
"""Of a program that rotates. A chunk takes one warp, of which 16 lanes have states."""


def unsupported_reason(numel: int) -> str:
    """Return why there are no kernels for a row, or "" if there are."""
    return "" if numel < MOST else f"a row of {numel} values has more than {MOST - 1}"


def encode_rows(rows: Tensor, form: Form, rotated: bool) -> tuple[Tensor, Tensor]:
    """Encode rows ``[n, numel]`` of float32, bfloat16 or float16 as ``codecs.entropy.operators``
    does: the code, uint8 ``[n, blocks * form.nbytes]``, and the scales, uint8 ``[n, chunks]``."""
    rows = rows.contiguous()
    (count, numel), device = rows.shape, rows.device
    blocks = BLOCKS.blocks(numel)
    all_blocks, chunks_of_row = count * blocks, chunks(blocks)
    code = torch.empty((count, blocks * form.nbytes), dtype=torch.uint8, device=device)
    side = torch.empty((count, chunks_of_row), dtype=torch.uint8, device=device)
    pitch = min(blocks, coder.CHUNK // BLOCK) * form.nbytes // 2
    known: Arguments = {
        "source": rows,
        "values": torch.empty(all_blocks * BLOCK, dtype=torch.float32, device=device),
        "peaks": torch.empty(all_blocks, dtype=torch.int32, device=device),
        "largest": torch.empty(all_blocks, dtype=torch.float64, device=device),
        "stream": torch.empty(count * chunks_of_row * pitch, dtype=torch.int16, device=device),
        "side": side,
        "pitch": pitch,
        **_known(code, form, rotated, numel, blocks, all_blocks, chunks_of_row),
    }
    launch(call_of(entropy_rotate, known, -(-all_blocks // TILE), WARPS))
    launch(call_of(entropy_code, known, count * chunks_of_row, 1))
    return code, side


def decode_rows(
    code: Tensor, side: Tensor, form: Form, rotated: bool, limit: float, numel: int
) -> Tensor:
    """The inverse of ``encode_rows``: float32 ``[n, numel]``, clamped to ``limit``."""
    code, side = code.contiguous(), side.contiguous()
    if code.storage_offset() % 2:
        code = code.clone()
    count, blocks, device = code.shape[0], BLOCKS.blocks(numel), code.device
    all_blocks, chunks_of_row = count * blocks, chunks(blocks)
    out = torch.empty((count, numel), dtype=torch.float32, device=device)
    known: Arguments = {
        "values": torch.empty(all_blocks * BLOCK, dtype=torch.float32, device=device),
        "side": side,
        "out": out,
        **_known(code, form, rotated, numel, blocks, all_blocks, chunks_of_row),
    }
    launch(call_of(entropy_numbers, known, count * chunks_of_row, 1))
    limited = {**known, "LIMIT_OF": limit}
    launch(call_of(entropy_rotate_back, limited, -(-all_blocks // TILE), WARPS))
    return out


def _known(
    code: Tensor,
    form: Form,
    rotated: bool,
    numel: int,
    blocks: int,
    all_blocks: int,
    chunks_of_row: int,
) -> Arguments:
    device = code.device
    return {
        "code": code,
        "halves": code.view(torch.int16),
        **_tables(device),
        **{"numel": numel, "blocks": blocks, "blocks_of_row": blocks},
        **{"all_blocks": all_blocks, "chunks": chunks_of_row},
        **{"NBYTES": form.nbytes, "EVEN": form.even, "ROTATED": rotated, "BLOCKS": TILE},
    }


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> Arguments:
    """Return the tables of all ratios on a device."""
    with making_lasting_tensors():
        return _new_tables(device)


def _new_tables(device: torch.device) -> Arguments:
    every = tables()
    frequency = torch.tensor([each.frequencies for each in every])
    before = frequency.cumsum(1) - frequency
    of_class = torch.arange(CLASSES).expand_as(frequency).flatten()
    counts = frequency.flatten()
    inside = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    slots = of_class << 2 * TOTAL_BITS | counts - 1 << TOTAL_BITS
    made = {
        "classes": before << 16 | frequency,
        "slots": slots.repeat_interleave(counts) | inside,
        "costs": torch.tensor([each.cost for each in every]),
    }
    numbers = {name: each.flatten().to(device, torch.int32) for name, each in made.items()}
    levels = torch.tensor([each.level for each in every], dtype=torch.float32, device=device)
    powers = torch.tensor(roots(), dtype=torch.float32, device=device)
    return {**numbers, "levels": levels, "roots": powers}
