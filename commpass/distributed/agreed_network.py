"""The network between hosts, if no profile is given: the slowest one that any rank has read.
Also the processors of the ranks.

Each rank publishes what it has read with its hello record. A rank that needs a profile waits until
all ranks have published, for a limited time. All ranks use the same result (``first_value``), so
they plan alike.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import torch.distributed as dist
from torch import fx

from commpass.costmodel import Profile, default_profile
from commpass.costmodel.cards import CARDS, card_of
from commpass.costmodel.networks import (
    ASSUMED_GBIT_PER_S,
    Ports,
    cpu_profile,
    gpu_profile,
    is_assumed_faster,
    on_processors,
)
from commpass.distributed.first_value import first_value
from commpass.distributed.hosts import is_distributed, on_each_host
from commpass.distributed.interfaces import Interface
from commpass.distributed.machine import (
    ASSUMED,
    STATED,
    card_here,
    default_here,
    ranks_on_each_host,
)
from commpass.distributed.network import NetworkOfRank, network_here
from commpass.distributed.plan_store import PlanStore, current_store
from commpass.distributed.processors import WHOLE, Capacity, capacity_of
from commpass.errors import Unanswered
from commpass.groups import is_first_rank
from commpass.passes.fx.parse import graph_modules, is_collective

log = logging.getLogger("commpass")

PATIENCE_S = 30.0
"""How long a rank waits for what other ranks have read."""
ONE_HOST = "all ranks are on one host"


@dataclass(frozen=True)
class Slowest:
    """The slowest interface that a rank has read, and its ``source`` in words.

    ``mbit_per_s`` is 0 if no rank could read any. ``unknown`` says which ranks could not, and why;
    it is "" if all could.
    """

    kind: str = ""
    mbit_per_s: int = 0
    ports: int = 1
    source: str = ""
    unknown: str = ""


@dataclass(frozen=True)
class AgreedNetwork:
    """What all ranks use: the hosts, the slowest interfaces of gloo and of NCCL, the name of the
    slowest GPU ("" if no rank has published one), and the processors that every rank can count
    on.

    ``ranks_per_host`` is 0 if it is unknown, or differs between hosts. ``is_complete`` says whether
    all ranks have published theirs.
    """

    is_complete: bool = False
    has_several_hosts: bool = False
    ranks_per_host: int = 0
    gloo: Slowest = Slowest()
    nccl: Slowest = Slowest()
    card: str = ""
    capacity: Capacity = WHOLE


def agreed_default(
    device: str, gm: fx.GraphModule | None = None, timeout_s: float | None = None
) -> Profile:
    """Return the default profile for a type of device, equal on all ranks.

    Wait at most ``timeout_s`` seconds for what other ranks have read, and not at all for a graph
    ``gm`` without collectives.
    """
    network = agreed_network(gm, timeout_s)
    if network is None:
        return default_here(device)
    return profile_over(network, device, _card(network, device))


def _card(network: AgreedNetwork, device: str) -> str:
    """Return the name of the GPU by which all ranks plan, also if they have different ones."""
    own = card_here(device)
    return network.card or own if device == "cuda" else own


def default_between_hosts(device: str) -> Profile:
    """Return the default profile of ranks on several hosts like this one, one on each."""
    here = network_here("this one", "cpu:gloo,cuda:nccl")
    another = dataclasses.replace(here, host="another", processors=None)  # it shares none
    network = network_of({0: here, 1: another}, 2, 0)
    return profile_over(network, device, card_here(device))


def agreed_network(
    gm: fx.GraphModule | None = None, timeout_s: float | None = None
) -> AgreedNetwork | None:
    """Return the network that all ranks use; None without other ranks, or if it is not needed."""
    if not is_distributed():
        return None
    try:
        store = current_store()
        if is_new := store.network is None and (gm is None or has_collective(gm)):
            store.network = _agree(store, min(timeout_s or PATIENCE_S, PATIENCE_S))
    except Unanswered:
        raise
    except RuntimeError as error:  # the store is gone: the comparison of plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return None
    network = None if store.network is None else _decoded(store.network)
    if is_new and network is not None and is_first_rank():
        _log(network)
    return network


def _agree(store: PlanStore, patience_s: float) -> str:
    world_size, started = dist.get_world_size(), ranks_on_each_host()

    def value(found: Mapping[int, NetworkOfRank]) -> str:
        return _encoded(network_of(found, world_size, started))

    return first_value(
        store,
        "network",
        store.networks,
        value,
        without_rank_0=_encoded(network_of({}, world_size, 0)),
        patience_s=patience_s,
        silent=SILENT,
    )


def network_of(found: Mapping[int, NetworkOfRank], world_size: int, started: int) -> AgreedNetwork:
    """Return the network of ``world_size`` ranks, from what those have read that have published it.

    ``started`` is the number of ranks on each of several hosts by torchrun, which counts if a rank
    is missing.
    """
    hosts = [found[rank].host for rank in sorted(found)]
    is_complete = len(found) == world_size
    several = len(set(hosts)) > 1 or (not is_complete and started > 0)
    each = on_each_host(hosts) if is_complete else started
    return AgreedNetwork(
        is_complete,
        several,
        each if several else 0,
        _slowest({rank: one.gloo for rank, one in found.items()}, world_size),
        _slowest({rank: one.nccl for rank, one in found.items()}, world_size),
        _slowest_card({one.card for one in found.values() if one.card}),
        capacity_of([one.processors for one in found.values() if one.processors]),
    )


def _slowest_card(names: Iterable[str]) -> str:
    """Return the GPU that is assumed to be the slowest: an unknown one, else that with the least
    bandwidth of memory."""

    def bandwidth(name: str) -> tuple[float, str]:
        card = card_of(name)
        return (CARDS[card].gbytes_per_s if card else 0.0, name)

    return min(names, key=bandwidth, default="")


def _slowest(found: Mapping[int, Interface], world_size: int) -> Slowest:
    read = {rank: one for rank, one in sorted(found.items()) if not one.reason}
    reasons = {rank: one.reason for rank, one in sorted(found.items()) if one.reason}
    unknown = next((f"rank {rank}: {reason}" for rank, reason in reasons.items()), "")
    if len(reasons) == world_size and len(set(reasons.values())) == 1:
        unknown = reasons[0]
    if len(found) < world_size:
        unknown = f"{world_size - len(found)} of {world_size} ranks did not publish theirs"
    if not read:
        return Slowest(unknown=unknown)
    rank, slowest = min(read.items(), key=lambda item: item[1].mbit_per_s * item[1].ports)
    rates = {(each.mbit_per_s, each.ports) for each in read.values()}
    is_everywhere = not unknown and set(read.values()) == {slowest}
    source = f"read from {slowest.name}" + ("" if is_everywhere else f" of rank {rank}")
    source += ", the slowest" if len(rates) > 1 else ""
    return Slowest(slowest.kind, slowest.mbit_per_s, slowest.ports, source, unknown)


@functools.cache
def profile_over(network: AgreedNetwork, device: str, card: str) -> Profile:
    """Return the profile for a network, a type of device, and the name of the GPU.

    A rank that could not read its own network counts as one with the default one.
    """
    found = _profile_over(network, device, card)
    if device != "cpu":
        return found
    return on_processors(found, network.capacity.cores, network.capacity.speed)


def _profile_over(network: AgreedNetwork, device: str, card: str) -> Profile:
    each = network.ranks_per_host
    slowest = {"cpu": network.gloo, "cuda": network.nccl}.get(device, Slowest())
    gbit_per_s = slowest.mbit_per_s / 1000 if network.has_several_hosts else 0.0
    if gbit_per_s and device == "cpu":
        if not slowest.unknown or gbit_per_s < ASSUMED_GBIT_PER_S:
            return cpu_profile(gbit_per_s, each, slowest.source)
    elif gbit_per_s and each:
        ports = Ports(slowest.kind, gbit_per_s, slowest.ports)
        if not slowest.unknown or is_assumed_faster(card, ports, each):
            return gpu_profile(card, ports, each, slowest.source)
    is_one_host = network.is_complete and not network.has_several_hosts
    why = ONE_HOST if is_one_host else slowest.unknown
    source = f"{STATED if card_of(card) else ASSUMED}: {why or DIFFERENT}"
    return dataclasses.replace(default_profile(device, card, each), source=source)


DIFFERENT = "hosts have different numbers of ranks"


def has_collective(gm: fx.GraphModule) -> bool:
    """Return whether a graph has a collective."""
    modules = graph_modules(gm)
    return any(is_collective(node) for _, module in modules for node in module.graph.nodes)


def _log(network: AgreedNetwork) -> None:
    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    found = profile_over(network, device, _card(network, device))
    log.info("profile %s. Measure with `commpass probe`", found.description)


def _encoded(network: AgreedNetwork) -> str:
    return msgspec.json.encode(network).decode()


@functools.cache
def _decoded(text: str) -> AgreedNetwork:
    return msgspec.json.decode(text, type=AgreedNetwork)


SILENT = (
    "%d ranks did not publish their network within %g s: they count as ranks with the default one."
    " Give a profile, or create the backend on all ranks after init_process_group"
)
