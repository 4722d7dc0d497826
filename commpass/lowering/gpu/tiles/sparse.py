"""Sparse rows: selection, compaction and error feedback in one pass over ``x`` and the residual.

Values are handled as bits: bf16 and fp16 as int16, float32 as int32. A row of the wire holds ``x +
residual`` in the dtype of ``x``. Its magnitudes are compared as float32 patterns, in which NaN >
Inf > all finite numbers.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile

# Number formats, in the order of their largest numbers.
FP16 = 0
BF16 = 1
FP32 = 2

FP16_MAX = 65504.0
BF16_MAX = 3.3895313892515355e38
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000

# The state of a block: two status bits, 31 bits for the sure entries, 31 for the possible ones.
COUNTED = 1
SUMMED = 2
FLAGS = 2
FIELD = 31
FIELD_MASK = 0x7FFFFFFF
COUNTS_MASK = 0x3FFFFFFFFFFFFFFF


# --- numbers and their bits -----------------------------------------------------------------------


@tile
def pattern_of(wide):
    return wide.to(tl.int32, bitcast=True) & MAGNITUDE


@tile
def is_finite(wide):
    return pattern_of(wide) < INFINITY


@tile
def floats(code, FORM: tl.constexpr):
    """The float32 of a code, int16 or wider, whose low bits are a number of a form."""
    if FORM == BF16:
        wide = (code.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif FORM == FP16:
        wide = code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.float32, bitcast=True)
    return wide


@tile
def code_of(wide, FORM: tl.constexpr):
    """The bits of float32 rounded to a form, to nearest, ties to even; int32. Integers round to
    bf16, so that no two machines differ. A NaN keeps the top of its payload and becomes quiet."""
    bits = wide.to(tl.int32, bitcast=True)
    if FORM == BF16:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        code = tl.where((bits & MAGNITUDE) > INFINITY, (bits >> 16) | 0x40, rounded)
    elif FORM == FP16:
        code = wide.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        code = bits
    return code


@tile
def not_above(wide, FORM: tl.constexpr):
    """What is finite, cut at the largest number of a form."""
    if FORM == FP16:
        cut = tl.minimum(tl.maximum(wide, -FP16_MAX), FP16_MAX)
        wide = tl.where(is_finite(wide), cut, wide)
    elif FORM == BF16:
        cut = tl.minimum(tl.maximum(wide, -BF16_MAX), BF16_MAX)
        wide = tl.where(is_finite(wide), cut, wide)
    return wide


@tile
def sent(row, FORM: tl.constexpr, VALUE: tl.constexpr):
    """The code of a value of a row in the form in which it travels, and what it is decoded to."""
    if FORM > VALUE:
        row = not_above(row, VALUE)
    code = code_of(row, VALUE)
    own = received(code, FORM, VALUE)
    return code, own


@tile
def received(code, FORM: tl.constexpr, VALUE: tl.constexpr):
    """What a code is decoded to: no finite value that overflows in the dtype of the row."""
    own = floats(code, VALUE)
    if VALUE > FORM:
        own = not_above(own, FORM)
    return own


@tile
def least_pattern(pattern, FORM: tl.constexpr):
    """The least pattern that, rounded to a form, is not below a pattern of 1 ... Inf: so that what
    is compared need not be rounded. Halfway to the code above is enough where that code is even,
    the next pattern where it is odd."""
    if FORM == BF16:
        code = (pattern + 0xFFFF) >> 16
        least = (code << 16) - 0x8000 + (code & 1)
    elif FORM == FP16:
        bound = pattern.to(tl.float32, bitcast=True)
        code = code_of(bound, FP16)
        code += (floats(code, FP16) < bound).to(tl.int32)
        above = tl.where(code == 0x7C00, 65536.0, floats(code, FP16))
        least = pattern_of((floats(code - 1, FP16) + above) * 0.5) + (code & 1)
    else:
        least = pattern
    return least


@tile
def remainder_of(target, sent):
    """What was not sent. What is not finite must not come back."""
    return tl.where(is_finite(sent) & is_finite(target), target - sent, 0.0)


# --- rows in blocks -------------------------------------------------------------------------------


@tile
def row_start(row, n, ONE_ROW: tl.constexpr):
    """Where a row begins. One row begins at the start, whatever its length is a multiple of: loads
    of 16 bytes need to know."""
    return row.to(tl.int64) * 0 if ONE_ROW else row.to(tl.int64) * n


@tile
def load_target(x, residual, start, at, n, is_full, FORM: tl.constexpr):
    """``x + residual`` of a block in float32; zeros behind the row."""
    if is_full:
        code = tl.load(x + start + at)
        rest = tl.load(residual + start + at)
    else:
        code = tl.load(x + start + at, mask=at < n, other=0)
        rest = tl.load(residual + start + at, mask=at < n, other=0.0)
    return floats(code, FORM) + rest


@tile
def store_remainder(remainder, start, at, n, is_full, value):
    if is_full:
        tl.store(remainder + start + at, value)
    else:  # rare
        tl.store(remainder + start + at, value, mask=at < n)


# --- entries as words of bits ---------------------------------------------------------------------


@tile
def pack_ones(ones, BLOCK: tl.constexpr):
    """A bool for each entry to uint32 words, least bit first. The sums over 4 entries are a
    thread's own."""
    fours = tl.reshape(ones.to(tl.int32), (BLOCK // 32, 8, 4)) << tl.arange(0, 4)[None, None, :]
    octets = tl.sum(fours, 2) << (tl.arange(0, 8) * 4)[None, :]
    return tl.sum(octets, 1).to(tl.uint32)


@tile
def ones_in_word(packed):
    """How many bits of each word, uint32, are set; int32."""
    pairs = packed - ((packed >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    sixteens = eights + (eights >> 8)
    return ((sixteens + (sixteens >> 16)) & 0x3F).to(tl.int32)


# --- counts of earlier blocks ---------------------------------------------------------------------


@tile
def publish(state, count, counts, flag):
    """Tells the blocks behind what is known of a block. The word is all that they read, so that
    nothing need be ordered by it."""
    tl.atomic_xchg(state + count, (counts << FLAGS) | flag, sem="relaxed")


@tile
def counted_before(state, first, count, WINDOW: tl.constexpr):
    """The counts of all blocks ``first ... mine`` of a row, without the last: a look back that
    waits for blocks that began before this one (Merrill and Garland 2016, single-pass prefix scan
    with decoupled look-back).

    ``WINDOW`` is the number of threads: each reads one word, and what all of them decide goes by a
    reduction over all of them. Were a word read by several warps, they could see it change and
    part.
    """
    lane = tl.arange(0, WINDOW)
    total = first.to(tl.int64) * 0
    back = count - 1
    while back >= first:
        at = back - lane
        seen = tl.load(state + at, mask=at >= first, other=SUMMED, volatile=True)
        flag = (seen & 3).to(tl.int32)
        whole = tl.min(tl.where(flag == SUMMED, lane, WINDOW), 0)
        missing = tl.min(tl.where(flag == 0, lane, WINDOW), 0)
        counts = tl.sum(tl.where(lane <= whole, (seen >> FLAGS) & COUNTS_MASK, 0), 0)
        ready = missing >= whole
        total += tl.where(ready, counts, 0)
        further = tl.where(whole < WINDOW, first - 1, back - WINDOW)
        back = tl.where(ready, further, back)
    return total


# --- kernels --------------------------------------------------------------------------------------


@tile
def sparse_select(
    x,
    residual,
    remainder,
    values,
    indices,
    bitmap,
    used,
    bounds,
    lost,
    state,
    n,
    k,
    blocks,
    value_pitch,
    bitmap_pitch,
    FORM: tl.constexpr,
    VALUE: tl.constexpr,
    LATER: tl.constexpr,
    BITMAP: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Chooses within bounds, writes values and indices without gaps, and what is left.

    ``x`` and ``residual`` are ``[rows, n]``; ``remainder`` as the residual, and may be it.
    ``bounds`` is int32 ``[rows, 3]``: low, high, room; ``lost`` int32 ``[rows]``. ``values`` takes
    code after code of each row, ``value_pitch`` apart; ``indices`` is int32 ``[rows, k]``; slots
    behind ``used`` are left to ``sparse_pack``. ``state`` is int64 ``[1 + rows * blocks]``, zeros:
    a counter, and a word for each block. Programs take blocks in the order in which they begin, not
    in that of their numbers: those that one waits for are then running. Where ``LATER``, values
    travel by another codec, and what is left of those that were chosen is all of them.
    """
    turn = tl.atomic_add(state, 1, sem="relaxed").to(tl.int32)
    row = turn // blocks
    block = turn % blocks
    words = state + 1
    first = row * blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    whole = (block + 1) * BLOCK <= n
    start = row_start(row, n, ONE_ROW)
    wanted = load_target(x, residual, start, at, n, whole, FORM)
    low = least_pattern(tl.load(bounds + row * 3), FORM)
    high = least_pattern(tl.load(bounds + row * 3 + 1), FORM)
    room = tl.load(bounds + row * 3 + 2)
    gone = tl.load(lost + row) != 0

    # Zeros behind the row are below any threshold: a threshold is at least 1.
    pattern = pattern_of(wanted)
    some = tl.where(gone, 0, pack_ones(pattern >= low, BLOCK))
    sure = tl.where(gone, 0, pack_ones(pattern >= high, BLOCK))
    ones = ones_in_word(sure) + (ones_in_word(some ^ sure) << 16)
    here = tl.sum(ones, 0)
    counts = (here & 0xFFFF).to(tl.int64) | ((here >> 16).to(tl.int64) << FIELD)
    if block > 0:
        publish(words, turn, counts, COUNTED)

    # By way of memory, each thread gets a word of its own; what the sums left has each of them in
    # several threads. Words take a part of the place of what is left, also in a block cut short.
    begin = block * BLOCK + tl.arange(0, BLOCK // 32) * 32
    lent = remainder + start + block * BLOCK + tl.arange(0, BLOCK // 32)
    tl.debug_barrier()  # left may be the residual, of which all has been read now
    tl.store(lent, some.to(tl.float32, bitcast=True), mask=begin < n)
    tl.debug_barrier()
    rest = tl.load(lent, mask=begin < n, other=0.0).to(tl.uint32, bitcast=True)
    tl.debug_barrier()
    # What is not finite is above any threshold: it lies here until it has been sent.
    store_remainder(remainder, start, at, n, whole, tl.where(gone, 0.0, wanted))
    upto = tl.cumsum(ones, 0)
    before = counted_before(words, first, turn, WINDOW)
    publish(words, turn, before + counts, SUMMED)
    sures = (before & FIELD_MASK).to(tl.int32)
    maybes = ((before >> FIELD) & FIELD_MASK).to(tl.int32)
    if block == blocks - 1:  # rare
        after = tl.minimum(maybes + (here >> 16), room)
        tl.store(used + row, tl.minimum(sures + (here & 0xFFFF) + after, k))

    # The chosen of each word, one after the other: as many rounds as the fullest word has.
    tl.debug_barrier()
    sures += (upto & 0xFFFF) - (ones & 0xFFFF)
    maybes += (upto >> 16) - (ones >> 16)
    codes = values + row.to(tl.int64) * value_pitch
    slots = indices + row.to(tl.int64) * k
    selected = rest ^ rest
    # Rounds are counted in bits: Triton 3.9 would unroll a loop of a known number, eight at a time.
    rounds = (1 << tl.max(ones_in_word(rest), 0).to(tl.int64)) - 1
    while rounds > 0:
        others = rest & (rest - 1)
        lowest = rest ^ others
        place = begin + ones_in_word(lowest - 1)
        value = tl.load(remainder + start + place, mask=rest != 0, other=0.0)
        certain = pattern_of(value) >= high
        slot = sures + tl.minimum(maybes, room)
        take = (rest != 0) & (certain | (maybes < room)) & (slot < k)
        code, own = sent(floats(code_of(value, FORM), FORM), FORM, VALUE)
        tl.store(codes + slot, code.to(values.dtype.element_ty), mask=take)
        tl.store(slots + slot, place, mask=take)
        if LATER:
            own = tl.where(is_finite(own), 0.0, own)
        tl.store(remainder + start + place, remainder_of(value, own), mask=take)
        if BITMAP:
            selected = tl.where(take, selected | lowest, selected)
        sures += certain.to(tl.int32)
        maybes += ((rest != 0) & (pattern_of(value) < high)).to(tl.int32)
        rest = others
        rounds = rounds >> 1
    if BITMAP:
        byte = block * (BLOCK // 8) + tl.arange(0, BLOCK // 32) * 4
        to = bitmap + row.to(tl.int64) * bitmap_pitch + byte
        for ahead in tl.static_range(4):
            octet = ((selected >> (8 * ahead)) & 255).to(tl.uint8)
            tl.store(to + ahead, octet, mask=byte + ahead < (n + 7) // 8)


@tile
def sparse_take(
    x,
    residual,
    remainder,
    values,
    indices,
    starts,
    lost,
    n,
    k,
    blocks,
    value_pitch,
    FORM: tl.constexpr,
    VALUE: tl.constexpr,
    LATER: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """As ``sparse_select``, of entries that are known: ``indices`` int32 ``[rows, k]``, ascending,
    of which ``starts`` int32 ``[rows, blocks + 1]`` says with which slot each block begins."""
    number = tl.program_id(0)
    row = number // blocks
    block = number % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    whole = (block + 1) * BLOCK <= n
    start = row_start(row, n, ONE_ROW)
    wanted = load_target(x, residual, start, at, n, whole, FORM)
    gone = tl.load(lost + row) != 0
    slot = tl.load(starts + row * (blocks + 1) + block)
    end = tl.load(starts + row * (blocks + 1) + block + 1)
    end = tl.where(gone, slot, end)
    chosen = indices + row.to(tl.int64) * k
    for j in range(slot, end, STEP):
        slots = j + tl.arange(0, STEP)
        place = tl.load(chosen + slots, mask=slots < end, other=0)
        code = tl.load(x + start + place, mask=slots < end, other=0)
        more = tl.load(residual + start + place, mask=slots < end, other=0.0)
        coded, _own = sent(floats(code_of(floats(code, FORM) + more, FORM), FORM), FORM, VALUE)
        to = row.to(tl.int64) * value_pitch + slots
        tl.store(values + to, coded.to(values.dtype.element_ty), mask=slots < end)
    tl.debug_barrier()  # as above, of left
    store_remainder(
        remainder, start, at, n, whole, tl.where(is_finite(wanted) & (not gone), wanted, 0.0)
    )
    if not LATER:
        tl.debug_barrier()
        for j in range(slot, end, STEP):
            slots = j + tl.arange(0, STEP)
            place = tl.load(chosen + slots, mask=slots < end, other=0)
            kept = tl.load(remainder + start + place, mask=slots < end, other=0.0)
            _coded, own = sent(floats(code_of(kept, FORM), FORM), FORM, VALUE)
            tl.store(remainder + start + place, remainder_of(kept, own), mask=slots < end)


@tile
def sparse_settle(
    remainder, indices, values, decoded, n, k, used, FORM: tl.constexpr, TILE: tl.constexpr
):
    """Takes what another codec made of the values, float32 ``[rows, k]``, off what is left."""
    tiles = (k + TILE - 1) // TILE
    row = tl.program_id(0) // tiles
    slot = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    mine = slot < tl.load(used + row)
    at = row.to(tl.int64) * k + slot
    place = row.to(tl.int64) * n + tl.load(indices + at, mask=mine, other=0)
    own = tl.load(decoded + at, mask=mine, other=0.0)
    value = floats(tl.load(values + at, mask=mine, other=0), FORM)
    wanted = tl.load(remainder + place, mask=mine, other=0.0)
    rest = tl.where(is_finite(value), remainder_of(wanted, own), 0.0)
    tl.store(remainder + place, rest, mask=mine)
