"""Decode of the lossless codec. Where the strings of a step begin depends on all those of the step
before, so there is a kernel for each step that counts (``exponent_count``, then ``exponent_follow``
for each further one), and at last ``exponent_join``, which makes the values."""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.exponent_bits import (
    any_of,
    expanded,
    inverse,
    moves,
    ones,
    put_back,
    taken_apart,
    transposed,
)
from commpass.lowering.gpu.tiles.exponent_floats import words_of
from commpass.lowering.gpu.tiles.exponent_ladder import exponents_from
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
    dynamic_of,
    on_columns,
    row_words,
)

FEW = 2
"""As FEW_BITS of encode."""


@tile
def named_by_none(row, line, column, inside, FIRST: tl.constexpr, PLANES: tl.constexpr):
    """The planes of the first step, and the mask of the values that it leaves to the next one."""
    planes = ()
    for number in tl.static_range(PLANES):
        at = row + (FIRST + number) * tl.cast(line, tl.int64) + column
        planes = planes + (tl.load(at, mask=inside, other=-1).to(tl.uint32, bitcast=True),)
    return planes, inverse(any_of(planes))


@tile
def read(dynamic, begin, offset, length, chunks):
    """``length`` bits, up to 64, from bit ``begin + offset`` on; further ones may follow. Nothing
    beyond the dynamic part is read, whatever the wire holds.

    ``begin`` int64 of a tile, ``offset`` int32 of its columns: all but the first step is done in
    32 bits.
    """
    words = tl.cast(chunks, tl.int64) * ROOM
    first = tl.minimum(tl.maximum(begin >> 11, 0) * (2 * LANES), words - 2 * LANES)
    last = tl.minimum(words - first, 1 << 30).to(tl.int32) - 1
    dynamic += first
    bit = (begin & 2047).to(tl.int32) + offset
    # 32-bit words; those of the odd numbers are the upper halves of 64-bit ones.
    number = bit >> 5
    shift = bit & 31
    reach = shift + length
    shift = shift.to(tl.uint64)
    low = word_at(dynamic, number, length > 0, last)
    middle = word_at(dynamic, number + 1, reach > 32, last)
    high = word_at(dynamic, number + 2, reach > 64, last)
    low = (low | (middle << 32)) >> shift
    high = (middle | (high << 32)) >> shift
    return (low & 0xFFFFFFFF) | (high << 32)


@tile
def word_at(dynamic, number, wanted, last):
    number = tl.minimum(number, last)
    at = (number & -64) + (number & 1) * LANES + ((number >> 1) & 31)
    return tl.load(dynamic + at, mask=wanted, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)


@tile
def exponent_count(
    wire,
    counts,
    tallies,
    groups,
    chunks,
    tiles,
    many_groups,
    REST: tl.constexpr,
    EXPONENT: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """How many fields of the second step each column has, ``counts``; sums of their bits, and of
    wild chunks."""
    row = tl.program_id(0) // tiles
    tile_ = tl.program_id(0) % tiles
    line = chunks * LANES
    column = tile_ * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < line
    wire += tl.cast(row, tl.int64) * row_words(chunks, REST + (BITS & 15))
    marks = chunk_marks(wire, tile_, chunks, REST + (BITS & 15), COLUMNS)
    chunk = tile_ * (COLUMNS // LANES) + tl.arange(0, COLUMNS // LANES)
    wild = (marks & WILD) // WILD
    _, mask = named_by_none(wire, line, column, inside, REST, BITS & 15)
    count = ones(mask) * (1 - on_columns(wild, COLUMNS))
    bits = tl.sum(count, 0) * bits_of(1, EXPONENT, STEPS, BITS)
    add_up(tallies, groups, row, tile_, many_groups, 0, bits, STEPS + 1, GROUP)
    wild = tl.sum(tl.where(chunk < chunks, wild, 0), 0)
    add_up(tallies, groups, row, tile_, many_groups, STEPS, wild, STEPS + 1, GROUP)
    if STEPS > 1:
        at = counts + tl.cast(row, tl.int64) * line + column
        tl.store(at, count.to(tl.uint8), mask=inside)


@tile
def bits_of(STEP: tl.constexpr, EXPONENT: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr):
    """Bits of the fields of a step."""
    if STEP == STEPS:
        return EXPONENT
    else:
        return (BITS >> (4 * STEP)) & 15


@tile
def exponent_follow(
    wire,
    counts,
    tallies,
    groups,
    chunks,
    tiles,
    many_groups,
    STEP: tl.constexpr,
    REST: tl.constexpr,
    EXPONENT: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """How many fields of step ``STEP + 1`` each column has, ``counts``, which holds those of
    ``STEP`` before: as many as ``STEP`` has fields of zero. And the sums of their bits."""
    row = tl.program_id(0) // tiles
    tile_ = tl.program_id(0) % tiles
    line = chunks * LANES
    column = tile_ * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < line
    wire += tl.cast(row, tl.int64) * row_words(chunks, REST + (BITS & 15))
    dynamic = dynamic_of(wire, chunks, REST + (BITS & 15))
    counts += tl.cast(row, tl.int64) * line + column
    count = tl.load(counts, mask=inside, other=0).to(tl.int32)

    earlier, all_ = before(tallies, groups, row, tile_, many_groups, STEPS + 1, GROUP)
    begin = all_[STEPS] * WILD_BITS + earlier[STEP - 1]
    for step in tl.static_range(1, STEP):
        begin += all_[step - 1]
    length = count * bits_of(STEP, EXPONENT, STEPS, BITS)
    ends = tl.cumsum(length, 0)
    string = read(dynamic, begin, ends - length, length, chunks)
    planes = taken_apart(string, count, (BITS >> (4 * STEP)) & 15)
    fields = (1 << tl.minimum(count, 31).to(tl.uint32)) - 1
    fields = tl.where(count > 31, 0xFFFFFFFF, fields)
    count = ones(inverse(any_of(planes)) & fields)
    tl.store(counts, count.to(tl.uint8), mask=inside)
    bits = tl.sum(count, 0) * bits_of(STEP + 1, EXPONENT, STEPS, BITS)
    add_up(tallies, groups, row, tile_, many_groups, STEP, bits, STEPS + 1, GROUP)


@tile
def exponent_join(
    wire,
    out,
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
    HALVES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    tile_ = tl.program_id(0) % tiles
    line = chunks * LANES
    column = tile_ * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < line
    wire += tl.cast(row, tl.int64) * row_words(chunks, REST + (BITS & 15))
    dynamic = dynamic_of(wire, chunks, REST + (BITS & 15))
    marks = chunk_marks(wire, tile_, chunks, REST + (BITS & 15), COLUMNS)
    wild_chunk = (marks & WILD) // WILD
    wild = on_columns(wild_chunk, COLUMNS) != 0
    tame = tl.where(wild, 0, 0xFFFFFFFF).to(tl.uint32)
    earlier, all_ = before(tallies, groups, row, tile_, many_groups, STEPS + 1, GROUP)
    begin = all_[STEPS] * WILD_BITS

    planes, mask = named_by_none(wire, line, column, inside, REST, BITS & 15)
    fields = (planes,)
    for step in tl.static_range(1, STEPS + 1):
        # A wild chunk has no fields; what its planes say is not used.
        mask = mask & tame
        count = ones(mask)
        length = count * bits_of(step, EXPONENT, STEPS, BITS)
        ends = tl.cumsum(length, 0)
        string = read(dynamic, begin + earlier[step - 1], ends - length, length, chunks)
        begin += all_[step - 1]
        if step == STEPS:
            planes = taken_apart(string, count, EXPONENT)
        else:
            planes = taken_apart(string, count, (BITS >> (4 * step)) & 15)
        if len(planes) <= FEW:
            planes = expanded(planes, moves(mask), mask)
        else:
            planes = put_back(planes, mask, tl.max(count, 0))
        mask = mask & inverse(any_of(planes))
        fields = fields + (planes,)

    start = (marks & 0xFF) - BIAS
    many = tl.where((marks & MANY) != 0, 0xFFFFFFFF, 0).to(tl.uint32)
    exponents = exponents_from(
        fields,
        on_columns(start, COLUMNS),
        on_columns(many, COLUMNS),
        STEPS,
        BITS,
        TABLES,
        EARLY,
        EXPONENT,
    )
    for _ in tl.static_range(EXPONENT, 8):
        exponents = exponents + (tl.zeros_like(mask),)
    raw = transposed(exponents)
    place = earlier[STEPS] + tl.cumsum(wild_chunk, 0) - 1
    at = dynamic + on_columns(place, COLUMNS) * ROOM + tl.arange(0, COLUMNS) % LANES
    exponents = ()
    for unit in tl.static_range(8):
        otherwise = raw[unit].to(tl.int32, bitcast=True)
        word = tl.load(at + unit * LANES, mask=wild & inside, other=otherwise)
        exponents = exponents + (word.to(tl.uint32, bitcast=True),)

    rest = ()
    for number in tl.static_range(REST):
        at = wire + number * tl.cast(line, tl.int64) + column
        rest = rest + (tl.load(at, mask=inside, other=0).to(tl.uint32, bitcast=True),)
    values = words_of(exponents, rest, FORM)
    out += tl.cast(row, tl.int64) * words
    for part in tl.static_range(WORDS):
        at = part * line + column
        if HALVES:
            first = at.to(tl.int64) * 2
            low = (values[part] & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
            high = (values[part] >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
            tl.store(out + first, low, mask=inside & (first < words))
            tl.store(out + first + 1, high, mask=inside & (first + 1 < words))
        else:
            word = values[part].to(tl.int32, bitcast=True)
            tl.store(out + at, word, mask=inside & (at < words))
