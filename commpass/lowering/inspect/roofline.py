"""How near a kernel comes to the bandwidth of a copy, from its instructions alone.

Each thing that a program needs is divided by what a card gives of it: its bytes by the memory's
bandwidth, its instructions by the clocks in which schedulers issue and pipes finish them, its
matmuls by the tensor cores. The largest of these times is the least that programs can take when
many of them run; a copy of the same bytes takes that of the memory alone, at the bandwidth of the
data sheet. No kernel can be faster than this says; it may well be slower (caches, bank conflicts,
dependent instructions, the last programs of a grid are not counted).

The time of ``latency`` is the bound of queueing theory for so few programs at a time that they
cannot keep anything busy: each is on its processor for at least one load from memory and its own
instructions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from commpass.lowering.inspect.architectures import ARCHITECTURES, Architecture, Card
from commpass.lowering.inspect.sass import Counts

MEMORY = "memory"

PIPES: Mapping[str, tuple[str, ...]] = {
    "fp32": ("fma",),
    "fp32 pair": ("fma", "fma"),
    "multiply": ("fma", "multiply"),
    "fp16": ("half",),
    "fp64": ("double",),
    "int": ("alu",),
    "compare": ("alu",),
    "pack": ("alu",),
    "special": ("special",),
    "convert": ("special",),
    "bits": ("special",),
}
"""The pipes that an instruction of a kind takes a place in; of those not here, only its issue slot
is counted, or its bytes (ACCESSES), or its operations (tensor)."""

ACCESSES = (
    "global load",
    "global store",
    "async copy",
    "shared load",
    "shared store",
    "local load",
    "local store",
    "atomic",
    "shuffle",
)
"""Kinds that go through the load and store unit, at one line of 128 bytes a clock."""


@dataclass(frozen=True)
class Prediction:
    """Nanoseconds that one program takes of each limit of a whole card, the limit that binds, and
    the share of a copy's bandwidth that is left: the memory's time over the longest one. Of a
    matmul it is the share of the tensor cores' peak."""

    card: str
    ns: Mapping[str, float]
    limit: str
    share: float


def predicted(
    counts: Counts,
    warps: int,
    programs: int,
    moved: float,
    card: Card,
    flops: float = 0.0,
    *,
    of: str = MEMORY,
    stays: bool = False,
) -> Prediction:
    """What limits programs of ``warps`` warps, ``programs`` of them at a time on a multiprocessor,
    which read and write ``moved`` bytes of memory each.

    ``flops`` are the floating point operations of a program's matmuls; 0: as many as its
    instructions say, which those of sm_100 don't. ``of`` is the limit of which the share is told.
    ``stays``: programs load what they need next meanwhile, so that they wait for no load (what is
    given is then one tile's part of a program that does many)."""
    arch = ARCHITECTURES[card.arch]
    clocks = needs(counts, warps, arch, flops)
    alone = max([*clocks.values(), counts.total])
    if not stays or not programs:
        clocks["latency"] = (arch.latency + alone) / programs if programs else math.inf
    ns = {MEMORY: moved / card.gb_s}
    ns |= {name: each / card.ghz / card.units for name, each in clocks.items()}
    limit = max(ns, key=lambda name: ns[name])
    share = ns.get(of, 0.0) / ns[limit] if ns[limit] else 1.0
    return Prediction(card.name, ns, limit, share)


def needs(counts: Counts, warps: int, arch: Architecture, flops: float = 0.0) -> dict[str, float]:
    """Clocks of one multiprocessor that a program takes of its schedulers and of each pipe."""
    clocks = {"issue": counts.total * warps / arch.quarters}
    for kind, number in counts.kinds().items():
        for pipe in PIPES.get(kind, ()):
            threads = number * warps * arch.warp
            clocks[pipe] = clocks.get(pipe, 0.0) + threads / arch.lanes[pipe]
    lines = sum(
        number * max(1.0, width * arch.warp / arch.line)
        for kind in ACCESSES
        for width, number in counts.widths(kind).items()
    )
    clocks["load and store"] = lines * warps
    clocks["tensor"] = _tensor(counts, warps, arch, flops)
    return {name: each for name, each in clocks.items() if each}


def _tensor(counts: Counts, warps: int, arch: Architecture, flops: float) -> float:
    """Clocks of the tensor cores. Given operations are done as wide as the widest operands are."""
    done = {name: number for name, number in counts.names.items() if operations(name) is not None}
    if flops:
        bits = max(map(operand_bits, done), default=16)
        return flops / arch.tensor[bits]
    return sum(
        number * warps * (operations(name) or 0.0) / arch.tensor[operand_bits(name)]
        for name, number in done.items()
    )


def operations(name: str) -> float | None:
    """Floating point operations of one warp by an instruction of tensor cores; None for any other
    one, 0 where its name does not say (sm_100).

    ``HMMA.16816`` multiplies 16 x 16 by 16 x 8 (rows, columns, depth in this order); four warps
    issue ``HGMMA.64x128x16`` together."""
    if re.match(r"UTC.*MMA", name):
        return 0.0
    if together := re.match(r"[HQIB]GMMA\.(\d+)x(\d+)x(\d+)", name):
        return 2.0 * math.prod(map(int, together.groups())) / 4
    if alone := re.match(r"[HQIBDO]MMA\.(\d+)", name):
        return 2.0 * math.prod(SHAPES.get(alone[1], (0,)))
    return None


SHAPES = {
    "1688": (16, 8, 8),
    "16816": (16, 8, 16),
    "16832": (16, 8, 32),
    "16864": (16, 8, 64),
    "8816": (8, 8, 16),
    "884": (8, 8, 4),
}


def operand_bits(name: str) -> int:
    """Bits of the operands, as ``Architecture.tensor`` has them."""
    if name.startswith("DMMA"):
        return 64
    if "TF32" in name:
        return 32
    return 16 if name.startswith(("HMMA", "HGMMA", "UTCHMMA")) else 8
