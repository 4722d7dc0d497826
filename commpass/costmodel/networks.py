"""Profiles of hosts whose network was read from the system, not measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from commpass.costmodel.cards import GPU, card_of
from commpass.costmodel.interconnects import NETWORK, Stated
from commpass.costmodel.links import Link
from commpass.costmodel.profile import DEFAULT_CPU, NVLINK, Profile, default_profile, ethernet

ASSUMED_GBIT_PER_S = DEFAULT_CPU.link.gbytes_per_s * 8


@dataclass(frozen=True)
class Ports:
    """The network ports of a host: their kind (ethernet, infiniband, roce), the stated rate of one
    in Gbit/s, and their number."""

    kind: str
    gbit_per_s: float
    number: int = 1

    @property
    def link(self) -> Link:
        """One port as NCCL uses it: as InfiniBand, which is an assumption for other kinds."""
        return Stated(self.gbit_per_s / 8, "read from the system").link(NETWORK)


def cpu_profile(gbit_per_s: float, ranks_per_host: int, source: str) -> Profile:
    """Return the profile of CPU hosts with one port of this rate each.

    With several ``ranks_per_host`` (0: unknown or different), these share the port. Between them is
    the default link.
    """
    found = dataclasses.replace(ethernet(gbit_per_s), source=source)
    if ranks_per_host < 2:
        return found
    return dataclasses.replace(
        found, ranks_per_host=ranks_per_host, intra_host_link=DEFAULT_CPU.link, ports=1
    )


def on_processors(profile: Profile, cores: float, speed: float) -> Profile:
    """Return the profile of ranks with ``cores`` processor cores each, as its source then says.

    A core is ``speed`` times as fast as that of ``costmodel.kernels.CPU``.
    """
    if cores >= 1 and speed == 1:
        return profile
    made, source = profile.on_cores(cores).with_speed(speed), profile.source
    if speed != 1:
        source += f"; processors {speed:.2g} times as fast as slow ones"
    if cores < 1:
        source += f"; ranks share processors, {cores:.2g} cores each"
    return dataclasses.replace(made, source=source)


def gpu_profile(card: str, ports: Ports, ranks_per_host: int, source: str) -> Profile:
    """Return the profile of hosts with GPUs of this name, joined by these ports.

    ``ranks_per_host`` is at least 1. Ranks share the ports if there are fewer of them.
    """
    base = default_profile("cuda", card, ranks_per_host)
    intra_host_link = base.intra_host_link or NVLINK.link
    ranks = max(base.ranks_per_host, ranks_per_host)  # more if GPUs of several hosts are joined
    number = ports.number * max(ranks // ranks_per_host, 1)
    return Profile(
        f"{card_of(card) or NVLINK.name} over {ports.kind}-{ports.gbit_per_s:g}g",
        ports.link,
        kernels=base.kernels if card_of(card) else GPU,
        ranks_per_host=ranks,
        intra_host_link=intra_host_link,
        ports=number if number < ranks else 0,
        source=source,
    )


def is_assumed_faster(card: str, ports: Ports, ranks_per_host: int) -> bool:
    """Return whether the default for a GPU between hosts is faster than these ports."""
    assumed = default_profile("cuda", card, ranks_per_host).link
    return assumed.gbytes_per_s > ports.link.gbytes_per_s
