"""Signals between ranks: access the memory of peers, signal that data is written, and wait for the
signals of others.

``peers`` are the addresses, int64 ``[ranks]``, at which this rank accesses every rank's memory,
including its own. A signal is an int32 that only one program of one rank writes: the number of the
call, which only grows, and wraps around. So signals are never reset. A rank may be one call ahead:
there are two numbers that a waiting program accepts. Any other is an older one, also of a slot that
no call has used while numbers went round half way.
"""

from __future__ import annotations

import triton.language as tl

from commpass.lowering.gpu.source import tile

SLOTS = 32
"""Signals in one line of 128 bytes, one from each rank; the most ranks."""


@tile
def memory_of(peers, rank):
    """The memory of a rank."""
    memory = tl.load(peers + rank).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(memory, 128)


@tile
def number_at(memory, at):
    """An int32 in the memory of a rank."""
    return (memory + at).to(tl.pointer_type(tl.int32))


@tile
def signal(peers, at, rank, epoch, RANKS: tl.constexpr, WIDTH: tl.constexpr, STORES: tl.constexpr):
    """Tells every rank, also this one, that this program has written and read all of call ``epoch``
    up to here. ``at`` is where the program's signals lie.

    The barrier puts all threads' accesses before the signal, which releases them to all that the
    system holds. WIDTH is a power of two, RANKS at least. ``STORES``: on NVIDIA, one thread for
    each rank stores, since peers on PCIe may lack atomic operations.
    """
    if STORES:
        place = (at + rank * 4).to(tl.int64)
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "{.reg .pred mine; .reg .b32 thread; .reg .b64 slot;"
            f"mov.u32 thread, %tid.x; setp.lt.u32 mine, thread, {RANKS};"
            "mul.wide.u32 slot, thread, 8; add.u64 slot, slot, $1;"
            "@mine ld.global.b64 slot, [slot]; add.u64 slot, slot, $2;"
            "@mine st.release.sys.global.b32 [slot], $3; mov.b32 $0, 0;}",
            "=r,l,l,r",
            [peers.to(tl.int64), place, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        lane = tl.arange(0, WIDTH)
        there = lane < RANKS
        memory = tl.load(peers + lane, mask=there, other=0)
        slots = (memory + (at + rank * 4)).to(tl.pointer_type(tl.int32))
        numbers = tl.zeros((WIDTH,), tl.int32) + epoch
        tl.debug_barrier()
        tl.atomic_xchg(slots, numbers, mask=there, sem="release", scope="sys")


@tile
def wait(memory, at, epoch, RANKS: tl.constexpr, WIDTH: tl.constexpr, SPINS: tl.constexpr):
    """Waits for the signals of all ranks: 0, or after SPINS looks a bit for each that is missing.

    A look adds nothing to the signal: an exchange that acquires what was released before it.
    """
    lane = tl.arange(0, WIDTH)
    there = lane < RANKS
    slots = number_at(memory, at) + lane
    nothing = tl.zeros((WIDTH,), tl.int32)
    missing = tl.sum(nothing, axis=0) + 1
    spins = 0
    while (missing != 0) & (spins < SPINS):
        seen = tl.atomic_add(slots, nothing, mask=there, sem="acquire", scope="sys")
        ahead = seen - epoch
        absent = there & ((ahead < 0) | (ahead > 1))
        missing = tl.sum(tl.where(absent, 1 << lane, 0), axis=0)
        spins += 1
    tl.debug_barrier()
    return missing


@tile
def count_call(memory, counters_at, own, programs, slots, epoch):
    """Stores the number of the call for this program, and for all later programs of which it is the
    number modulo ``programs``: the next call may have up to ``slots`` programs."""
    steps = tl.arange(0, 32) * programs
    numbers = tl.zeros((32,), tl.int32) + epoch
    for first in range(own, slots, 32 * programs):
        each = first + steps
        tl.store(number_at(memory, counters_at) + each, numbers, mask=each < slots)


@tile
def bytes_of_both(a, b, STORES: tl.constexpr):
    """Bytes that need both loads, on NVIDIA."""
    if STORES:
        a = tl.inline_asm_elementwise(
            "or.b32 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint8, is_pure=True, pack=4
        )
    return a


@tile
def after_all(codes, others, peers, STORES: tl.constexpr):
    """``codes``, once ``others`` are loaded too: of these, a bit that no address has is added. A
    compiler does not know that it is zero."""
    if STORES:
        never = (peers.to(tl.int64) >> 63).to(tl.uint8)
        codes = tl.inline_asm_elementwise(
            "{.reg .b32 some; and.b32 some, $2, $3; or.b32 $0, $1, some;}",
            "=r,r,r,r",
            [codes, others, tl.zeros_like(codes) + never],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return codes


@tile
def region(memory, at):
    """What begins at a multiple of 128 bytes."""
    return tl.multiple_of(memory + at, 128)
