"""Decode of the lossless codec: ``exponent_count`` sums the sizes of the tiles' chunks in the
dynamic part, ``exponent_join`` computes the values."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.exponent_bits import (
    any_of,
    expanded,
    inverse,
    merged,
    moves,
    ones,
    put_back,
    transposed,
    unpacked,
)
from commpass.lowering.gpu.tiles.exponent_encode import FEW_BITS, up_to_here
from commpass.lowering.gpu.tiles.exponent_floats import FLOAT32, pack_floats
from commpass.lowering.gpu.tiles.exponent_ladder import exponents_from
from commpass.lowering.gpu.tiles.exponent_wire import (
    BIAS,
    LANES,
    MODE,
    MODE_AT,
    START,
    before,
    chunk_marks,
    chunk_sums,
    lanes_of,
    marks_of,
    on_columns,
    row_words,
)


@tile
def read(dynamic, begin, offset, length, capacity):
    """``length`` bits, up to 32, from bit ``begin + offset`` on; further ones may follow. Nothing
    beyond the ``capacity`` words of the dynamic part is read, whatever the wire holds.

    ``begin`` int64 of a tile, a multiple of 16; ``offset`` int32 of its columns: all but the first
    step is done in 32 bits.
    """
    first = begin >> 5
    dynamic += first
    last = tl.minimum(capacity - first, 1 << 30).to(tl.int32) - 1
    bit = (begin & 31).to(tl.int32) + offset
    number = bit >> 5
    shift = bit & 31
    low = load_packed(dynamic, number, length > 0, last)
    high = load_packed(dynamic, number + 1, shift + length > 32, last)
    return ((low | (high << 32)) >> shift.to(tl.uint64)).to(tl.uint32)


@tile
def load_packed(dynamic, number, mask, last):
    mask = mask & (number <= last)
    return tl.load(dynamic + number, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)


@tile
def exponent_count(
    wire,
    tallies,
    groups,
    quads,
    static,
    many_groups,
    REST: tl.constexpr,
    EXPONENT: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Sums of the 16-bit words of the tiles of a group, and of the group."""
    FIRST: tl.constexpr = BITS & 15
    RAW: tl.constexpr = EXPONENT - FIRST
    row = tl.program_id(0) // many_groups
    group = tl.program_id(0) % many_groups
    columns = quads * 4
    wire += tl.cast(row, tl.int64) * row_words(static, columns, RAW)
    _, length, _ = chunk_marks(wire, group, columns, REST + FIRST, RAW, COLUMNS * GROUP)
    sums = tl.sum(tl.reshape(length, (GROUP, COLUMNS // LANES)), 1)
    tallies += (tl.cast(row, tl.int64) * many_groups + group) * GROUP
    tl.store(tallies + tl.arange(0, GROUP), sums)
    padded = (many_groups + GROUP - 1) // GROUP * GROUP
    groups += tl.cast(row, tl.int64) * padded + group
    tl.store(groups, tl.sum(sums, 0).to(groups.dtype.element_ty))


@tile
def strings_of(dynamic, begin, offset, fields, capacity, BITS: tl.constexpr, COUNT: tl.constexpr):
    """The planes of fields, so many in a string; what is not a field is left in them."""
    planes = ()
    for first in tl.static_range(0, BITS, COUNT):
        planes = planes + string_of(
            dynamic, begin, offset + fields * first, fields, capacity, min(COUNT, BITS - first)
        )
    return planes


@tile
def string_of(dynamic, begin, offset, fields, capacity, BITS: tl.constexpr):
    return unpacked(read(dynamic, begin, offset, fields * BITS, capacity), fields, BITS)


@tile
def planes_of_strings(dynamic, begin, offset, fields, most, capacity, BITS: tl.constexpr):
    """The planes of fields, of which no column has more than ``most``: of one string, if those fit
    into a word."""
    planes = ()
    for _ in tl.static_range(BITS):
        planes = planes + (tl.zeros_like(fields).to(tl.uint32),)
    if most * BITS <= 32:
        planes = string_of(dynamic, begin, offset, fields, capacity, BITS)
    else:  # rare
        planes = strings_of(dynamic, begin, offset, fields, capacity, BITS, 1)
    return planes


@tile
def store_columns(out, first, lanes, values, inside):
    for part in tl.static_range(len(values)):
        to = out + (first + part * lanes)
        tl.store(to, values[part].to(tl.int32, bitcast=True), mask=inside)


@tile
def without(planes, mask):
    out = ()
    for bit in tl.static_range(len(planes)):
        out = out + (planes[bit] & inverse(mask),)
    return out


@tile
def under(mask, a, b):
    """As many planes as ``b``: those of ``a`` under the mask, those of ``b`` elsewhere."""
    planes = ()
    for bit in tl.static_range(len(b)):
        planes = planes + (merged(mask, a[bit], b[bit]),)
    return planes


@tile
def exponent_join(
    wire,
    out,
    tallies,
    groups,
    pitch,
    quads,
    static,
    tiles,
    many_groups,
    FORM: tl.constexpr,
    PACKED: tl.constexpr,
    REST: tl.constexpr,
    EXPONENT: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,
    MODES: tl.constexpr,
    HALVES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    FIRST: tl.constexpr = BITS & 15
    RAW: tl.constexpr = EXPONENT - FIRST
    row = tl.program_id(0) // tiles
    tile_ = tl.program_id(0) % tiles
    columns = quads * 4
    column = tile_ * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    live = tl.where(inside, 0xFFFFFFFF, 0).to(tl.uint32)
    wire += tl.cast(row, tl.int64) * row_words(static, columns, RAW)
    dynamic = wire + tl.cast(static, tl.int64) * 4
    room = tl.cast(columns, tl.int64) * RAW
    marks, length, is_raw = chunk_marks(wire, tile_, columns, REST + FIRST, RAW, COLUMNS)
    raw = on_columns(tl.where(is_raw, 0xFFFFFFFF, 0).to(tl.uint32), COLUMNS) & live
    begin = before(tallies, groups, row, tile_, many_groups, GROUP) * 16
    # Bits from the tile's first one on.
    offset = on_columns((tl.cumsum(length, 0) - length) * 16, COLUMNS)

    planes = ()
    for number in tl.static_range(FIRST):
        at = wire + (REST + number) * tl.cast(columns, tl.int64) + column
        planes = planes + (tl.load(at, mask=inside, other=0).to(tl.uint32, bitcast=True),)
    mask = inverse(any_of(planes)) & live & inverse(raw)
    named = planes
    fields = ()
    for step in tl.static_range(1, STEPS):
        count = ones(mask)
        each = count * ((BITS >> (4 * step)) & 15)
        at = offset + up_to_here(each, COLUMNS) - each
        most = tl.max(count, 0)
        planes = planes_of_strings(dynamic, begin, at, count, most, room, (BITS >> (4 * step)) & 15)
        if (BITS >> (4 * step)) & 15 <= FEW_BITS:
            planes = expanded(planes, moves(mask), mask)
        else:
            planes = put_back(planes, mask, most)
        offset = offset + on_columns(chunk_sums(each, COLUMNS), COLUMNS)
        mask = mask & inverse(any_of(planes))
        fields = fields + (planes,)
    mask = mask | raw
    count = ones(mask)
    each = count * EXPONENT - tl.where(raw != 0, count * FIRST, 0)
    at = offset + up_to_here(each, COLUMNS) - each
    most = tl.max(count, 0)
    escaped = planes_of_strings(dynamic, begin, at, count, most, room, EXPONENT)
    escaped = put_back(escaped, mask, most)
    # The whole exponents of raw chunks: as if only the last step named one, or afterwards, which
    # needs fewer registers where values are wide.
    some_raw = tl.max(is_raw.to(tl.int32), 0) != 0
    if FORM != FLOAT32:  # noqa: SIM102
        if some_raw:  # rare
            escaped = under(raw, named + escaped, escaped)
            named = without(named, raw)
    fields = (named,) + fields + (escaped,)

    mode = (marks >> MODE_AT) & MODE
    modes = ()
    for number in tl.static_range(MODES):
        of_mode = tl.where(mode == number + 1, 0xFFFFFFFF, 0).to(tl.uint32)
        modes = modes + (on_columns(of_mode, COLUMNS),)
    coded = exponents_from(
        fields,
        on_columns((marks & START) - BIAS, COLUMNS),
        modes,
        STEPS,
        BITS,
        TABLES,
        EXPONENT,
    )
    if FORM == FLOAT32:  # noqa: SIM102
        if some_raw:  # rare
            coded = under(raw, fields[0] + escaped, coded)
    for _ in tl.static_range(EXPONENT, 8):
        coded = coded + (tl.zeros_like(mask),)
    exponents = transposed(coded)

    rest = ()
    for number in tl.static_range(REST):
        at = wire + number * tl.cast(columns, tl.int64) + column
        rest = rest + (tl.load(at, mask=inside, other=0).to(tl.uint32, bitcast=True),)
    values = pack_floats(exponents, rest, FORM)
    out += tl.cast(row, tl.int64) * pitch
    first = column // LANES * (PACKED * LANES) + column % LANES
    lanes = lanes_of(column // LANES, columns)
    if HALVES:
        for part in tl.static_range(PACKED):
            half = (first + part * lanes).to(tl.int64) * 2
            low = (values[part] & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
            high = (values[part] >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
            tl.store(out + half, low, mask=inside)
            tl.store(out + half + 1, high, mask=inside)
    else:
        # At fixed distances one address is enough; but a branch needs registers for all values.
        if PACKED > LANES // 2:
            store_columns(out, first, lanes, values, inside)
        elif (tile_ + 1) * COLUMNS <= columns:
            for part in tl.static_range(PACKED):
                tl.store(out + first + part * LANES, values[part].to(tl.int32, bitcast=True))
        else:  # rare
            store_columns(out, first, lanes, values, inside)

    if tile_ == 0:  # rare
        # Values that are in no line.
        plain = marks_of(wire, columns, REST + FIRST) + (columns + LANES - 1) // LANES
        place = tl.arange(0, 128)
        if HALVES:
            body = tl.cast(columns, tl.int64) * (2 * PACKED)
            there = body + place < pitch
            values_left = tl.load(plain.to(tl.pointer_type(tl.int16)) + place, mask=there, other=0)
            tl.store(out + body + place, values_left, mask=there)
        else:
            body = tl.cast(columns, tl.int64) * PACKED
            there = body + place < pitch
            tl.store(out + body + place, tl.load(plain + place, mask=there, other=0), mask=there)
