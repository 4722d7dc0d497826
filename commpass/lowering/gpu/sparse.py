"""The kernels of the sparse codecs, and their arguments.

    encode      x + residual -> wire, residual         bounds (aten or kernels), select, pack
    decode      wire -> rows                           places, sum
    sum_rows    wires of all ranks -> their sum        places, sum

Everything is launched without reading numbers from the device, so a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
from commpass.lowering.gpu.call import Arguments, Call, launch
from commpass.lowering.gpu.source import Source, of_function
from commpass.lowering.gpu.sparse_measure import FORMS, WHOLE, seen
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


def unsupported_reason(coder: SparseCodec, numel: int, dtype: torch.dtype) -> str | None:
    """Return why there are no kernels for rows, or None if there are."""
    if dtype not in FORMS:
        return f"sparse kernels take float32, bfloat16 and float16, not {dtype}"
    if isinstance(coder, SegmentedCodec):
        return "sparse kernels select from whole rows, not from segments"
    if numel == 0:
        return "sparse kernels take rows of at least one entry"
    chosen = coder.slots(numel)
    low = coder.index.low if isinstance(coder.index, EliasFano) else 16
    if max(numel + chosen, chosen * low, coder.wire_bytes(numel, dtype)) >= MOST:
        return f"sparse kernels count up to {MOST}; a row of {numel} is longer"
    return None


def layout_of(coder: SparseCodec, numel: int, dtype: torch.dtype) -> Layout:
    chosen = coder.slots(numel)
    inner = coder.inner
    value = CAST[inner.form] if isinstance(inner, CastCodec) else FORMS[dtype]
    later = not isinstance(inner, CastCodec | RawCodec)
    split = inner.wire_bytes(chosen, dtype)
    gap = split if later else chosen * (4 if value == tiles.FP32 else 2)
    code, low, first = _index(coder.index, chosen)
    second = index_codes.nbytes(coder.index, numel, chosen) - first
    pitch = coder.wire_bytes(numel, dtype)
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
    coder: SparseCodec,
    x: Tensor,
    residual: Tensor,
    sizes: Sizes | None = None,
    remainder: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the wire of ``x + residual``, uint8 ``[rows, wire_bytes]``, and the new residual,
    float32 ``[rows, n]``: 0 if the input or the decoded value is not finite.

    ``x`` is ``[rows, n]`` in bf16, fp16 or fp32, ``residual`` float32; both contiguous. The new
    residual is written to ``remainder`` if given, which may be the residual itself.
    """
    sizes = sizes or sizes_on(x.device)
    layout = layout_of(coder, x.shape[1], x.dtype)
    wire = x.new_empty((x.shape[0], layout.pitch), dtype=torch.uint8)
    values = values_of(layout, wire)
    remainder = torch.empty_like(residual) if remainder is None else remainder
    indices = x.new_empty((x.shape[0], layout.chosen), dtype=torch.int32)
    if isinstance(coder.selector, Threshold):
        used = x.new_empty((x.shape[0],), dtype=torch.int32)
        within, lost = bounds_of(coder, x, residual, sizes)
        launch(
            select_call(
                layout, sizes, x, residual, remainder, values, indices, wire, used, within, lost
            )
        )
        done = layout.code == sparse_indices.BITMAP
    else:
        indices, used, lost = selection_of(coder, x, residual)
        launch(take_call(layout, sizes, x, residual, remainder, values, indices, lost))
        done = False
    launch(pack_call(layout, sizes, indices, used, lost, values, wire, done))
    if layout.later:
        numbers = values.view(layout.dtype)
        inner = coder.inner.encode_rows(numbers)
        wire[:, : layout.split].copy_(inner)
        own = coder.inner.decode_rows(inner, layout.chosen, layout.dtype).float().contiguous()
        launch(settle_call(layout, sizes, remainder, indices, values, own, used))
    return wire, remainder


def wanted_rows(x: Tensor, residual: Tensor) -> Tensor:
    """Return the values to send, in the dtype of ``x``."""
    return (x.float() + residual).to(x.dtype)


def bounds_of(
    coder: SparseCodec, x: Tensor, residual: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Return the arguments of ``sparse_select`` for each row: int32 ``[rows, 3]`` and
    ``[rows]``."""
    found = bounds(coder.selector, seen(x, residual, sizes.part, sizes.laps), coder.density)
    within = torch.cat([found.low, found.high, found.room.to(torch.int32)], dim=1)
    return within, found.lost.to(torch.int32)


def selection_of(coder: SparseCodec, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of ``sparse_take``: indices, int32 ``[rows, k]``; used and lost, int32
    ``[rows]``."""
    found = select(coder.selector, wanted_rows(x, residual), coder.density)
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


# --- calls ----------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _source(entry: object) -> Source:
    return of_function(entry)  # type: ignore[arg-type]


def select_call(
    layout: Layout,
    sizes: Sizes,
    x: Tensor,
    residual: Tensor,
    remainder: Tensor,
    values: Tensor,
    indices: Tensor,
    wire: Tensor,
    used: Tensor,
    bounds: Tensor,
    lost: Tensor,
) -> Call:
    rows, blocks = x.shape[0], _blocks(layout, sizes)
    arguments: Arguments = {
        "x": x.view(WHOLE[layout.dtype]),
        "residual": residual,
        "remainder": remainder,
        "values": values,
        "indices": indices,
        "bitmap": wire.view(-1)[layout.split :],
        "used": used,
        "bounds": bounds,
        "lost": lost,
        "state": x.new_zeros((1 + rows * blocks,), dtype=torch.int64),
        "n": layout.entries,
        "k": layout.chosen,
        "blocks": blocks,
        "value_pitch": values.shape[1],
        "bitmap_pitch": layout.pitch,
    }
    constants = {
        "FORM": layout.form,
        "VALUE": layout.value,
        "LATER": layout.later,
        "BITMAP": layout.code == sparse_indices.BITMAP,
        "ONE_ROW": rows == 1,
        "BLOCK": sizes.block,
        "WINDOW": sizes.window,
    }
    return Call(_source(tiles.sparse_select), arguments, constants, rows * blocks, sizes.warps)


def take_call(
    layout: Layout,
    sizes: Sizes,
    x: Tensor,
    residual: Tensor,
    remainder: Tensor,
    values: Tensor,
    indices: Tensor,
    lost: Tensor,
) -> Call:
    rows, blocks = x.shape[0], _blocks(layout, sizes)
    arguments: Arguments = {
        "x": x.view(WHOLE[layout.dtype]),
        "residual": residual,
        "remainder": remainder,
        "values": values,
        "indices": indices,
        "starts": starts_of(indices, layout, sizes),
        "lost": lost,
        "n": layout.entries,
        "k": layout.chosen,
        "blocks": blocks,
        "value_pitch": values.shape[1],
    }
    constants = {
        "FORM": layout.form,
        "VALUE": layout.value,
        "LATER": layout.later,
        "ONE_ROW": rows == 1,
        "BLOCK": sizes.block,
        "STEP": sizes.step,
    }
    return Call(_source(tiles.sparse_take), arguments, constants, rows * blocks, sizes.warps)


def pack_call(
    layout: Layout,
    sizes: Sizes,
    indices: Tensor,
    used: Tensor,
    lost: Tensor,
    values: Tensor,
    wire: Tensor,
    done: bool,
) -> Call:
    """Return the call of ``sparse_pack``. ``done``: the indices are written already."""
    begin = layout.split + (layout.first + layout.second if done else 0)
    tiled = -(-layout.chosen // sizes.tile) + -(-(layout.pitch - begin) // sizes.tile)
    arguments: Arguments = {
        "indices": indices,
        "used": used,
        "lost": lost,
        "values": values,
        "wire": wire,
        "n": layout.entries,
        "k": layout.chosen,
        "steps": layout.chosen.bit_length(),
        "value_pitch": values.shape[1],
        "pitch": layout.pitch,
        "gap": layout.gap,
        "split": layout.split,
        "begin": begin,
        "first": layout.first,
        "second": layout.second,
        "end": layout.pitch,
    }
    constants = {
        "CODE": sparse_indices.NONE if done else layout.code,
        "LOW": layout.low,
        "VALUE": layout.value,
        "TILE": sizes.tile,
    }
    return Call(_source(sparse_indices.sparse_pack), arguments, constants, wire.shape[0] * tiled, 4)


def settle_call(
    layout: Layout,
    sizes: Sizes,
    remainder: Tensor,
    indices: Tensor,
    values: Tensor,
    own_values: Tensor,
    used: Tensor,
) -> Call:
    arguments: Arguments = {
        "remainder": remainder,
        "indices": indices,
        "values": values,
        "decoded": own_values,
        "used": used,
        "n": layout.entries,
        "k": layout.chosen,
    }
    constants = {"FORM": layout.form, "TILE": sizes.tile}
    programs = remainder.shape[0] * -(-layout.chosen // sizes.tile)
    return Call(_source(tiles.sparse_settle), arguments, constants, programs, 4)


# --- decode ---------------------------------------------------------------------------------------


def decode(
    coder: SparseCodec, wire: Tensor, numel: int, dtype: torch.dtype, sizes: Sizes | None = None
) -> Tensor:
    """Decode uint8 ``[rows, wire_bytes(numel, dtype)]`` to float32 ``[rows, numel]``, as
    ``decode_rows``."""
    out = wire.new_empty((wire.shape[0], numel), dtype=torch.float32)
    return _received(coder, wire, numel, dtype, sizes or sizes_on(wire.device), out)


def sum_rows(
    coder: SparseCodec, wires: Tensor, numel: int, dtype: torch.dtype, sizes: Sizes | None = None
) -> Tensor:
    """Return the sum ``[numel]`` of all rows in float32, in row order, as ``sum_by_index``."""
    out = wires.new_empty((numel,), dtype=torch.float32)
    return _received(coder, wires, numel, dtype, sizes or sizes_on(wires.device), out)


def _received(
    coder: SparseCodec, wire: Tensor, numel: int, dtype: torch.dtype, sizes: Sizes, out: Tensor
) -> Tensor:
    layout = layout_of(coder, numel, dtype)
    indices = indices_of(layout, sizes, wire)
    if layout.later:
        inner = wire.narrow(1, 0, layout.split)
        values = coder.inner.decode_rows(inner, layout.chosen, dtype).float().contiguous()
        values = values.view(torch.int32)
    else:
        values = wire.view(layout.value_dtype)
    launch(sum_call(layout, sizes, values, indices, out))
    return out


def indices_of(layout: Layout, sizes: Sizes, wire: Tensor) -> Tensor:
    """Return the indices of rows, int32 ``[rows, k]``, with ``n`` in unused slots."""
    indices = wire.new_full((wire.shape[0], layout.chosen), layout.entries, dtype=torch.int32)
    if layout.code == sparse_indices.BLOCKS16:
        launch(places16_call(layout, sizes, wire, indices))
        return indices
    tiled = ceil_to(layout.second, sizes.tile) // sizes.tile
    ends = wire.new_empty((wire.shape[0], tiled), dtype=torch.int32)
    launch(ones_call(layout, sizes, wire, ends))
    launch(places_call(layout, sizes, wire, indices, ends.cumsum(1, dtype=torch.int32)))
    return indices


def ones_call(layout: Layout, sizes: Sizes, wire: Tensor, ends: Tensor) -> Call:
    arguments: Arguments = {
        "wire": wire,
        "ends": ends,
        "pitch": layout.pitch,
        "begin": layout.split + layout.first,
        "length": layout.bits,
        "tiles": ends.shape[1],
    }
    constants = {"TILE": sizes.tile}
    return Call(_source(sparse_indices.sparse_count_ones), arguments, constants, ends.numel(), 4)


def places_call(layout: Layout, sizes: Sizes, wire: Tensor, indices: Tensor, ends: Tensor) -> Call:
    arguments: Arguments = {
        "wire": wire,
        "indices": indices,
        "ends": ends,
        "n": layout.entries,
        "k": layout.chosen,
        "pitch": layout.pitch,
        "split": layout.split,
        "first": layout.first,
        "length": layout.bits,
        "tiles": ends.shape[1],
    }
    constants = {"CODE": layout.code, "LOW": layout.low, "TILE": sizes.tile}
    return Call(_source(sparse_indices.sparse_places), arguments, constants, ends.numel(), 4)


def places16_call(layout: Layout, sizes: Sizes, wire: Tensor, indices: Tensor) -> Call:
    blocks = -(-layout.entries >> 16)
    arguments: Arguments = {
        "wire": wire,
        "indices": indices,
        "n": layout.entries,
        "k": layout.chosen,
        "pitch": layout.pitch,
        "split": layout.split,
        "steps": blocks.bit_length(),
    }
    programs = wire.shape[0] * -(-layout.chosen // sizes.tile)
    return Call(
        _source(sparse_indices.sparse_places16), arguments, {"TILE": sizes.tile}, programs, 4
    )


def sum_call(layout: Layout, sizes: Sizes, values: Tensor, indices: Tensor, out: Tensor) -> Call:
    """``out`` is ``[numel]`` for the sum of all rows, ``[rows, numel]`` for separate rows."""
    rows, blocks = indices.shape[0], _blocks(layout, sizes)
    together = out.dim() == 1
    arguments: Arguments = {
        "values": values,
        "indices": indices,
        "starts": starts_of(indices, layout, sizes),
        "out": out,
        "n": layout.entries,
        "k": layout.chosen,
        "blocks": blocks,
        "value_pitch": values.shape[1],
        "ranks": rows if together else 1,
    }
    constants = {
        "SUM": together,
        "FORM": tiles.FP32 if layout.later else layout.form,
        "VALUE": tiles.FP32 if layout.later else layout.value,
        "BLOCK": sizes.block,
        "STEP": sizes.step,
    }
    programs = blocks if together else rows * blocks
    return Call(_source(sparse_sum.sparse_sum), arguments, constants, programs, sizes.warps)
