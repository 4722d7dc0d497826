"""The kernels of the sparse codecs, and their arguments.

    encode      x + residual -> wire, residual         bounds (aten or kernels), select, pack
    decode      wire -> rows                           places, sum
    sum_rows    wires of all ranks -> their sum        places, sum

Everything is launched without reading numbers from the device, so a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs.cast import CastCodec
from commpass.codecs.raw import RawCodec
from commpass.codecs.rows import ceil_to
from commpass.codecs.sparse import SparseCodec
from commpass.codecs.sparse import indices as index_codes
from commpass.codecs.sparse.indices import Bitmap, Blocks16, EliasFano, IndexCode
from commpass.codecs.sparse.segments import SegmentedCodec
from commpass.codecs.sparse.select import Threshold, bounds, select
from commpass.lowering.gpu.call import Arguments, Call, call_of, launch
from commpass.lowering.gpu.sparse_measure import FORMS, WHOLE, statistics_of
from commpass.lowering.gpu.tiles import sparse as tiles
from commpass.lowering.gpu.tiles import sparse_indices, sparse_sum

CAST = {"fp16": tiles.FP16, "bf16": tiles.BF16}
MOST = 2**31 - 2**16
"""Entries of a row, bits of a code and blocks of all rows are counted in 32 bits."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that a kernel processes at once.

    ``block``: entries of a row. ``tile``: bytes or slots. ``step``: slots of a block. ``part``:
    entries that are measured, ``laps`` times by a program. ``warp``: threads of a warp, 64 on
    gfx942.
    """

    block: int = 4096
    tile: int = 1024
    step: int = 128
    warps: int = 4
    part: int = 2048
    laps: int = 8
    warp: int = 32

    @property
    def window(self) -> int:
        return self.warps * self.warp


def sizes_on(device: torch.device) -> Sizes:
    """Return the sizes for a device; a warp of AMD has 64 threads."""
    if device.type != "cuda":
        return Sizes()
    return Sizes(warp=torch.cuda.get_device_properties(device).warp_size)


@dataclass(frozen=True)
class Layout:
    """The wire layout of a codec for rows of ``entries`` values in a dtype.

    A row has ``chosen`` slots and ``pitch`` bytes. Values take ``gap`` bytes, padded to ``split``;
    indices take ``first`` (low bits or offsets) and ``second``. ``value`` is the format of values
    on the wire; ``later`` says that an inner codec encodes the uncompressed values afterwards.
    """

    entries: int
    chosen: int
    dtype: torch.dtype
    pitch: int
    gap: int
    split: int
    first: int
    second: int
    code: int
    low: int
    value: int
    later: bool

    @property
    def form(self) -> int:
        return FORMS[self.dtype]

    @property
    def value_dtype(self) -> torch.dtype:
        return torch.int32 if self.value == tiles.FP32 else torch.int16

    @property
    def bits(self) -> int:
        """The length of the bit string that is searched for ones."""
        if self.code == sparse_indices.BITMAP:
            return self.entries
        return self.chosen + (self.entries >> self.low)


def unsupported_reason(codec: SparseCodec, numel: int, dtype: torch.dtype) -> str | None:
    """Return why there are no kernels for rows, or None if there are."""
    if dtype not in FORMS:
        return f"sparse kernels take float32, bfloat16 and float16, not {dtype}"
    if isinstance(codec, SegmentedCodec):
        return "sparse kernels select from whole rows, not from segments"
    if numel == 0:
        return "sparse kernels take rows of at least one entry"
    chosen = codec.slots(numel)
    low = codec.index.low if isinstance(codec.index, EliasFano) else 16
    if max(numel + chosen, chosen * low, codec.wire_bytes(numel, dtype)) >= MOST:
        return f"sparse kernels count up to {MOST}; a row of {numel} is longer"
    return None


def layout_of(codec: SparseCodec, numel: int, dtype: torch.dtype) -> Layout:
    chosen = codec.slots(numel)
    inner = codec.inner
    value = CAST[inner.form] if isinstance(inner, CastCodec) else FORMS[dtype]
    later = not isinstance(inner, CastCodec | RawCodec)
    split = inner.wire_bytes(chosen, dtype)
    gap = split if later else chosen * (4 if value == tiles.FP32 else 2)
    code, low, first = _index(codec.index, chosen)
    second = index_codes.nbytes(codec.index, numel, chosen) - first
    pitch = codec.wire_bytes(numel, dtype)
    return Layout(numel, chosen, dtype, pitch, gap, split, first, second, code, low, value, later)


def _index(code: IndexCode, count: int) -> tuple[int, int, int]:
    match code:
        case Bitmap():
            return sparse_indices.BITMAP, 0, 0
        case Blocks16():
            return sparse_indices.BLOCKS16, 0, 2 * count
        case EliasFano(low):
            return sparse_indices.ELIAS_FANO, low, (count * low + 7) // 8


# --- encode ---------------------------------------------------------------------------------------


def encode(
    codec: SparseCodec, x: Tensor, residual: Tensor, sizes: Sizes | None = None
) -> tuple[Tensor, Tensor]:
    """Return the wire of ``x + residual``, uint8 ``[rows, wire_bytes]``, and the new residual,
    float32 ``[rows, n]``: 0 if the input or the decoded value is not finite.

    ``x`` is ``[rows, n]`` in bf16, fp16 or fp32, ``residual`` float32; both contiguous.
    """
    sizes = sizes or sizes_on(x.device)
    layout = layout_of(codec, x.shape[1], x.dtype)
    rows, blocks = x.shape[0], _blocks(layout, sizes)
    wire = x.new_empty((rows, layout.pitch), dtype=torch.uint8)
    values, remainder = values_of(layout, wire), torch.empty_like(residual)
    known = encode_arguments(layout, sizes, x, residual, remainder, values, wire)
    if isinstance(codec.selector, Threshold):
        call = select_call(layout, sizes, known, wire, *bounds_of(codec, x, residual, sizes))
        known |= call.arguments
        done = layout.code == sparse_indices.BITMAP
    else:
        indices, used, lost = selection_of(codec, x, residual)
        starts = starts_of(indices, layout, sizes)
        known |= {"indices": indices, "used": used, "lost": lost, "starts": starts}
        call = call_of(tiles.sparse_take, known, rows * blocks, sizes.warps)
        done = False
    launch(call)
    # The indices may be written already.
    begin = layout.split + (layout.first + layout.second if done else 0)
    slots = -(-layout.chosen // sizes.tile)
    known |= {"begin": begin, "end": layout.pitch, "steps": layout.chosen.bit_length()}
    known |= {"CODE": sparse_indices.NONE if done else layout.code}
    tiled = slots + -(-(layout.pitch - begin) // sizes.tile)
    launch(call_of(sparse_indices.sparse_pack, known, rows * tiled))
    if layout.later:
        inner = codec.inner.encode_rows(values.view(layout.dtype))
        wire[:, : layout.split].copy_(inner)
        decoded = codec.inner.decode_rows(inner, layout.chosen, layout.dtype).float().contiguous()
        launch(call_of(tiles.sparse_settle, known | {"decoded": decoded}, rows * slots))
    return wire, remainder


def encode_arguments(
    layout: Layout,
    sizes: Sizes,
    x: Tensor,
    residual: Tensor,
    remainder: Tensor,
    values: Tensor,
    wire: Tensor,
) -> Arguments:
    """Return the arguments that all kernels of ``encode`` share."""
    return _sizes_known(layout, sizes) | {
        "x": x.view(WHOLE[layout.dtype]),
        "residual": residual,
        "remainder": remainder,
        "values": values,
        "value_pitch": values.shape[1],
        "wire": wire,
        "ONE_ROW": x.shape[0] == 1,
    }


def select_call(
    layout: Layout, sizes: Sizes, known: Arguments, wire: Tensor, row_bounds: Tensor, lost: Tensor
) -> Call:
    """Return the call that selects within bounds; ``known`` is of ``encode_arguments``."""
    rows, blocks = wire.shape[0], _blocks(layout, sizes)
    arguments: Arguments = {
        "indices": wire.new_empty((rows, layout.chosen), dtype=torch.int32),
        "bitmap": wire.view(-1)[layout.split :],
        "used": wire.new_empty((rows,), dtype=torch.int32),
        "bounds": row_bounds,
        "lost": lost,
        "state": wire.new_zeros((1 + rows * blocks,), dtype=torch.int64),
        "bitmap_pitch": layout.pitch,
        "BITMAP": layout.code == sparse_indices.BITMAP,
    }
    return call_of(tiles.sparse_select, known | arguments, rows * blocks, sizes.warps)


def wanted_rows(x: Tensor, residual: Tensor) -> Tensor:
    """Return the values to send, in the dtype of ``x``."""
    return (x.float() + residual).to(x.dtype)


def bounds_of(
    codec: SparseCodec, x: Tensor, residual: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Return the arguments of ``sparse_select`` for each row: int32 ``[rows, 3]`` and
    ``[rows]``."""
    found = bounds(
        codec.selector, statistics_of(x, residual, sizes.part, sizes.laps), codec.density
    )
    row_bounds = torch.cat([found.low, found.high, found.room.to(torch.int32)], dim=1)
    return row_bounds, found.lost.to(torch.int32)


def selection_of(codec: SparseCodec, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of ``sparse_take``: indices, int32 ``[rows, k]``; used and lost, int32
    ``[rows]``."""
    found = select(codec.selector, wanted_rows(x, residual), codec.density)
    lost = found.lost.to(torch.int32)
    return found.indices.to(torch.int32), found.used.to(torch.int32) * (1 - lost), lost


def values_of(layout: Layout, wire: Tensor) -> Tensor:
    """Return where codes are written: into the wire, or to a buffer for an inner codec."""
    if layout.later:
        return wire.new_empty((wire.shape[0], layout.chosen), dtype=WHOLE[layout.dtype])
    return wire.view(layout.value_dtype)


def _blocks(layout: Layout, sizes: Sizes) -> int:
    return -(-layout.entries // sizes.block)


def starts_of(indices: Tensor, layout: Layout, sizes: Sizes) -> Tensor:
    """Return the first slot of each block of a row, int32 ``[rows, blocks + 1]``."""
    edges = torch.arange(_blocks(layout, sizes) + 1, device=indices.device) * sizes.block
    edges = edges.clamp(max=layout.entries).to(torch.int32).expand(indices.shape[0], -1)
    return torch.searchsorted(indices, edges.contiguous(), out_int32=True)


# --- decode ---------------------------------------------------------------------------------------


def decode(
    codec: SparseCodec, wire: Tensor, numel: int, dtype: torch.dtype, sizes: Sizes | None = None
) -> Tensor:
    """Decode uint8 ``[rows, wire_bytes(numel, dtype)]`` to float32 ``[rows, numel]``, as
    ``decode_rows``."""
    out = wire.new_empty((wire.shape[0], numel), dtype=torch.float32)
    return _decode_rows(codec, wire, numel, dtype, sizes or sizes_on(wire.device), out)


def sum_rows(
    codec: SparseCodec, wires: Tensor, numel: int, dtype: torch.dtype, sizes: Sizes | None = None
) -> Tensor:
    """Return the sum ``[numel]`` of all rows in float32, in row order, as ``sum_by_index``."""
    out = wires.new_empty((numel,), dtype=torch.float32)
    return _decode_rows(codec, wires, numel, dtype, sizes or sizes_on(wires.device), out)


def _decode_rows(
    codec: SparseCodec, wire: Tensor, numel: int, dtype: torch.dtype, sizes: Sizes, out: Tensor
) -> Tensor:
    layout = layout_of(codec, numel, dtype)
    indices = indices_of(layout, sizes, wire)
    if layout.later:
        inner = wire.narrow(1, 0, layout.split)
        values = codec.inner.decode_rows(inner, layout.chosen, dtype).float().contiguous()
        values = values.view(torch.int32)
    else:
        values = wire.view(layout.value_dtype)
    rows, blocks, together = wire.shape[0], _blocks(layout, sizes), out.dim() == 1
    known = _sizes_known(layout, sizes) | {
        "values": values,
        "value_pitch": values.shape[1],
        "indices": indices,
        "starts": starts_of(indices, layout, sizes),
        "out": out,
        "ranks": rows if together else 1,
        "SUM": together,
    }
    if layout.later:
        known |= {"FORM": tiles.FP32, "VALUE": tiles.FP32}
    programs = blocks if together else rows * blocks
    launch(call_of(sparse_sum.sparse_sum, known, programs, sizes.warps))
    return out


def indices_of(layout: Layout, sizes: Sizes, wire: Tensor) -> Tensor:
    """Return the indices of rows, int32 ``[rows, k]``, with ``n`` in unused slots."""
    rows = wire.shape[0]
    indices = wire.new_full((rows, layout.chosen), layout.entries, dtype=torch.int32)
    known = _sizes_known(layout, sizes) | {"wire": wire, "indices": indices}
    if layout.code == sparse_indices.BLOCKS16:
        known |= {"steps": (-(-layout.entries >> 16)).bit_length()}
        slots = -(-layout.chosen // sizes.tile)
        launch(call_of(sparse_indices.sparse_places16, known, rows * slots))
        return indices
    tiled = ceil_to(layout.second, sizes.tile) // sizes.tile
    ends = wire.new_empty((rows, tiled), dtype=torch.int32)
    known |= {"ends": ends, "begin": layout.split + layout.first, "tiles": tiled}
    launch(call_of(sparse_indices.sparse_count_ones, known, rows * tiled))
    known |= {"ends": ends.cumsum(1, dtype=torch.int32)}
    launch(call_of(sparse_indices.sparse_places, known, rows * tiled))
    return indices


def _sizes_known(layout: Layout, sizes: Sizes) -> Arguments:
    """Return the arguments of kernels that follow from sizes."""
    return {
        "n": layout.entries,
        "k": layout.chosen,
        "blocks": _blocks(layout, sizes),
        "pitch": layout.pitch,
        "gap": layout.gap,
        "split": layout.split,
        "first": layout.first,
        "second": layout.second,
        "length": layout.bits,
        "FORM": layout.form,
        "VALUE": layout.value,
        "LATER": layout.later,
        "CODE": layout.code,
        "LOW": layout.low,
        "BLOCK": sizes.block,
        "STEP": sizes.step,
        "TILE": sizes.tile,
        "WINDOW": sizes.window,
    }
