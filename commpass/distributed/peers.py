"""The symmetric memory of groups: whether all of their ranks have it, and the part of each site.

Each rank publishes its GPU when one of its graphs first asks for a group, and waits for those of
the others. The first answer counts for all ranks, even one after a time-out: it is written to the
store by compare-and-set. If the GPUs allow it, all ranks then run small exchanges, and compare
whether the sums are right. So all ranks of a group use symmetric memory, or none does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import msgspec
import torch
import torch.distributed as dist

from commpass.distributed.machine import host_id
from commpass.distributed.plan_store import PlanStore, current_store, spans
from commpass.errors import CommpassError
from commpass.groups import group_named
from commpass.lowering.exchange import PeerCard, PeerMemory, common_memory, programs_of
from commpass.passes.single_kernel import exchange_for
from commpass.plan import SINGLE_KERNEL, PlannedSite

log = logging.getLogger("commpass")

PATIENCE_S = 60.0
"""How long a rank waits for the GPUs of others."""
LONGEST_PAUSE_S = 0.25


def peer_memory(group_name: str) -> PeerMemory:
    """Return the symmetric memory of a group. All of its ranks get the same answer.

    The first call for a group waits for the same call on its other ranks.
    """
    group = group_named(group_name)
    if group is None or "fake" in dist.get_backend(group):
        return PeerMemory(unsupported_reason="its ranks are not running")
    ranks = tuple(dist.get_process_group_ranks(group))
    try:
        store = current_store()
        if (known := store.peer_memory.get(ranks)) is not None:
            return known
        found = _agree(store, ranks)
    except RuntimeError as error:  # the store is gone: the comparison of plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return PeerMemory(unsupported_reason="the store of torch.distributed does not answer")
    if not found.unsupported_reason and (why := trial(group, found.lanes)):
        found = PeerMemory(unsupported_reason=why)
    store.peer_memory[ranks] = found
    return found


def _agree(store: PlanStore, ranks: tuple[int, ...]) -> PeerMemory:
    """Publish this rank's GPU, wait for those of the others, and return the common answer.

    A rank that gives up publishes that, and then reads once more. So either a late rank reads it,
    or this rank reads the late one.
    """
    key = f"peers/{spans(ranks)}"
    store.publish(key, msgspec.json.encode(card_here()))
    start, pause, gave_up = time.monotonic(), 0.001, False
    while len(read := store.read_published(key, ranks)) < len(ranks) and not gave_up:
        if time.monotonic() - start > PATIENCE_S:
            gave_up = True
            store.publish(key, msgspec.json.encode(PeerCard(unsupported_reason=GAVE_UP)))
            continue
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    if missing := [rank for rank in ranks if rank not in read]:
        return PeerMemory(unsupported_reason=f"rank {missing[0]} did not publish its GPU in time")
    found = common_memory([msgspec.json.decode(read[rank], type=PeerCard) for rank in ranks])
    text = store.agree_on_first(f"{key}/all", msgspec.json.encode(found).decode(), ranks[0])
    return msgspec.json.decode(text, type=PeerMemory)


GAVE_UP = "it did not wait longer for the GPUs of other ranks"


def card_here() -> PeerCard:
    """Return this rank's GPU: the current one."""
    if not torch.cuda.is_available():
        return PeerCard(unsupported_reason="it has no GPU")
    if find_spec("triton") is None:
        return PeerCard(unsupported_reason="Triton is not installed")
    if not hasattr(torch._C._distributed_c10d, "_SymmetricMemory"):
        return PeerCard(unsupported_reason="this torch has no symmetric memory")
    its = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = (its.major, its.minor) if torch.version.hip is None else None
    return PeerCard(host_id(), str(its.uuid), its.multi_processor_count, its.warp_size, capability)


def trial(group: dist.ProcessGroup, lanes: int) -> str:
    """Return "" if small exchanges are right on all ranks of a group, or on all ranks why one of
    them failed. All of them must call it."""
    from commpass.lowering.gpu import exchange

    return exchange.trial(group, _device(), lanes)


def allocate(sites: Sequence[PlannedSite]) -> None:
    """Create the memory for the sites of a plan that are single kernels: for each group one with
    room for the largest, unless there is one.

    If it is missing, all ranks of the group must call this for the same sites. Raises CommpassError
    on all of them if one cannot create it.
    """
    by_group: dict[str, list[PlannedSite]] = {}
    for site in sites:
        if site.lowering == SINGLE_KERNEL:
            by_group.setdefault(site.group, []).append(site)
    for name, single in by_group.items():
        from commpass.lowering.gpu import exchange

        group = group_named(name)
        assert group is not None
        memory = peer_memory(name)
        found = [exchange_for(site, site, memory) for site in single]
        every = [replace(each, programs=programs_of(each, memory)) for each in found]
        if why := exchange.allocate(every, memory.programs, group, _device()):
            names = ", ".join(site.name for site in single)
            raise CommpassError(
                f"{names}: no memory for single kernels: {why}. Lower the use of memory, or forbid"
                " them with lowering='kernel' in the policy"
            )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
