"""Encode of the lossless codec in two kernels.

``exponent_split`` computes everything of known size, and the bit string of each chunk.
``exponent_place`` moves the strings to their positions in the row, which are known once all tiles
have been counted.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.exponent_bits import (
    compressed,
    moves,
    ones,
    picked,
    transposed,
)
from commpass.lowering.gpu.tiles.exponent_floats import column_words, exponents_of, rest_of
from commpass.lowering.gpu.tiles.exponent_ladder import codes_of
from commpass.lowering.gpu.tiles.exponent_window import choose
from commpass.lowering.gpu.tiles.exponent_wire import (
    BIAS,
    LANES,
    LENGTH_AT,
    MODE_AT,
    add_up,
    before,
    chunk_marks,
    chunk_sums,
    lanes_of,
    marks_of,
    on_columns,
    row_words,
)

FEW_BITS = 2
"""Fields of at most this many bits may be numerous, and are all moved at once; others one at a
time."""
UNITS = 32
"""16-bit words that are moved at once."""


@tile
def up_to_here(of_columns, COLUMNS: tl.constexpr):
    """Running sums of columns, each chunk on its own."""
    wide = tl.reshape(of_columns, (COLUMNS // LANES, LANES))
    return tl.reshape(tl.cumsum(wide, 1), (COLUMNS,))


@tile
def shifted(planes, fields, offset, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """``COUNT`` planes from the first on, of ``fields`` fields each, as one string that begins at a
    bit offset: its length, what falls into the word where it begins, and into the next one."""
    HERE: tl.constexpr = min(COUNT, len(planes) - FIRST)
    string = planes[FIRST].to(tl.uint64)
    for number in tl.static_range(1, HERE):
        shift = tl.minimum(fields * number, 63).to(tl.uint64)
        string = string | (planes[FIRST + number].to(tl.uint64) << shift)
    shift = (offset & 63).to(tl.uint64)
    return fields * HERE, string << shift, (string >> 1) >> (63 - shift)


@tile
def append(sums, planes, fields, begin, gained, stored, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """Puts the fields of columns, so many planes in a string, behind what chunks have already:
    ``begin`` bits, which add up to ``gained``. Returns both with them.

    Word w of a chunk is ``sums[w] - sums[w - 1]``: no two strings share a bit, so that "or" is a
    sum, and a word is what the running sum (mod 2^64) gained in it. Each boundary between words is
    met by one string, which stores the sum up to there. ``stored``: columns whose sums are stored.
    """
    length = fields * len(planes)
    offset = on_columns(begin, COLUMNS) + up_to_here(length, COLUMNS) - length
    at = offset
    whole = tl.zeros((COLUMNS,), tl.uint64)
    for first in tl.static_range(0, len(planes), COUNT):
        bits, low, carry = shifted(planes, fields, at, first, COUNT)
        whole = whole + low + carry
        at = at + bits
    upto = on_columns(gained, COLUMNS) + up_to_here(whole, COLUMNS) - whole
    at = offset
    for first in tl.static_range(0, len(planes), COUNT):
        bits, low, carry = shifted(planes, fields, at, first, COUNT)
        upto = upto + low
        meets = stored & (((at + bits) >> 6) > (at >> 6))
        tl.store(sums + (at >> 6), upto.to(tl.int64, bitcast=True), mask=meets)
        upto = upto + carry
        at = at + bits
    return begin + chunk_sums(length, COLUMNS), gained + chunk_sums(whole, COLUMNS)


@tile
def exponent_split(
    source,
    wire,
    sums,
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
    FIELDS: tl.constexpr,
    WINDOWS: tl.constexpr,
    MODES: tl.constexpr,
    NAMED: tl.constexpr,
    LOST: tl.constexpr,
    MOVED: tl.constexpr,
    STARTS: tl.constexpr,
    BELOW: tl.constexpr,
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
    lane = column % LANES
    inside = column < columns
    live = tl.where(inside, 0xFFFFFFFF, 0).to(tl.uint32)
    source += tl.cast(row, tl.int64) * pitch
    wire += tl.cast(row, tl.int64) * row_words(static, columns, RAW)
    first = column // LANES * (PACKED * LANES) + lane
    lanes = lanes_of(column // LANES, columns)
    part = column_words(source, first, lanes, inside, PACKED, HALVES)

    rest = rest_of(part, FORM)
    for number in tl.static_range(REST):
        at = wire + number * tl.cast(columns, tl.int64) + column
        tl.store(at, rest[number].to(tl.int32, bitcast=True), mask=inside)
    exponents = transposed(exponents_of(part, FORM))
    if EXPONENT == 5:
        exponents = exponents[0:5]
    chunk = tile_ * (COLUMNS // LANES) + tl.arange(0, COLUMNS // LANES)
    there = chunk * LANES < columns
    has = tl.where(there, lanes_of(chunk, columns), 0)
    start, mode = choose(
        exponents,
        has * LANES,
        STEPS,
        FIELDS,
        WINDOWS,
        MODES,
        NAMED,
        LOST,
        MOVED,
        STARTS,
        BELOW,
        COLUMNS,
    )
    modes = ()
    for number in tl.static_range(MODES):
        of_mode = tl.where(mode == number + 1, 0xFFFFFFFF, 0).to(tl.uint32)
        modes = modes + (on_columns(of_mode, COLUMNS),)
    fields, masks = codes_of(exponents, on_columns(start, COLUMNS), modes, STEPS, BITS, TABLES)

    counts = ()
    bits = tl.zeros_like(start)
    for step in tl.static_range(1, STEPS + 1):
        count = ones(masks[step] & live)
        counts = counts + (count,)
        bits = bits + chunk_sums(count, COLUMNS) * len(fields[step])
    length = tl.minimum((bits + 15) >> 4, has * (2 * RAW))
    raw = length == has * (2 * RAW)
    marks = (start + BIAS) | (mode << MODE_AT) | (length << LENGTH_AT)
    tl.store(marks_of(wire, columns, REST + FIRST) + chunk, marks, mask=there)
    add_up(tallies, groups, row, tile_, many_groups, tl.sum(length, 0), GROUP)

    is_raw = on_columns(raw.to(tl.int32), COLUMNS) != 0
    for number in tl.static_range(FIRST):
        at = wire + (REST + number) * tl.cast(columns, tl.int64) + column
        plane = tl.where(is_raw, exponents[number], fields[0][number])
        tl.store(at, plane.to(tl.int32, bitcast=True), mask=inside)

    # 16 * RAW words of a chunk: one that is raw has its exponents there, as they will be.
    slot = tl.cast(tl.program_id(0), tl.int64) * (COLUMNS // LANES)
    to = sums.to(tl.pointer_type(tl.int32)) + slot * (LANES * RAW)
    to += column // LANES % (COLUMNS // LANES) * (LANES * RAW) + lane * RAW
    for number in tl.static_range(RAW):
        word = exponents[FIRST + number].to(tl.int32, bitcast=True)
        tl.store(to + number, word, mask=inside & is_raw)
    sums += slot * (LANES // 2 * RAW)
    own = sums + column // LANES % (COLUMNS // LANES) * (LANES // 2 * RAW)
    begin = tl.zeros_like(start)
    gained = tl.zeros_like(start).to(tl.uint64)
    kept = inside & (is_raw == 0)
    for step in tl.static_range(1, STEPS + 1):
        mask = tl.where(kept, masks[step], 0)
        count = tl.where(kept, counts[step - 1], 0)
        most = tl.max(count, 0)
        if len(fields[step]) <= FEW_BITS:
            planes = compressed(fields[step], moves(mask), mask)
            begin, gained = append(own, planes, count, begin, gained, kept, len(planes), COLUMNS)
        else:
            planes = picked(fields[step], mask, most)
            if most * len(fields[step]) <= 64:
                begin, gained = append(
                    own, planes, count, begin, gained, kept, len(planes), COLUMNS
                )
            else:  # rare
                begin, gained = append(own, planes, count, begin, gained, kept, 2, COLUMNS)
    # The last word may end in the middle.
    last = sums + tl.arange(0, COLUMNS // LANES) * (LANES // 2 * RAW) + (begin >> 6)
    open_ = there & (raw == 0) & ((begin & 63) != 0)
    tl.store(last, gained.to(tl.int64, bitcast=True), mask=open_)


@tile
def exponent_place(
    source,
    wire,
    sums,
    tallies,
    groups,
    pitch,
    quads,
    static,
    tiles,
    many_groups,
    PACKED: tl.constexpr,
    REST: tl.constexpr,
    EXPONENT: tl.constexpr,
    BITS: tl.constexpr,
    HALVES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    FIRST: tl.constexpr = BITS & 15
    RAW: tl.constexpr = EXPONENT - FIRST
    row = tl.program_id(0) // tiles
    tile_ = tl.program_id(0) % tiles
    columns = quads * 4
    wire += tl.cast(row, tl.int64) * row_words(static, columns, RAW)
    _, length, raw = chunk_marks(wire, tile_, columns, REST + FIRST, RAW, COLUMNS)
    ends = tl.cumsum(length, 0)
    first_unit = before(tallies, groups, row, tile_, many_groups, GROUP)
    begin = first_unit + (ends - length)
    dynamic = (wire + tl.cast(static, tl.int64) * 4).to(tl.pointer_type(tl.int16))
    sums += tl.cast(tl.program_id(0), tl.int64) * (COLUMNS // LANES * (LANES // 2 * RAW))
    chunk = tl.arange(0, COLUMNS // LANES)[:, None]
    own = sums + chunk * (LANES // 2 * RAW)
    raw_words = own.to(tl.pointer_type(tl.int32))
    raw = raw[:, None]
    for first in range(0, tl.max(length, 0), UNITS):
        unit = first + tl.arange(0, UNITS)[None, :]
        wanted = unit < length[:, None]
        word = unit >> 2
        upto = tl.load(own + word, mask=wanted & (raw == 0), other=0)
        last = tl.load(own + word - 1, mask=wanted & (raw == 0) & (word > 0), other=0)
        coded = (upto - last).to(tl.uint64, bitcast=True) >> ((unit & 3) * 16).to(tl.uint64)
        other = tl.load(raw_words + (unit >> 1), mask=wanted & raw, other=0)
        other = other.to(tl.uint32, bitcast=True) >> ((unit & 1) * 16).to(tl.uint32)
        number = tl.where(raw, other, coded.to(tl.uint32)) & 0xFFFF
        number = number.to(tl.uint16).to(tl.int16, bitcast=True)
        tl.store(dynamic + begin[:, None] + unit, number, mask=wanted)

    if tile_ == tiles - 1:  # rare
        # Up to a multiple of 16 bytes, which is sent.
        end = first_unit + tl.sum(length, 0)
        place = tl.arange(0, 8)
        tl.store(dynamic + end + place, place.to(tl.int16) * 0, mask=place < (-end & 7))
    if tile_ == 0:  # rare
        # Values that are in no line, and what fills the last unit.
        plain = marks_of(wire, columns, REST + FIRST) + (columns + LANES - 1) // LANES
        free = tl.cast(static, tl.int64) * 4 - tl.cast(columns, tl.int64) * (REST + FIRST)
        free -= (columns + LANES - 1) // LANES
        source += tl.cast(row, tl.int64) * pitch
        place = tl.arange(0, 256)
        if HALVES:
            body = tl.cast(columns, tl.int64) * (2 * PACKED)
            values_left = tl.load(source + body + place, mask=body + place < pitch, other=0)
            tl.store(
                plain.to(tl.pointer_type(tl.int16)) + place, values_left, mask=place < free * 2
            )
        else:
            body = tl.cast(columns, tl.int64) * PACKED
            values_left = tl.load(source + body + place, mask=body + place < pitch, other=0)
            tl.store(plain + place, values_left, mask=place < free)
