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
    unknown,
)
from commpass.lowering.gpu.tiles.exponent_floats import (
    column_words,
    exponents_of,
    rest_of,
    whole_words,
)
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
NOWHERE = 0xFFFFFF
"""The place of words that are not stored."""
UNITS = 32
"""16-bit words that are moved at once."""


@tile
def up_to_here(of_columns, COLUMNS: tl.constexpr):
    """Running sums of columns, each chunk on its own."""
    wide = tl.reshape(of_columns, (COLUMNS // LANES, LANES))
    return tl.reshape(tl.cumsum(wide, 1), (COLUMNS,))


@tile
def shifted(planes, fields, offset, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """``COUNT`` planes from the first on, of ``fields`` fields each, as one string of at most 32
    bits that begins at a bit offset: its length, what falls into the word where it begins, and into
    the next one."""
    HERE: tl.constexpr = min(COUNT, len(planes) - FIRST)
    string = planes[FIRST + HERE - 1]
    if HERE > 1:
        # By products, since shifts are done where logic is.
        factor = unknown(1) << fields.to(tl.uint32)
        for number in tl.static_range(1, HERE):
            string = string * factor + planes[FIRST + HERE - 1 - number]
    wide = string.to(tl.uint64) << (offset & 31).to(tl.uint64)
    return fields * HERE, wide.to(tl.uint32), (wide >> 32).to(tl.uint32)


@tile
def store_words(to, place, number):
    """Stores numbers at places below ``NOWHERE``, but for those at this one. Which thread stores
    which one is left to the compiler: else it moves them through shared memory first, as if
    neighbours were stored side by side."""
    both = (place.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | number
    both = tl.reshape(both, both.shape, can_reorder=True)
    place = (both >> 32).to(tl.int32) & NOWHERE
    tl.store(to + place, both.to(tl.uint32).to(tl.int32, bitcast=True), mask=place != NOWHERE)


@tile
def append(
    sums,
    own,
    planes,
    fields,
    begin,
    gained,
    stored,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Puts the fields of columns, so many planes in a string, behind what chunks have already:
    ``begin`` bits, which add up to ``gained``. Returns both with them.

    Word w of a chunk is ``sums[w] - sums[w - 1]``: no two strings share a bit, so that "or" is a
    sum, and a word is what the running sum (mod 2^32) gained in it. Each boundary between words is
    met by one string, which stores the sum up to there. ``stored``: columns whose sums are stored.
    """
    length = fields * len(planes)
    offset = on_columns(begin, COLUMNS) + up_to_here(length, COLUMNS) - length
    at = offset
    whole = tl.zeros((COLUMNS,), tl.uint32)
    for first in tl.static_range(0, len(planes), COUNT):
        bits, low, carry = shifted(planes, fields, at, first, COUNT)
        whole = whole + low + carry
        at = at + bits
    upto = on_columns(gained, COLUMNS) + up_to_here(whole, COLUMNS) - whole
    at = offset
    for first in tl.static_range(0, len(planes), COUNT):
        bits, low, carry = shifted(planes, fields, at, first, COUNT)
        upto = upto + low
        meets = stored & (((at + bits) >> 5) > (at >> 5))
        store_words(sums, tl.where(meets, own + (at >> 5), NOWHERE), upto)
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
    if HALVES:
        part = column_words(source, first, lanes, inside, PACKED, True)
    else:
        whole = (tile_ + 1) * COLUMNS <= columns
        part = whole_words(source, first, whole, PACKED)
        if not whole:  # rare
            part = column_words(source, first, lanes, inside, PACKED, False)

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
    start, mode, place, offset, near = choose(
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
    place = on_columns(place, COLUMNS)
    fields, masks = codes_of(
        exponents, offset, near, place, live, modes, STEPS, BITS, TABLES, STARTS
    )

    counts = ()
    bits = tl.zeros_like(start)
    for step in tl.static_range(1, STEPS + 1):
        count = ones(masks[step])
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

    # 32 * RAW words of a chunk: one that is raw has its exponents there, as they will be.
    sums += tl.cast(tl.program_id(0), tl.int64) * (COLUMNS * RAW)
    own = column // LANES % (COLUMNS // LANES) * (LANES * RAW)
    if tl.max(raw.to(tl.int32), 0) != 0:  # rare
        for number in tl.static_range(RAW):
            word = exponents[FIRST + number].to(tl.int32, bitcast=True)
            tl.store(sums + own + lane * RAW + number, word, mask=inside & is_raw)
    begin = tl.zeros_like(start)
    gained = tl.zeros_like(start).to(tl.uint32)
    kept = inside & (is_raw == 0)
    for step in tl.static_range(1, STEPS + 1):
        count = counts[step - 1]
        most = tl.max(count, 0)
        if len(fields[step]) <= FEW_BITS:
            planes = compressed(fields[step], moves(masks[step]), masks[step])
        else:
            planes = picked(fields[step], masks[step], most)
        if most * len(fields[step]) <= 32:
            begin, gained = append(
                sums, own, planes, count, begin, gained, kept, len(planes), COLUMNS
            )
        else:  # rare
            begin, gained = append(sums, own, planes, count, begin, gained, kept, 1, COLUMNS)
    # The last word may end in the middle.
    last = sums + tl.arange(0, COLUMNS // LANES) * (LANES * RAW) + (begin >> 5)
    open_ = there & (raw == 0) & ((begin & 31) != 0)
    tl.store(last, gained.to(tl.int32, bitcast=True), mask=open_)


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
    PLACED: tl.constexpr,
):
    """Moves the strings of ``PLACED`` tiles."""
    FIRST: tl.constexpr = BITS & 15
    RAW: tl.constexpr = EXPONENT - FIRST
    runs = (tiles + PLACED - 1) // PLACED
    row = tl.program_id(0) // runs
    run = tl.program_id(0) % runs
    columns = quads * 4
    wire += tl.cast(row, tl.int64) * row_words(static, columns, RAW)
    _, length, raw = chunk_marks(wire, run, columns, REST + FIRST, RAW, COLUMNS * PLACED)
    ends = tl.cumsum(length, 0)
    first_unit = before(tallies, groups, row, run * PLACED, many_groups, GROUP)
    begin = ends - length
    dynamic = (wire + tl.cast(static, tl.int64) * 4).to(tl.pointer_type(tl.int16)) + first_unit
    sums += (tl.cast(row, tl.int64) * tiles + run * PLACED) * (COLUMNS * RAW)
    own = sums + tl.arange(0, COLUMNS // LANES * PLACED)[:, None] * (LANES * RAW)
    coded = (raw == 0)[:, None]
    for first in range(0, tl.max(length, 0), UNITS):
        unit = first + tl.arange(0, UNITS)[None, :]
        wanted = unit < length[:, None]
        word = unit >> 1
        upto = tl.load(own + word, mask=wanted, other=0)
        last = tl.load(own + word - 1, mask=wanted & coded & (word > 0), other=0)
        number = (upto - last).to(tl.uint32, bitcast=True) >> ((unit & 1) * 16).to(tl.uint32)
        number = (number & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
        tl.store(dynamic + begin[:, None] + unit, number, mask=wanted)

    if run == runs - 1:  # rare
        # Up to a multiple of 16 bytes, which is sent.
        end = tl.sum(length, 0)
        place = tl.arange(0, 8)
        left = -(first_unit + end) & 7
        tl.store(dynamic + end + place, place.to(tl.int16) * 0, mask=place < left)
    if run == 0:  # rare
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
