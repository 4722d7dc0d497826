"""An exchange as one kernel: its sizes, its memory, and whether there is a kernel for it.

Program p of a wire processes the same blocks on every rank, and waits only for the programs whose
results it reads. All exchanges of a group use one memory in turn. See docs/exchange.md for its
layout, and for why nothing is overwritten before it has been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from commpass.codecs import VALUES, Codec, Domain
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.packing import widths
from commpass.codecs.rows import ALIGNMENT, aligned
from commpass.collectives.steps import shard_length
from commpass.lowering.chain import Cast, Chain, Decode, Encode, Enter, Leave, Sum
from commpass.lowering.gpu import supported
from commpass.lowering.gpu.tiles.exchange import SLOTS

ALGORITHMS = {
    "all_reduce": ("one_shot", "two_shot"),
    "all_gather": ("direct",),
    "reduce_scatter": ("direct",),
}
"""The algorithms of which there are kernels, by the kind of the collective."""
OPS = ("sum", "avg")
PER_THREAD = 16
"""Values of a tile per thread, unless a block is larger. It is small, since a small tensor has few
values per program; with half of it, rotations on AMD spill."""
MIXED = 2048
"""Values of a tile if codes that share a byte are rotated over more than WIDE values. In smaller
tiles the values are held several times, and spill."""
WIDE = 32
REGISTERS = 224
"""The most registers of a thread of a two-shot of MIXED values, on NVIDIA."""
WARPS = 1
"""Warps of a program; with several, a rotation goes through shared memory, and spills."""
RESIDENT = 4
"""Programs that a processor can always run at once, for any number of registers. NVIDIA: each has
32 threads with at most 255 of 65,536 registers. AMD: four units with their own registers."""
BUFFERS = 2
"""Buffers for the wires of a call, used by calls in turn (docs/exchange.md)."""
PHASES = 2
"""The most signals per call from one program to another."""
SMALLEST = 1 << 16
"""Bytes of the smallest buffer that is allocated."""
MOST = 2**31
"""Values, and bytes of memory, from which on kernels cannot count them."""
MOST_PROGRAMS = 4096
"""Programs of a rank that no GPU runs at once: memory that exchanges share has room for fewer."""
OLDEST = (7, 0)
"""The first compute capability of NVIDIA with release and acquire."""


@dataclass(frozen=True)
class Exchange:
    """One collective: each of ``ranks`` ranks hands in ``numel`` values of ``dtype``, which
    ``programs`` programs for each wire process. ``lanes`` is the number of lanes of a warp."""

    algorithm: str
    codec: Codec
    dtype: torch.dtype
    numel: int
    ranks: int
    op: str = "sum"
    programs: int = 1
    lanes: int = 32
    kind: str = "all_reduce"

    def __hash__(self) -> int:
        # Without the codec, whose hash takes longer than a launch: each call looks one up.
        return hash((self.kind, self.algorithm, self.numel, self.ranks, self.programs, self.op))

    @property
    def name(self) -> str:
        """The name of its kernel: the algorithm of an all_reduce, or the kind."""
        return self.algorithm if self.kind == "all_reduce" else self.kind

    @property
    def rows(self) -> int:
        """The wires that a rank encodes: one for all ranks, or one for each rank."""
        return self.ranks if self.name in ("two_shot", "reduce_scatter") else 1

    @property
    def count(self) -> int:
        """The values of the tensor that a kernel bounds its accesses by: all that a rank hands in,
        or for a reduce_scatter those of one shard."""
        return self.numel // (self.ranks if self.kind == "reduce_scatter" else 1)

    @property
    def values(self) -> int:
        """Values that a kernel numbers: those of all wires that a rank encodes, or stores."""
        return self.length * (self.ranks if self.kind == "all_gather" else self.rows)

    @property
    def all_programs(self) -> int:
        """The programs of a rank, all of which the GPU must run at once."""
        return self.programs * self.rows

    @property
    def length(self) -> int:
        """Values of a wire: an even share of all, padded with zeros to whole blocks. An all_gather
        does not pad."""
        if self.kind == "all_gather":
            return self.numel
        return shard_length(self.numel, self.rows, self.codec.block)

    @property
    def wire_bytes(self) -> int:
        return self.block_codec.wire_bytes(self.length, torch.float32)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the wires that a rank writes in a call."""
        return (self.rows + self.phases - 1) * self.wire_bytes

    @property
    def phases(self) -> int:
        """Signals per call from one program to another."""
        return 2 if self.name == "two_shot" else 1

    @property
    def tiles(self) -> int:
        """Tiles of a wire; the programs share them round-robin."""
        blocks = self.block_codec.layout.blocks(self.length)
        return (blocks + self.blocks - 1) // self.blocks

    @property
    def blocks(self) -> int:
        """Blocks per tile."""
        size = self.block_codec.layout.size(self.length)
        return max(1, (MIXED if self.is_mixed else PER_THREAD * self.lanes * WARPS) // size)

    @property
    def is_mixed(self) -> bool:
        """Whether codes that share a byte are rotated over more than WIDE values."""
        codec = self.codec
        assert isinstance(codec, BlockCodec)
        return codec.transform.sums > WIDE and values_in_a_byte(codec) > 1

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler. Without the number of registers, NVIDIA's assembler may spill
        what a two-shot keeps across its phases, so that more programs fit than ever run at once."""
        long = self.is_mixed and self.phases > 1 and self.lanes == 32
        return {"maxnreg": REGISTERS} if long else {}

    @property
    def domain(self) -> Domain:
        """The domain in which values are sent: that of the codec if they are summed."""
        return VALUES if self.kind == "all_gather" else self.codec.domain

    @property
    def block_codec(self) -> BlockCodec:
        """The codec of the wire, for values that are already in the domain."""
        inner = self.codec if self.kind == "all_gather" else self.codec.domain_codec
        assert isinstance(inner, BlockCodec)
        return inner


def values_in_a_byte(codec: BlockCodec) -> int:
    """Return how many values share a byte, for the widest part of their codes."""
    return int(8 // widths(codec.grid.bits)[0])


@dataclass(frozen=True)
class Capacity:
    """What a memory has room for: calls of up to ``programs`` programs of a rank, which write up to
    ``buffer_bytes`` bytes."""

    programs: int
    buffer_bytes: int

    def holds(self, other: Capacity) -> bool:
        return self.programs >= other.programs and self.buffer_bytes >= other.buffer_bytes


@dataclass(frozen=True)
class Memory:
    """Offsets in the memory of a rank, in bytes. All memory is zero before the first call.

    - signals ``[PHASES, programs, SLOTS]``
    - the number of the last call, once for each program
    - the ranks that did not arrive
    - the buffers ``[BUFFERS, buffer_bytes]``. Each has the wires of a call ``[rows]``, and after
      them the wire of the sum of a two-shot
    """

    signals: int
    counters: int
    late: int
    wires: int
    total: int


def memory_of(capacity: Capacity) -> Memory:
    counters = PHASES * capacity.programs * SLOTS * 4
    late = counters + aligned(capacity.programs * 4)
    wires = late + ALIGNMENT
    return Memory(0, counters, late, wires, wires + BUFFERS * capacity.buffer_bytes)


def capacity_for(exchanges: Sequence[Exchange], programs: int = 1) -> Capacity:
    """Return what a memory needs for each of some exchanges, with at least so many programs."""
    return Capacity(
        max(programs, *(each.all_programs for each in exchanges)),
        max(each.buffer_bytes for each in exchanges),
    )


def rounded_up(capacity: Capacity) -> Capacity:
    """Return the capacity that is allocated where ``capacity`` is needed: the next power of two of
    bytes, or as much as kernels can address."""
    power = 1 << (capacity.buffer_bytes - 1).bit_length()
    larger = replace(capacity, buffer_bytes=max(SMALLEST, power))
    return larger if memory_of(larger).total < MOST else capacity


# --- supported exchanges --------------------------------------------------------------------------


def unsupported_reason(
    exchange: Exchange, *, processors: int | None = None, card: tuple[int, int] | None = None
) -> str:
    """Return why no kernel can run an exchange, or "" if one can.

    ``processors`` is the number of SMs or CUs of the GPU, and ``card`` its NVIDIA compute
    capability, if known.
    """
    if (algorithms := ALGORITHMS.get(exchange.kind)) is None:
        return f"{exchange.kind}: there are kernels for {', '.join(ALGORITHMS)}"
    if exchange.algorithm not in algorithms:
        return f"{exchange.algorithm}: kernels exchange by {' or '.join(algorithms)}"
    if exchange.op not in OPS:
        return f"{exchange.op} of values: kernels make {' or '.join(OPS)}"
    if exchange.ranks > SLOTS:
        return f"{exchange.ranks} ranks: a line of signals holds {SLOTS}"
    if card is not None and card < OLDEST:
        return f"sm_{card[0]}{card[1]}: it does not release and acquire; sm_70 is the first to"
    if not isinstance(exchange.codec, BlockCodec):
        return f"{exchange.codec.spec}: no block codec"
    length = exchange.length
    chains = _chains(exchange)
    if supported.needs_row_peaks(chains[0]):
        return f"{exchange.codec.spec}: no program has the largest value of a whole row"
    for chain in chains:
        if why := supported.unsupported_reason(chain, max(length, 1)):
            return why
    for what, many in (
        ("values", exchange.values),
        ("bytes of memory", memory_of(capacity_for([exchange], MOST_PROGRAMS)).total),
    ):
        if many >= MOST:
            return f"{many:,} {what}: kernels count to 2^31"
    if processors is not None and exchange.all_programs > processors * RESIDENT:
        return (
            f"{exchange.all_programs} programs on {processors} processors, which are sure to run"
            f" {RESIDENT} each: all programs must run at once, since they wait for each other"
        )
    return ""


def _chains(exchange: Exchange) -> list[Chain]:
    """The chains that a kernel runs before it signals and after it has waited."""
    domain, inner = exchange.domain, exchange.block_codec
    encoded = Chain(exchange.dtype, (Enter(domain), Encode(inner)))
    decoded = Decode(inner, exchange.dtype)
    if exchange.kind == "all_gather":
        return [encoded, Chain(torch.uint8, (decoded, Cast(exchange.dtype)))]
    leaves = (Leave(domain), Cast(exchange.dtype))
    sums = [Chain(torch.uint8, (decoded, Sum(exchange.ranks), *leaves))]
    if exchange.phases > 1:
        sums.append(Chain(torch.uint8, (decoded, Sum(exchange.ranks), Encode(inner))))
    return [encoded, *sums]
