"""Exact statistics of ``x + residual`` in the dtype of ``x`` for thresholds
(``codecs.sparse.measure``), each in one pass over both.

A program processes ``TILES`` blocks and accumulates in its threads. The sums over programs are
integers, so their order does not matter. Bounds are applied before rounding if that saves the
rounding (``least_pattern``).
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile
from commpass.lowering.gpu.tiles.sparse import (
    INFINITY,
    code_of,
    floats,
    is_finite,
    least_pattern,
    load_target,
    pattern_of,
    row_start,
)

BITS24 = 16777216.0
BITS32 = 4294967296.0


@tile
def by_eight(numbers, BLOCK: tl.constexpr):
    """Sums over 8 neighbours, which one thread has."""
    return tl.sum(tl.reshape(numbers, (BLOCK // 8, 8)), 1)


@tile
def size_of(value, peak, FORM: tl.constexpr):
    """Signed values over the largest magnitude, -1 ... 1; zeros for what is not finite."""
    row = floats(code_of(value, FORM), FORM)
    largest = peak.to(tl.float32, bitcast=True)
    largest = tl.where(largest > 0, largest, 1.0)
    return tl.div_rn(tl.where(is_finite(row), row, 0.0), largest)


@tile
def sparse_peak(
    x,
    residual,
    peaks,
    outside,
    n,
    parts,
    FORM: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """The largest finite magnitude of each row, as a pattern, and how many entries are not finite:
    int32 ``[rows]`` each, zeros before."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    start = row_start(row, n, ONE_ROW)
    bound = least_pattern(tl.full((), INFINITY, tl.int32), FORM)
    largest = tl.zeros((BLOCK // 8,), tl.int32)
    count = tl.zeros((BLOCK // 8,), tl.int32)
    for ahead in range(TILES):
        block = part * TILES + ahead
        at = block * BLOCK + tl.arange(0, BLOCK)
        pattern = pattern_of(load_target(x, residual, start, at, n, (block + 1) * BLOCK <= n, FORM))
        finite = tl.where(pattern < bound, pattern, 0)
        largest = tl.maximum(largest, tl.max(tl.reshape(finite, (BLOCK // 8, 8)), 1))
        count += by_eight((pattern >= bound).to(tl.int32), BLOCK)
    # What is rounded last is rounded as well: rounding keeps the order.
    top = tl.max(largest, 0).to(tl.float32, bitcast=True)
    peak = pattern_of(floats(code_of(top, FORM), FORM))
    tl.atomic_max(peaks + row, peak, sem="relaxed")
    tl.atomic_add(outside + row, tl.sum(count, 0), sem="relaxed")


@tile
def sparse_counts(
    x,
    residual,
    thresholds,
    unless,
    found,
    n,
    parts,
    FORM: tl.constexpr,
    COUNT: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """How many entries reach each of the patterns ``thresholds``, both int32 ``[rows, COUNT]``,
    zeros before. Rows for which ``unless``, int32 ``[rows]``, is not 0 are left."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    if tl.load(unless + row) == 0:
        start = row_start(row, n, ONE_ROW)
        counts = ()
        bounds = ()
        for which in tl.static_range(COUNT):
            bound = least_pattern(tl.load(thresholds + row * COUNT + which), FORM)
            bounds = bounds + (bound,)
            none = tl.zeros((BLOCK // 8,), tl.int32)
            counts = counts + (none,)
        for ahead in range(TILES):
            block = part * TILES + ahead
            at = block * BLOCK + tl.arange(0, BLOCK)
            pattern = pattern_of(
                load_target(x, residual, start, at, n, (block + 1) * BLOCK <= n, FORM)
            )
            more = ()
            for which in tl.static_range(COUNT):
                reach = by_eight((pattern >= bounds[which]).to(tl.int32), BLOCK)
                more = more + (counts[which] + reach,)
            counts = more
        for which in tl.static_range(COUNT):
            tl.atomic_add(found + row * COUNT + which, tl.sum(counts[which], 0), sem="relaxed")


@tile
def sparse_moments(
    x,
    residual,
    peaks,
    found,
    n,
    parts,
    FORM: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """The sums of signed sizes, in units of 2^-24, and of their squares, in units of 2^-32: int64
    ``[rows, 2]``, zeros before."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    start = row_start(row, n, ONE_ROW)
    peak = tl.load(peaks + row)
    first = tl.zeros((BLOCK // 8,), tl.int64)
    second = tl.zeros((BLOCK // 8,), tl.int64)
    for ahead in range(TILES):
        block = part * TILES + ahead
        at = block * BLOCK + tl.arange(0, BLOCK)
        wanted = load_target(x, residual, start, at, n, (block + 1) * BLOCK <= n, FORM)
        size = size_of(wanted, peak, FORM)
        first += by_eight((size * BITS24).to(tl.int32), BLOCK).to(tl.int64)
        second += by_eight((size * size * BITS32).to(tl.int64), BLOCK)
    tl.atomic_add(found + row * 2, tl.sum(first, 0), sem="relaxed")
    tl.atomic_add(found + row * 2 + 1, tl.sum(second, 0), sem="relaxed")


@tile
def sparse_above(
    x,
    residual,
    peaks,
    threshold,
    found,
    n,
    parts,
    FORM: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """The sum, in units of 2^-24, and the count of the finite sizes that are not below
    ``threshold``, float32 ``[rows]``: int64 ``[rows, 2]``, zeros before."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    start = row_start(row, n, ONE_ROW)
    peak = tl.load(peaks + row)
    bound = tl.load(threshold + row)
    infinite = least_pattern(tl.full((), INFINITY, tl.int32), FORM)
    total = tl.zeros((BLOCK // 8,), tl.int64)
    count = tl.zeros((BLOCK // 8,), tl.int32)
    for ahead in range(TILES):
        block = part * TILES + ahead
        at = block * BLOCK + tl.arange(0, BLOCK)
        wanted = load_target(x, residual, start, at, n, (block + 1) * BLOCK <= n, FORM)
        size = tl.abs(size_of(wanted, peak, FORM))
        kept = (size >= bound) & (pattern_of(wanted) < infinite) & (at < n)
        total += by_eight(tl.where(kept, (size * BITS24).to(tl.int32), 0), BLOCK).to(tl.int64)
        count += by_eight(kept.to(tl.int32), BLOCK)
    tl.atomic_add(found + row * 2, tl.sum(total, 0), sem="relaxed")
    tl.atomic_add(found + row * 2 + 1, tl.sum(count, 0).to(tl.int64), sem="relaxed")
