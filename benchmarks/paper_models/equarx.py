"""EQuARX: a quantised all_reduce on a ring of TPUs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from commpass.costmodel import Kernels, Link, Profile
from commpass.costmodel.cards import Card
from commpass.costmodel.interconnects import NETWORK
from commpass.passes.breakeven import break_even
from commpass.passes.divide import CHUNKS

from .sites import fused, gain, site

V5E = Card(819.0, 197.0, "Google Cloud TPU v5e documentation: a chip")
PORT_GB_S = 50.0
"""One direction of a port: 1,600 Gbit/s per chip, four ports (Google Cloud TPU v5e
documentation)."""
HOP_US = 1.0
"""A hop between neighbours: what is publicly known of this interconnect. An assumption."""


def ring_link(alpha_us: float = HOP_US) -> Link:
    """Return a ring that sends both ways at once (EQuARX, section III.C), as a link of twice the
    rate."""
    return Link(alpha_us, 2 * PORT_GB_S * NETWORK.reached)


def kernels(launch_us: float = 0.0) -> Kernels:
    """Return quantising kernels that are part of the collective's program: they need no launch."""
    made = fused(V5E, "equarx")
    return Kernels(launch_us=launch_us, other=made.other)


def best_gain(mib: float, ranks: int, link: Link, how: Kernels) -> float:
    """Return how many times faster an all_reduce of some MiB of bf16 is by a full loop, with the
    best number of micro-shards."""
    of = site("all_reduce", int(mib * (1 << 19)), ranks)
    return max(gain(of, f"ring(chunks={many})", "equarx", link, how) for many in CHUNKS)


def crossover_mib(ranks: int, link: Link, how: Kernels) -> float:
    """Return the MiB from which on some number of micro-shards gains more than a tenth."""
    of, profile = site("all_reduce", 1 << 20, ranks), Profile("ring", link, kernels=how)
    found = (break_even(of, "ring", "equarx", profile, chunks=many) for many in CHUNKS)
    return min((inf if each is None else each for each in found), default=inf) / (1 << 20)


def fit_launch_us(ranks: int, link: Link, mib: float, among: Sequence[float]) -> float:
    """Return the launch time per pipeline step, among some, whose crossover is nearest to
    ``mib``."""
    return min(among, key=lambda us: abs(crossover_mib(ranks, link, kernels(us)) - mib))
