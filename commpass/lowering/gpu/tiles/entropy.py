"""Encode and decode of codec ``ecq``: see ``codecs.entropy.coder`` for the bytes of a chunk.

Blocks are rotated in parallel. A program then codes the numbers of one chunk, one after the other,
with a state in each of 16 lanes.
"""

from __future__ import annotations

import triton.language as tl

from commpass.codecs.entropy.coder import (
    ATTEMPTS,
    BLOCK,
    COARSEST,
    FINE,
    LANES,
    LEAST,
    OVERHEAD,
    PEAK,
    PER_RMS,
    SPARE,
    WORD_BITS,
    ZERO,
)
from commpass.codecs.entropy.coder import DITHER as STRIDE
from commpass.codecs.entropy.operators import OF_CHUNK
from commpass.codecs.entropy.tables import (
    ALWAYS_DITHERED,
    COST_BITS,
    HALF,
    LARGEST_RATIO,
    LEAST_DITHERED,
    LEAST_RATIO,
    PER_OCTAVE,
    TOTAL,
    TOTAL_BITS,
)
from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.exponent_bits import ones
from commpass.lowering.gpu.tiles.numbers import (
    INFINITY_BITS,
    bits_of,
    clamp_to,
    of_bits,
    round_to_even,
    size_bits,
    to_float32,
)
from commpass.lowering.gpu.tiles.transforms import butterfly

CLASSES = 2 * HALF
SIDE = 16
"""A block is a square of values."""
NO_NUMBERS = -4 * COARSEST
"""The ratio of a block of zeros."""
TILE = 256
"""Words that are moved at once."""


# --- blocks ---------------------------------------------------------------------------------------


@tile
def hadamard_of_block(x, BY: tl.constexpr):
    """``H @ block`` over both dimensions of the square, each with a factor, in the order of
    ``codecs.entropy.rotation``: sums of floats depend on it."""
    x = x * BY
    for step in tl.static_range(4):
        x = butterfly(x, SIDE << step, 1)
    x = x * BY
    for step in tl.static_range(4):
        x = butterfly(x, 1 << step, 1)
    return x


@tile
def sign_of(place):
    """Of each place of a block, 1.0 or -1.0: the parity of the pairs of bits that are set."""
    pairs = place & (place >> 1) & 0x55
    return 1.0 - 2.0 * ((((pairs * 0x55) >> 6) & 1).to(tl.float32))


@tile
def entropy_rotate(
    source,
    values,
    peaks,
    largest,
    numel,
    blocks,
    all_blocks,
    ROTATED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Rotate blocks of rows: ``values [rows, blocks, BLOCK]``, and of each block the bits of its
    peak, and its root mean square or its peak over PEAK, if that is larger, float64."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = tl.arange(0, BLOCK)[None, :]
    row = (block // blocks).to(tl.int64)
    place = (block % blocks)[:, None] * BLOCK + inside
    is_block = block < all_blocks
    mask = is_block[:, None] & (place < numel)
    x = to_float32(tl.load(source + row[:, None] * numel + place, mask=mask, other=0.0), False)
    if ROTATED:
        x = hadamard_of_block(x * sign_of(inside), 1.0 / SIDE)
    tl.store(values + block.to(tl.int64)[:, None] * BLOCK + inside, x, mask=is_block[:, None])
    peak = tl.max(size_bits(x), 1)
    x = tl.where(peak[:, None] < INFINITY_BITS, x, 0.0).to(tl.float64)
    mean = tl.sum(x * x, 1) / BLOCK
    most = tl.where(peak < INFINITY_BITS, of_bits(peak), 0.0).to(tl.float64) / PEAK
    tl.store(peaks + block, peak, mask=is_block)
    tl.store(largest + block, tl.maximum(tl.sqrt(mean), most), mask=is_block)


@tile
def entropy_rotate_back(
    values,
    side,
    out,
    numel,
    blocks,
    all_blocks,
    chunks,
    LIMIT_OF: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Rotate the blocks of decoded values back, with the scales of their chunks; rows
    ``out [rows, numel]`` in float32."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = tl.arange(0, BLOCK)[None, :]
    row, own = (block // blocks).to(tl.int64), block % blocks
    is_block = block < all_blocks
    at = block.to(tl.int64)[:, None] * BLOCK + inside
    x = tl.load(values + at, mask=is_block[:, None], other=0.0)
    power = tl.load(side + row * chunks + own // OF_CHUNK, mask=is_block, other=0).to(tl.int32)
    # The scale 2^-127 is not a normal number: no encoder writes it.
    scale = of_bits(tl.where(power == 255, 0x7FC00000, power << 23))[:, None]
    if ROTATED:
        x = hadamard_of_block(x * (scale * (1.0 / BLOCK)), 1.0) * sign_of(inside) * BLOCK
    else:
        x = x * scale
    place = own[:, None] * BLOCK + inside
    mask = is_block[:, None] & (place < numel)
    tl.store(out + row[:, None] * numel + place, clamp_to(x, LIMIT_OF), mask=mask)


# --- what a chunk is coded with -------------------------------------------------------------------


@tile
def width_of(blocks):
    """The number of states of a chunk: the largest power of two up to its blocks, and LANES."""
    width = tl.where(blocks > 0, 1, 1)
    for _ in tl.static_range(4):
        width = tl.where(2 * width <= blocks, 2 * width, width)
    return width


@tile
def layout_of(blocks, NBYTES: tl.constexpr):
    """The bytes of a chunk before its states and before its stream, and the capacity of the stream
    in 16-bit words."""
    states_at = 2 + ((blocks + 1) >> 1) * 2
    header = states_at + 4 * width_of(blocks)
    return states_at, header, (blocks * NBYTES - header) >> 1


@tile
def fine_ratio(rms, step, EVEN: tl.constexpr):
    """The ratios of root mean squares to their steps, in 64ths of an octave."""
    ratio = rms * (-(2 - EVEN) * (PER_RMS // 2)) - step
    return tl.where(rms == ZERO, NO_NUMBERS, ratio)


@tile
def ratio_of(rms, step, EVEN: tl.constexpr):
    """The ratios of the tables of blocks, in eighths of an octave."""
    ratio = (fine_ratio(rms, step, EVEN) + PER_RMS // 2) >> 3
    return tl.minimum(tl.maximum(ratio, LEAST_RATIO), LARGEST_RATIO)


@tile
def table_of(ratio, dithered):
    """The numbers of tables; ``dithered`` is that of the chunk."""
    other = (ratio >= LEAST_DITHERED) & (ratio < ALWAYS_DITHERED) & (dithered != 0)
    return ratio - LEAST_RATIO + tl.where(other, LARGEST_RATIO + 1 - LEAST_DITHERED, 0)


@tile
def power_of(number, roots):
    """``2^(number / 64)``; zero or infinite beyond float32."""
    whole = tl.minimum(tl.maximum(number >> 6, -252), 254)
    half = whole >> 1
    root = tl.load(roots + (number & (FINE - 1)))
    return root * of_bits((half + 127) << 23) * of_bits((whole - half + 127) << 23)


@tile
def of_block(numbers, block):
    """One of the numbers of all blocks of a chunk."""
    return tl.sum(tl.where(tl.arange(0, OF_CHUNK) == block, numbers, 0), 0)


@tile
def dither_of(place, table):
    """The dither of places of a block with a table."""
    dither = (((place * STRIDE) & 255).to(tl.float32) + 0.5) * (1.0 / 256) - 0.5
    return tl.where(table >= ALWAYS_DITHERED - LEAST_RATIO, dither, 0.0)


@tile
def first_step(rms, is_block, blocks, header, NBYTES: tl.constexpr, EVEN: tl.constexpr, costs):
    """The smallest step whose estimated code fits, by bisection."""
    free_bits: tl.constexpr = 32 - WORD_BITS - OVERHEAD - 3
    bits_left = 8 * (blocks * NBYTES - header) + width_of(blocks) * free_bits - SPARE
    budget = bits_left.to(tl.int64) * (PER_RMS << COST_BITS)
    finest = fine_ratio(rms, 0, EVEN) - LARGEST_RATIO * PER_RMS
    finest = tl.max(tl.where(is_block, tl.maximum(finest, -COARSEST), -COARSEST), 0)
    coarsest = finest * 0 + COARSEST
    while finest < coarsest:
        middle = (finest + coarsest) >> 1
        fine = tl.maximum(fine_ratio(rms, middle, EVEN), LEAST_RATIO * PER_RMS)
        fine = tl.minimum(fine, LARGEST_RATIO * PER_RMS - 1)
        at, part = costs + (fine >> 3) - LEAST_RATIO, fine & 7
        bits = tl.load(at) * (PER_RMS - part) + tl.load(at + 1) * part
        fits = tl.sum(tl.where(is_block, bits, 0), 0).to(tl.int64) * BLOCK <= budget
        coarsest = tl.where(fits, middle, coarsest)
        finest = tl.where(fits, finest, middle + 1)
    return coarsest


# --- chunks ---------------------------------------------------------------------------------------


@tile
def marked(mask, lane):
    """Marks of lanes as the bits of a uint32, and of each lane how many before it are marked."""
    bits = tl.sum(tl.where(mask, 1 << lane, 0), 0).to(tl.uint32)
    return bits, ones(bits & ((1 << lane) - 1).to(tl.uint32))


@tile
def pushed(state, full, stream, capacity, written, lane):
    """Write a word of each full state, before what is ``written``. Words beyond the capacity are
    only counted."""
    bits, before = marked(full, lane)
    written += ones(bits)
    at = capacity - written + before
    tl.store(stream + at, state.to(tl.int16), mask=full & (at >= 0))
    return tl.where(full, state >> WORD_BITS, state), written


@tile
def pulled(state, stream, capacity, read, lane, is_lane):
    """Let each empty state read a word; zeros follow the last one."""
    empty = is_lane & (state < LEAST)
    bits, before = marked(empty, lane)
    at = read + before
    word = tl.load(stream + at, mask=empty & (at < capacity), other=0).to(tl.uint32) & 0xFFFF
    return tl.where(empty, (state << WORD_BITS) | word, state), read + ones(bits)


@tile
def entropy_code(
    values,
    peaks,
    largest,
    stream,
    halves,
    code,
    side,
    classes,
    costs,
    roots,
    blocks_of_row,
    chunks,
    pitch,
    NBYTES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Code one chunk: ``code [rows, blocks * NBYTES]``, of which ``halves`` is the int16 view, and
    the bytes of the scales, ``side [rows, chunks]``. ``stream [rows, chunks, pitch]`` is free."""
    number = tl.program_id(0).to(tl.int64)
    row, chunk = number // chunks, tl.program_id(0) % chunks
    blocks = tl.minimum(blocks_of_row - chunk * OF_CHUNK, OF_CHUNK)
    first_block = row * blocks_of_row + chunk * OF_CHUNK
    block = tl.arange(0, OF_CHUNK)
    is_block = block < blocks

    # The scale of the chunk, and the root mean squares of its blocks.
    peak = tl.max(tl.load(peaks + first_block + block, mask=is_block, other=0), 0)
    finite = peak < INFINITY_BITS
    power = tl.minimum(tl.maximum((peak + 0x7FFFFF) >> 23, 1), 254)
    tl.store(side + number, tl.where(finite, power, 255).to(tl.uint8))
    most = tl.load(largest + first_block + block, mask=is_block, other=0.0)
    is_number = finite & (most > 0)
    # log2 of the scaled number: the scale is a power of two.
    depth = ((power - 127).to(tl.float64) - tl.log2(tl.where(is_number, most, 1.0))) * PER_OCTAVE
    rms = round_to_even(tl.minimum(tl.maximum(depth, 0.0), ZERO).to(tl.float32))
    rms = tl.where(is_number, rms, ZERO)

    width = width_of(blocks)
    steps = tl.full((), BLOCK, tl.int32) // width
    lane = tl.arange(0, LANES)
    is_lane = lane < width
    is_read = is_lane & (peak + 0 * lane < INFINITY_BITS)  # `finite` for each lane
    states_at, header, capacity = layout_of(blocks, NBYTES)
    first = first_step(rms, is_block, blocks, header, NBYTES, EVEN, costs)
    own = values + first_block * BLOCK
    free = stream + number * pitch
    inverse = of_bits((254 - power) << 23)  # subnormal if the scale is 2^127
    inverse = tl.where(power == 254, 2.0**-127, inverse)

    attempt, written, step, dithered = capacity * 0, capacity + 1, first, capacity * 0
    state = tl.full((LANES,), LEAST, tl.uint32)
    while written > capacity:
        tl.debug_barrier()  # other threads wrote the words of the attempt before
        dithered = (attempt >= ATTEMPTS).to(tl.int32)
        step = first + (1 << (attempt - dithered * ATTEMPTS)) - 1
        attempt, written = attempt + 1, capacity * 0
        ratios = ratio_of(rms, step, EVEN)
        tables = table_of(ratios, dithered)
        lows = tl.maximum((ratios >> 3) - 1, 0)
        scales = power_of(rms * (EVEN * (PER_RMS // 2)) - step, roots)
        scales = tl.where(rms == ZERO, 0.0, scales)
        state = tl.full((LANES,), LEAST, tl.uint32)
        for back in range(blocks):
            at_block = blocks - 1 - back
            table, low = of_block(tables, at_block), of_block(lows, at_block)
            scale = of_bits(of_block(bits_of(scales), at_block))
            for turn in range(steps):
                inside = (steps - 1 - turn) * width + lane
                x = tl.load(own + at_block * BLOCK + inside, mask=is_read, other=0.0)
                q = round_to_even(x * inverse * scale + dither_of(inside, table))
                if low > 0:
                    full = is_lane & (((state >> 1) >> (31 - low)) != 0)
                    state, written = pushed(state, full, free, capacity, written, lane)
                    rest = (q & ((1 << low) - 1)).to(tl.uint32)
                    state = tl.where(is_lane, (state << low) | rest, state)
                of_table = tl.minimum(tl.maximum((q >> low) + HALF, 0), CLASSES - 1)
                at = classes + table * CLASSES + of_table
                entry = tl.load(at, mask=is_lane, other=1).to(tl.uint32)
                frequency, start = entry & 0xFFFF, entry >> 16
                full = is_lane & ((state >> (32 - TOTAL_BITS)) >= frequency)
                state, written = pushed(state, full, free, capacity, written, lane)
                times = state // frequency
                coded = (times << TOTAL_BITS) + (state - times * frequency) + start
                state = tl.where(is_lane, coded, state)

    # The header, the words and zeros.
    begin = first_block * NBYTES
    begin_half = begin >> 1
    tl.store(halves + begin_half, (2 * step + dithered).to(tl.int16))
    known = tl.where(is_block, rms, 0).to(tl.uint8)
    tl.store(code + begin + 2 + block, known, mask=block < states_at - 2)
    at_state = halves + begin_half + (states_at >> 1) + 2 * lane
    tl.store(at_state, (state & 0xFFFF).to(tl.int16), mask=is_lane)
    tl.store(at_state + 1, (state >> 16).to(tl.int16), mask=is_lane)
    tl.debug_barrier()  # other threads wrote the words
    out = halves + begin_half + (header >> 1)
    for ahead in range(0, capacity, TILE):
        at = ahead + tl.arange(0, TILE)
        word = tl.load(free + capacity - written + at, mask=at < written, other=0)
        tl.store(out + at, word, mask=at < capacity)


@tile
def entropy_numbers(
    code,
    halves,
    values,
    slots,
    levels,
    roots,
    blocks_of_row,
    chunks,
    NBYTES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Decode one chunk to ``values [rows, blocks, BLOCK]``, without its scale."""
    number = tl.program_id(0).to(tl.int64)
    row, chunk = number // chunks, tl.program_id(0) % chunks
    blocks = tl.minimum(blocks_of_row - chunk * OF_CHUNK, OF_CHUNK)
    first_block = row * blocks_of_row + chunk * OF_CHUNK
    block = tl.arange(0, OF_CHUNK)
    begin = first_block * NBYTES
    begin_half = begin >> 1

    first = tl.load(halves + begin_half).to(tl.int32)
    step, dithered = first >> 1, first & 1
    rms = tl.load(code + begin + 2 + block, mask=block < blocks, other=ZERO).to(tl.int32)
    width = width_of(blocks)
    steps = tl.full((), BLOCK, tl.int32) // width
    lane = tl.arange(0, LANES)
    is_lane = lane < width
    states_at, header, capacity = layout_of(blocks, NBYTES)
    at_state = halves + begin_half + (states_at >> 1) + 2 * lane
    lower = tl.load(at_state, mask=is_lane, other=0).to(tl.uint32) & 0xFFFF
    upper = tl.load(at_state + 1, mask=is_lane, other=1).to(tl.uint32) & 0xFFFF
    state = upper << 16 | lower

    ratios = ratio_of(rms, step, EVEN)
    tables = table_of(ratios, dithered)
    lows = tl.maximum((ratios >> 3) - 1, 0)
    scales = tl.load(levels + tables) * power_of(step - rms * (EVEN * (PER_RMS // 2)), roots)
    own = values + first_block * BLOCK
    stream = halves + begin_half + (header >> 1)
    read = capacity * 0
    for at_block in range(blocks):
        table, low = of_block(tables, at_block), of_block(lows, at_block)
        scale = of_bits(of_block(bits_of(scales), at_block))
        for turn in range(steps):
            inside = turn * width + lane
            slot = table * TOTAL + (state & (TOTAL - 1)).to(tl.int32)
            entry = tl.load(slots + slot).to(tl.uint32)
            frequency = ((entry >> TOTAL_BITS) & (TOTAL - 1)) + 1
            state = frequency * (state >> TOTAL_BITS) + (entry & (TOTAL - 1))
            q = (entry >> (2 * TOTAL_BITS)).to(tl.int32) - HALF
            state, read = pulled(state, stream, capacity, read, lane, is_lane)
            if low > 0:
                q = (q << low) | (state & ((1 << low) - 1).to(tl.uint32)).to(tl.int32)
                state, read = pulled(state >> low, stream, capacity, read, lane, is_lane)
            x = (q.to(tl.float32) - dither_of(inside, table)) * scale
            tl.store(own + at_block * BLOCK + inside, x, mask=is_lane)
