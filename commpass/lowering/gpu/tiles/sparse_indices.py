"""The indices of sparse rows as bytes, and back: the codes of ``codecs.sparse.indices``.

Bitmap and Elias-Fano are bit strings with a one for each slot at ascending positions: at ``index``,
or at ``(index >> low) + slot``.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.sparse import BF16, FP16

NONE = 0
BITMAP = 1
ELIAS_FANO = 2
BLOCKS16 = 3


# --- to bytes -------------------------------------------------------------------------------------


@tile
def index_of(indices, slot, used, n):
    """The index in a slot; ``n`` in those that are not used."""
    return tl.load(indices + slot, mask=slot < used, other=n)


@tile
def place_of(indices, slot, used, n, CODE: tl.constexpr, LOW: tl.constexpr):
    """Where the bit of a slot is set."""
    index = index_of(indices, slot, used, n)
    return (index >> LOW) + slot if CODE == ELIAS_FANO else index


@tile
def first_slot(indices, bound, used, k, n, steps, CODE: tl.constexpr, LOW: tl.constexpr):
    """How many of the ``k`` slots lie at places below each bound; ``2^steps > k``."""
    low = bound * 0
    high = low + k
    for _ in range(steps):
        middle = (low + high) // 2
        below = place_of(indices, middle, used, n, CODE, LOW) < bound
        more = below & (low < high)
        high = tl.where(below, high, middle)
        low = tl.where(more, middle + 1, low)
    return low


@tile
def byte_of_ones(indices, byte, used, k, n, steps, end, CODE: tl.constexpr, LOW: tl.constexpr):
    """Bytes of a string of ``end`` bits, by number."""
    slot = first_slot(indices, byte * 8, used, k, n, steps, CODE, LOW)
    packed = byte * 0
    for ahead in tl.static_range(8):
        place = place_of(indices, slot + ahead, used, n, CODE, LOW)
        bit = place - byte * 8
        mine = (bit >= 0) & (bit < 8) & (slot + ahead < k) & (place < end)
        packed = packed | tl.where(mine, 1 << (bit & 7), 0)
    return packed


@tile
def byte_of_lows(indices, byte, used, k, n, LOW: tl.constexpr):
    """Bytes of the low bits of all slots, without gaps."""
    packed = byte * 0
    for ahead in tl.static_range(8):
        bit = byte * 8 + ahead
        slot = bit // LOW
        index = index_of(indices, slot, used, n)
        one = (index >> (bit % LOW)) & 1
        packed = packed | tl.where(slot < k, one << ahead, 0)
    return packed


@tile
def byte_of_offsets(indices, byte, used, n):
    """Bytes of 16 bits of each index."""
    return (index_of(indices, byte >> 1, used, n) >> ((byte & 1) * 8)) & 255


@tile
def byte_of_ends(indices, byte, used, k, n, steps):
    """Bytes of how many entries are chosen up to the end of each block of 65,536."""
    block = tl.minimum(tl.maximum(byte >> 2, 0) + 1, (n + 65535) >> 16)
    bound = tl.minimum(block << 16, n)
    ends = first_slot(indices, bound, used, k, n, steps, BITMAP, 0)
    return (ends >> ((byte & 3) * 8)) & 255


@tile
def sparse_pack(
    indices,
    used,
    lost,
    values,
    wire,
    n,
    k,
    steps,
    value_pitch,
    pitch,
    gap,
    split,
    begin,
    first,
    second,
    end,
    CODE: tl.constexpr,
    LOW: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Slots that are not used, and the bytes of the indices: all of a wire that
    ``sparse_select`` leaves.

    A row of ``wire`` is ``pitch`` bytes: values up to ``gap``, zeros to ``split``, ``first`` bytes
    of low bits or offsets, ``second`` of the rest, zeros to the end; those from ``begin`` to
    ``end`` are written here. A row that is lost has no index and NaN for values.
    """
    slot_tiles = (k + TILE - 1) // TILE
    tiles = slot_tiles + (end - begin + TILE - 1) // TILE
    row = tl.program_id(0) // tiles
    number = tl.program_id(0) % tiles
    gone = tl.load(lost + row) != 0
    filled = tl.where(gone, 0, tl.load(used + row))
    mine = indices + row.to(tl.int64) * k
    out = wire + row.to(tl.int64) * pitch
    if number < slot_tiles:
        slot = number * TILE + tl.arange(0, TILE)
        if VALUE == BF16:
            nan = 0x7FC0
        elif VALUE == FP16:
            nan = 0x7E00
        else:
            nan = 0x7FC00000
        code = tl.where(gone, nan, 0) + slot * 0
        to = row.to(tl.int64) * value_pitch + slot
        free = (slot >= filled) & (slot < k)
        tl.store(values + to, code.to(values.dtype.element_ty), mask=free)
        if number == 0:  # rare
            between = gap + tl.arange(0, 128)
            tl.store(out + between, (between * 0).to(tl.uint8), mask=between < split)
    else:
        at = begin + (number - slot_tiles) * TILE + tl.arange(0, TILE)
        byte = at - split
        if CODE == ELIAS_FANO:
            packed = byte_of_ones(
                mine, byte - first, filled, k, n, steps, k + (n >> LOW), ELIAS_FANO, LOW
            )
            if LOW > 0:
                lows = byte_of_lows(mine, byte, filled, k, n, LOW)
                packed = tl.where(byte < first, lows, packed)
        elif CODE == BITMAP:
            packed = byte_of_ones(mine, byte, filled, k, n, steps, n, BITMAP, 0)
        elif CODE == BLOCKS16:
            offsets = byte_of_offsets(mine, byte, filled, n)
            ends = byte_of_ends(mine, byte - first, filled, k, n, steps)
            packed = tl.where(byte < first, offsets, ends)
        else:
            packed = byte * 0
        packed = tl.where(byte < first + second, packed, 0)
        tl.store(out + at, packed.to(tl.uint8), mask=at < end)


# --- from bytes -----------------------------------------------------------------------------------


@tile
def ones_in(byte):
    """How many bits of each byte, int32, are set."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@tile
def bytes_of_ones(wire, pitch, begin, length, row, number, TILE: tl.constexpr):
    """A tile of a string of ``length`` bits, as int32; zeros behind it."""
    at = number * TILE + tl.arange(0, TILE)
    size = (length + 7) // 8
    byte = tl.load(wire + row.to(tl.int64) * pitch + begin + at, mask=at < size, other=0)
    rest = tl.minimum(length - at * 8, 8)
    return byte.to(tl.int32) & ((1 << tl.maximum(rest, 0)) - 1)


@tile
def sparse_count_ones(wire, ends, pitch, begin, length, tiles, TILE: tl.constexpr):
    """How many bits of each tile of a string are set, int32 ``[rows, tiles]``."""
    row = tl.program_id(0) // tiles
    byte = bytes_of_ones(wire, pitch, begin, length, row, tl.program_id(0) % tiles, TILE)
    tl.store(ends + tl.program_id(0), tl.sum(ones_in(byte), 0))


@tile
def low_bits(lows, slot, own_bits, size, LOW: tl.constexpr):
    """``LOW`` bits of each slot, without gaps from the start of a row."""
    bit = slot.to(tl.int64) * LOW
    gathered = bit * 0
    for ahead in tl.static_range((LOW + 14) // 8):
        at = (bit >> 3) + ahead
        byte = tl.load(lows + at, mask=own_bits & (at < size), other=0)
        gathered = gathered | (byte.to(tl.int64) << (8 * ahead))
    return (gathered >> (bit & 7)) & ((1 << LOW) - 1)


@tile
def sparse_places(
    wire,
    indices,
    ends,
    n,
    k,
    pitch,
    split,
    first,
    length,
    tiles,
    CODE: tl.constexpr,
    LOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """The indices of a string of bits, int32 ``[rows, k]``, of which ``ends`` says how many ones
    lie up to the end of each tile. Slots without a one are not written."""
    row = tl.program_id(0) // tiles
    number = tl.program_id(0) % tiles
    byte = bytes_of_ones(wire, pitch, split + first, length, row, number, TILE)
    ones = ones_in(byte)
    slot = tl.load(ends + tl.program_id(0)) - tl.sum(ones, 0) + tl.cumsum(ones, 0) - ones
    place = (number * TILE + tl.arange(0, TILE)) * 8
    lows = wire + row.to(tl.int64) * pitch + split
    to = indices + row.to(tl.int64) * k
    for ahead in tl.static_range(8):
        one = (byte >> ahead) & 1
        mine = (one != 0) & (slot < k)
        if CODE == ELIAS_FANO:
            index = (place + ahead - slot).to(tl.int64) << LOW
            if LOW > 0:
                index = index | low_bits(lows, slot, mine, first, LOW)
            index = tl.minimum(index, n).to(tl.int32)
        else:
            index = place + ahead
        tl.store(to + slot, index, mask=mine)
        slot += one


@tile
def number16(raw, at, own_bits):
    """A number of 16 bits, little end first, wherever it lies."""
    low = tl.load(raw + at, mask=own_bits, other=0).to(tl.int32)
    return low | (tl.load(raw + at + 1, mask=own_bits, other=0).to(tl.int32) << 8)


@tile
def sparse_places16(wire, indices, n, k, pitch, split, steps, TILE: tl.constexpr):
    """The indices of ``Blocks16``, int32 ``[rows, k]``; ``2^steps`` is more than the blocks."""
    tiles = (k + TILE - 1) // TILE
    row = tl.program_id(0) // tiles
    slot = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    mine = slot < k
    offsets = wire + row.to(tl.int64) * pitch + split
    ends = offsets + 2 * k
    blocks = (n + 65535) >> 16
    low = slot * 0
    high = low + blocks
    for _ in range(steps):
        middle = (low + high) // 2
        inside = low < high
        end = number16(ends, 4 * middle, inside).to(tl.int64) & 0xFFFF
        end = end | (number16(ends, 4 * middle + 2, inside).to(tl.int64) << 16)
        up = inside & (end <= slot)
        high = tl.where(inside & (end > slot), middle, high)
        low = tl.where(up, middle + 1, low)
    index = (low.to(tl.int64) << 16) | number16(offsets, 2 * slot, mine)
    index = tl.where(low < blocks, tl.minimum(index, n), n).to(tl.int32)
    tl.store(indices + row.to(tl.int64) * k + slot, index, mask=mine)
