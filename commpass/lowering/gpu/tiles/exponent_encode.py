"""Encode of the lossless codec in two kernels: ``exponent_split`` makes everything of which the
size is known, and for each tile the bit strings of each step, put end to end; ``exponent_place``
moves these to where they begin in the row, which is known once all tiles have been counted."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.exponent_bits import (
    any_of,
    compressed,
    joined,
    moves,
    ones,
    picked,
    transposed,
)
from commpass.lowering.gpu.tiles.exponent_floats import column_words, exponents_of, rest_of
from commpass.lowering.gpu.tiles.exponent_ladder import codes_of
from commpass.lowering.gpu.tiles.exponent_wire import (
    BIAS,
    LANES,
    MANY,
    ROOM,
    WILD,
    WILD_BITS,
    add_up,
    before,
    chunk_marks,
    chunk_sums,
    dynamic_of,
    header_of,
    marks_of,
    on_columns,
    row_words,
)

COMMON = 46
"""From so many zeros of a chunk on they are many."""
FEW_BITS = 2
"""Fields of so few bits may be many; all are moved at once, others one at a time."""
LONGEST = 64
"""Bits of the strings of columns; a chunk that needs more is wild."""


@tile
def windows_of(planes, COLUMNS: tl.constexpr, SHIFT: tl.constexpr, LOWER: tl.constexpr):
    """Where the outermost windows of chunks start, and where their zeros are many (bool); from the
    planes of exponents."""
    total = ones(planes[0])
    for bit in tl.static_range(1, len(planes)):
        total = total + (ones(planes[bit]) << bit)
    total = chunk_sums(total, COLUMNS)
    present = chunk_sums(ones(any_of(planes)), COLUMNS)
    counted = tl.maximum(present, 1) * 256
    # Kept positive, since a division of integers goes towards zero here.
    start = (total * 256 + tl.maximum(present, 1) * SHIFT + 64 * counted) // counted - 64
    return tl.minimum(tl.maximum(start + LOWER, -BIAS), 255 - BIAS), present < LANES * 32 - COMMON


@tile
def end_to_end(sums, string, length, COLUMNS: tl.constexpr):
    """Strings of columns put end to end; returns the bits of all.

    Word w of them is ``sums[w] - sums[w - 1]``: no two strings share a bit, so that "or" is a sum,
    and a word is what the running sum (mod 2^64) gained in it. Each boundary between words is met
    by one string, which stores the sum up to there.
    """
    ends = tl.cumsum(length, 0)
    offset = ends - length
    shift = (offset & 63).to(tl.uint64)
    carry = (string >> 1) >> (63 - shift)
    total = tl.cumsum((string << shift) + carry, 0)
    word = offset >> 6
    upto = (total - carry).to(tl.int64, bitcast=True)
    tl.store(sums + word, upto, mask=(ends >> 6) > word)
    # The last word may end in the middle.
    bits = tl.sum(length, 0)
    whole = tl.sum((string << shift) + carry, 0).to(tl.int64, bitcast=True)
    tl.store(sums + (bits >> 6), whole, mask=(bits & 63) != 0)
    return bits


@tile
def exponent_split(
    source,
    wire,
    sums,
    tallies,
    groups,
    words,
    chunks,
    tiles,
    many_groups,
    FORM: tl.constexpr,
    WORDS: tl.constexpr,
    REST: tl.constexpr,
    EXPONENT: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,
    EARLY: tl.constexpr,
    SHIFT: tl.constexpr,
    LOWER: tl.constexpr,
    HALVES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    tile_ = tl.program_id(0) % tiles
    line = chunks * LANES
    column = tile_ * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < line
    source += tl.cast(row, tl.int64) * words
    wire += tl.cast(row, tl.int64) * row_words(chunks, REST + (BITS & 15))
    part = column_words(source, line, column, inside, words, WORDS, HALVES)

    rest = rest_of(part, FORM)
    for number in tl.static_range(REST):
        at = wire + number * tl.cast(line, tl.int64) + column
        tl.store(at, rest[number].to(tl.int32, bitcast=True), mask=inside)
    exponents = transposed(exponents_of(part, FORM))
    if EXPONENT == 5:
        exponents = exponents[0:5]
    start, many = windows_of(exponents, COLUMNS, SHIFT, LOWER)
    fields, masks = codes_of(
        exponents,
        on_columns(start, COLUMNS),
        on_columns(tl.where(many, 0xFFFFFFFF, 0).to(tl.uint32), COLUMNS),
        STEPS,
        BITS,
        TABLES,
        EARLY,
    )
    for number in tl.static_range(BITS & 15):
        at = wire + (REST + number) * tl.cast(line, tl.int64) + column
        tl.store(at, fields[0][number].to(tl.int32, bitcast=True), mask=inside)

    too_long = tl.zeros((COLUMNS,), tl.int32)
    for step in tl.static_range(1, STEPS + 1):
        # As many fields as have no room in the longest string.
        too_long = too_long | (ones(masks[step]) > LONGEST // len(fields[step])).to(tl.int32)
    wild = tl.max(tl.reshape(too_long, (COLUMNS // LANES, LANES)), 1) > 0
    chunk = tile_ * (COLUMNS // LANES) + tl.arange(0, COLUMNS // LANES)
    wild = (wild & (chunk < chunks)).to(tl.int32)
    marks = (start + BIAS) | tl.where(many, MANY, 0) | (wild * WILD)
    at = marks_of(wire, chunks, REST + (BITS & 15)) + chunk
    tl.store(at, marks.to(tl.int16), mask=chunk < chunks)
    add_up(tallies, groups, row, tile_, many_groups, STEPS, tl.sum(wild, 0), STEPS + 1, GROUP)

    tame = tl.where(inside & (on_columns(wild, COLUMNS) == 0), 0xFFFFFFFF, 0).to(tl.uint32)
    sums += tl.cast(tl.program_id(0), tl.int64) * STEPS * COLUMNS
    for step in tl.static_range(1, STEPS + 1):
        mask = masks[step] & tame
        count = ones(mask)
        if len(fields[step]) <= FEW_BITS:
            planes = compressed(fields[step], moves(mask), mask)
        else:
            planes = picked(fields[step], mask, tl.max(count, 0))
        string = joined(planes, count)
        length = count * len(fields[step])
        bits = end_to_end(sums + (step - 1) * COLUMNS, string, length, COLUMNS)
        add_up(tallies, groups, row, tile_, many_groups, step - 1, bits, STEPS + 1, GROUP)

    # What the strings do not fill is zeros, and they are put in between.
    at = tl.cast(tile_, tl.int64) * (COLUMNS // LANES * ROOM) + tl.arange(
        0, COLUMNS // LANES * ROOM
    )
    blank = tl.zeros((COLUMNS // LANES * ROOM,), tl.int32)
    dynamic = dynamic_of(wire, chunks, REST + (BITS & 15))
    tl.store(dynamic + at, blank, mask=at < tl.cast(chunks, tl.int64) * ROOM)


@tile
def exponent_place(
    source,
    wire,
    sums,
    tallies,
    groups,
    words,
    chunks,
    tiles,
    many_groups,
    FORM: tl.constexpr,
    WORDS: tl.constexpr,
    REST: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    HALVES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    tile_ = tl.program_id(0) % tiles
    wire += tl.cast(row, tl.int64) * row_words(chunks, REST + (BITS & 15))
    dynamic = dynamic_of(wire, chunks, REST + (BITS & 15))
    earlier, all_ = before(tallies, groups, row, tile_, many_groups, STEPS + 1, GROUP)
    dense = all_[STEPS]
    sums += tl.cast(tl.program_id(0), tl.int64) * STEPS * COLUMNS
    bits = tl.zeros((), tl.int64)
    for step in tl.static_range(1, STEPS + 1):
        at = (tl.cast(row, tl.int64) * (STEPS + 1) + step - 1) * many_groups * GROUP + tile_
        length = tl.load(tallies + at)
        begin = dense * WILD_BITS + bits + earlier[step - 1]
        put(dynamic, sums + (step - 1) * COLUMNS, begin, length)
        bits += all_[step - 1]

    if tile_ == 0:
        lane = tl.arange(0, LANES)
        used = dense * (WILD_BITS // 1024) + (bits + 2047) // 2048 * 2
        header = header_of(wire, chunks, REST + (BITS & 15))
        tl.store(header + lane, tl.where(lane == 0, used, 0).to(tl.int32))
        behind = chunks + tl.arange(0, 2 * LANES)
        marks = marks_of(wire, chunks, REST + (BITS & 15))
        padded = (chunks + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
        tl.store(marks + behind, tl.zeros((2 * LANES,), tl.int16), mask=behind < padded)

    marks = chunk_marks(wire, tile_, chunks, REST + (BITS & 15), COLUMNS)
    chunk = tile_ * (COLUMNS // LANES) + tl.arange(0, COLUMNS // LANES)
    wild = ((marks & WILD) != 0) & (chunk < chunks)
    if tl.max(wild.to(tl.int32), 0) > 0:
        place = earlier[STEPS] + tl.cumsum(wild.to(tl.int32), 0) - 1
        column = tile_ * COLUMNS + tl.arange(0, COLUMNS)
        inside = on_columns(wild.to(tl.int32), COLUMNS) != 0
        source += tl.cast(row, tl.int64) * words
        part = column_words(source, chunks * LANES, column, inside, words, WORDS, HALVES)
        exponents = exponents_of(part, FORM)
        to = dynamic + on_columns(place, COLUMNS) * ROOM + tl.arange(0, COLUMNS) % LANES
        for unit in tl.static_range(8):
            word = exponents[unit].to(tl.int32, bitcast=True)
            tl.store(to + unit * LANES, word, mask=inside)


@tile
def put(dynamic, sums, begin, length):
    """Writes ``length`` bits, of which ``sums`` holds the words (see ``end_to_end``), from bit
    ``begin`` of the strings on.

    A word that has bits of others as well, at either end, is zero before and gets its bits by
    "or"; no other program stores to it.
    """
    full = (length + 63) >> 6
    shift = (begin & 63).to(tl.uint64)
    first = begin >> 6
    many = (((begin & 63) + length + 63) >> 6).to(tl.int32)
    for at in range(0, many, LANES):
        number = at + tl.arange(0, LANES)
        upto = tl.load(sums + number, mask=number < full, other=0)
        upto_last = tl.load(sums + number - 1, mask=(number >= 1) & (number <= full), other=0)
        upto_one_before = tl.load(sums + number - 2, mask=(number >= 2) & (number <= full), other=0)
        here = tl.where(number < full, upto - upto_last, 0).to(tl.uint64, bitcast=True)
        last = (upto_last - upto_one_before).to(tl.uint64, bitcast=True)
        word = (here << shift) | ((last >> 1) >> (63 - shift))
        place = first + number
        whole = (place * 64 >= begin) & (place * 64 + 64 <= begin + length)
        whole = whole & (number < many)
        shared = (number < many) & ~whole
        # 64-bit words lie as 32 lower halves, then 32 upper ones.
        to = dynamic + (place >> 5) * (2 * LANES) + (place & 31)
        low = word.to(tl.uint32).to(tl.int32, bitcast=True)
        high = (word >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
        tl.store(to, low, mask=whole)
        tl.store(to + LANES, high, mask=whole)
        tl.atomic_or(to, low, mask=shared, sem="relaxed")
        tl.atomic_or(to + LANES, high, mask=shared, sem="relaxed")
