"""Hosts of published measurements that are no named machines."""

from __future__ import annotations

import dataclasses
from functools import cache

from commpass.costmodel import Profile
from commpass.costmodel.cards import CARDS
from commpass.costmodel.profile import link_named


@cache
def sm120_with_uplinks() -> Profile:
    """Return the host of b12x: 8 cards on PCIe 5, four on a switch with one uplink. Its authors
    state 54.6 GB/s for each hop of a ring."""
    link = dataclasses.replace(
        link_named("pcie-5"), gbytes_per_s=54.6, island=4, bridge_gbytes_per_s=54.6
    )
    card = CARDS["rtx-pro-6000"]
    return Profile("8 SM120 cards", link, kernels=card.kernels.in_graph)


@cache
def h800() -> Profile:
    """Return hosts of 8 H800, which have 8 of the 18 NVLinks of an H100, and 8 InfiniBand links."""
    inside = link_named("nvlink-4").scaled(8 / 18)
    return Profile(
        "8 H800 a host",
        link_named("infiniband-ndr"),
        kernels=CARDS["h100"].kernels,
        ranks_per_host=8,
        intra_host_link=inside,
        ports=8,
    )
