"""Predict how close a kernel comes to the bandwidth of a copy, from its instructions.

The time of each resource is what a program needs of it, divided by the GPU's throughput. Bytes are
divided by the memory bandwidth, matmuls by the rate of the tensor cores. Instructions take the
clocks in which schedulers issue and pipes finish them. The largest of these times is the minimum
time of a program when many of them run. A copy of the same bytes takes only the memory time, at the
bandwidth of the data sheet. No kernel can be faster than predicted. It may be slower: caches, bank
conflicts, dependent instructions and the last programs of a grid are not modeled.

The time ``latency`` is the bound of queueing theory if so few programs run at a time that they
cannot keep any resource busy. Each occupies its processor for at least one load from memory and its
own instructions.

The *low* share is a second limit, for the case that programs wait together. Queueing theory bounds
the time of a program by its use of the limiting resource, plus the rest of its time alone, divided
by the programs that run at a time. The time alone includes all waits of one warp for its own
results (``one_warp.py``). Between both limits the order of the programs decides.
"""

from __future__ import annotations

import math
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
"""The pipes that an instruction of each kind occupies. For other kinds only the issue slot is
counted, or the bytes (ACCESSES), or the operations (tensor)."""

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
"""Kinds that use the load and store unit, at one line of 128 bytes per clock."""


@dataclass(frozen=True)
class Prediction:
    """The predicted time of one program on a GPU.

    ``ns`` is the time in nanoseconds by each limit of the whole GPU, ``limit`` the binding one.
    ``share`` is the share of a copy's bandwidth: the memory time over the longest time. For a
    matmul it is the share of the tensor cores' peak. ``low`` is that share if programs wait
    together, and ``waits`` the time in nanoseconds that they add to the longest one; None if that
    is not predicted.
    """

    card: str
    ns: Mapping[str, float]
    limit: str
    share: float
    waits: float | None = None

    @property
    def low(self) -> float | None:
        if self.waits is None:
            return None
        return self.share / (1.0 + self.waits / self.ns[self.limit])


def predict(
    counts: Counts,
    warps: int,
    programs: int,
    moved: float,
    card: Card,
    flops: float = 0.0,
    *,
    of: str = MEMORY,
    stays: bool = False,
    warp_clocks: float | None = None,
) -> Prediction:
    """Predict the time of programs of ``warps`` warps, ``programs`` of them at a time on a
    multiprocessor, each of which reads and writes ``moved`` bytes of memory.

    ``flops`` are the floating point operations of a program's matmuls, whose operands have 16 bits.
    ``of`` is the limit that the share refers to. With ``stays``, programs prefetch data and never
    wait for loads; the arguments are then for one tile of a program that processes many.
    ``warp_clocks`` is the number of clocks of a warp that runs alone.
    """
    arch = ARCHITECTURES[card.arch]
    clocks = needs(counts, warps, arch, flops)
    if not stays or not programs:
        least = max([*clocks.values(), counts.total])
        clocks["latency"] = (arch.latency + least) / programs if programs else math.inf
    ns = {MEMORY: moved / card.gb_s}
    ns |= {name: each / card.ghz / card.units for name, each in clocks.items()}
    limit = max(ns, key=lambda name: ns[name])
    share = ns.get(of, 0.0) / ns[limit] if ns[limit] else 1.0
    waits = None
    if warp_clocks is not None and programs:
        busy = clocks.get(limit, 0.0) * arch.quarters / min(warps, arch.quarters)
        waits = max(0.0, warp_clocks - busy) / programs / card.ghz / card.units
    return Prediction(card.name, ns, limit, share, waits)


def exposed(counts: Counts, warps: int, arch: Architecture, flops: float) -> float:
    """Return the time of a tile of a matmul relative to its products alone, at the peak of the
    tensor cores, if nothing else overlaps with them. ``counts`` are the instructions of the rest
    of the tile. Its latencies are not counted."""
    return 1.0 + max(needs(counts, warps, arch).values()) * arch.tensor / flops


def needs(counts: Counts, warps: int, arch: Architecture, flops: float = 0.0) -> dict[str, float]:
    """Return the clocks of one multiprocessor that a program takes, for its schedulers and for each
    pipe."""
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
    clocks["tensor"] = flops / arch.tensor if flops else 0.0
    return {name: each for name, each in clocks.items() if each}
