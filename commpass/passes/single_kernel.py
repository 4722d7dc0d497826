"""A site in a single kernel over symmetric memory: when it is a candidate, and how it is inserted.

The kernel encodes, exchanges, decodes, and sums or stores (docs/exchange.md). Its stages are those
of the algorithm, but they are priced as parts of one kernel in the stream of the computation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.costmodel import Profile, Task, finished_us, overlapped_kernel
from commpass.lowering.exchange import (
    EXCHANGE,
    PeerMemory,
    exchange_of,
    programs_of,
    share_of,
    unsupported_reason,
)
from commpass.passes.fx.parse import describe_group, graph_modules, parse
from commpass.passes.payloads import payload_of, prices_of
from commpass.passes.results import Options
from commpass.plan import SINGLE_KERNEL, Candidate, PlannedSite, Site
from commpass.policy.rules import Allowed

if TYPE_CHECKING:
    from commpass.lowering.gpu.exchange_sizes import Exchange

ALGORITHMS = {
    "all_reduce": ("one_shot", "two_shot"),
    "all_gather": ("direct",),
    "reduce_scatter": ("direct",),
}
"""The algorithms of which a single kernel exists, with their default parameters, by kind."""
MOST_GROUPS = 3
"""The most groups with collectives in a graph with single kernels: ``RESERVED`` processors are room
for the kernels of two others."""
NO_KERNEL = "no single kernel: {}"
PeerMemoryOf = Callable[[str], PeerMemory]
"""Returns the symmetric memory of a group by its name. All ranks of the group get the same."""


def no_peer_memory(group: str) -> PeerMemory:
    """Return that no group has symmetric memory: only ``commpass.backend`` with Inductor creates
    it."""
    return PeerMemory(unsupported_reason="only commpass.backend with Inductor has symmetric memory")


def limit_peer_memory(peer_memory: PeerMemoryOf, gm: fx.GraphModule) -> PeerMemoryOf:
    """Return the symmetric memory of groups as far as a graph leaves room for single kernels.

    Exchanges of each other group may be in flight at once, and programs of single kernels leave
    room for ``MOST_GROUPS - 1`` of them.
    """
    calls = (parse(node) for _, module in graph_modules(gm) for node in module.graph.nodes)
    number = len({describe_group(call)[0] for call in calls if call is not None})
    if number <= MOST_GROUPS:
        return peer_memory
    why = f"exchanges of {number} groups may be in flight at once, at most {MOST_GROUPS} have room"
    return lambda group: PeerMemory(unsupported_reason=why)


def with_single_kernels(
    candidates: Sequence[Candidate],
    site: Site,
    allowed: Allowed,
    memory_of: PeerMemoryOf,
    profile: Profile,
) -> tuple[Candidate, ...]:
    """Return the coded candidates of a site, each followed by its form as a single kernel, or by
    the reason why it has none.

    Nothing is added if the policy names another lowering. If it names this one, other candidates
    are refused as soon as there is one.
    """
    if allowed.lowering not in (None, SINGLE_KERNEL) or not _has_form(site, allowed):
        return tuple(candidates)
    found: list[Candidate] = []
    names = ALGORITHMS.get(site.kind, ())
    for each in candidates:
        found.append(each)
        if each.algorithm in names and each.chunks == 1 and not each.refused:
            found.append(_single_kernel(each, site, memory_of, profile))
    if allowed.lowering is None or not any(map(_is_possible, found)):
        return tuple(found)
    why = f"{allowed.source} names lowering={SINGLE_KERNEL!r}"
    return tuple(
        each if each.lowering == SINGLE_KERNEL or each.refused else _refused(each, why)
        for each in found
    )


def why_no_single_kernel(best: Candidate, options: Options, allowed: Allowed) -> str:
    """Return why a requested single kernel is not the ``best`` candidate, or ""."""
    if allowed.lowering != SINGLE_KERNEL or best.lowering == SINGLE_KERNEL:
        return ""
    refused = (each.refused for each in options.candidates if each.lowering == SINGLE_KERNEL)
    have = ", ".join(f"{kind} by {' or '.join(names)}" for kind, names in ALGORITHMS.items())
    none = NO_KERNEL.format(f"only {have}")
    return next(refused, none)


def _has_form(site: Site, allowed: Allowed) -> bool:
    """Whether to consider a single kernel for a site: if its kind has some, on a GPU, or on
    request."""
    return allowed.lowering == SINGLE_KERNEL or (
        site.kind in ALGORITHMS and torch.device(site.device).type == "cuda"
    )


def _is_possible(candidate: Candidate) -> bool:
    return candidate.lowering == SINGLE_KERNEL and not candidate.refused


def _single_kernel(
    candidate: Candidate, site: Site, memory_of: PeerMemoryOf, profile: Profile
) -> Candidate:
    """Return a candidate as a single kernel, or refused."""
    named = dataclasses.replace(candidate, lowering=SINGLE_KERNEL)
    if why := _unsupported_reason(site, candidate):
        return _refused(named, NO_KERNEL.format(why))
    memory = memory_of(site.group)
    if memory.unsupported_reason:
        return _refused(named, NO_KERNEL.format(memory.unsupported_reason))
    exchange = exchange_for(candidate, site, memory)
    if why := unsupported_reason(exchange, memory):
        return _refused(named, NO_KERNEL.format(why))
    rounds = math.ceil(exchange.tiles / programs_of(exchange, memory))
    stages = tuple(dataclasses.replace(each, rounds=rounds) for each in candidate.stages)
    us = finished_us([prices_of(site, profile).task(stage) for stage in stages])
    return dataclasses.replace(named, stages=stages, predicted_us=round(us, 3))


def _unsupported_reason(site: Site, candidate: Candidate) -> str:
    """Return why no single kernel carries out a site, whatever the memory of its group, or ""."""
    if torch.device(site.device).type != "cuda":
        return f"{site.device} has no memory that other ranks access"
    if site.dynamic or site.bytes < 0:
        return "its size is not fixed"
    if not isinstance(codec(candidate.codec), BlockCodec):
        return f"{candidate.codec} is no block codec"
    return ""


def _refused(candidate: Candidate, why: str) -> Candidate:
    return dataclasses.replace(candidate, refused=why, predicted_us=0.0, stages=(), error=0.0)


def exchange_for(candidate: Candidate | PlannedSite, site: Site, memory: PeerMemory) -> Exchange:
    """Return the exchange of a site."""
    payload = payload_of(site)
    return exchange_of(
        site.kind,
        candidate.codec,
        candidate.algorithm,
        payload.dtype,
        payload.numel,
        site.group_size,
        site.reduce_op or "sum",
        memory.lanes,
    )


def in_separate_stream(site: PlannedSite, memory_of: PeerMemoryOf) -> Task:
    """Return the cost of a site's single kernel in a separate stream."""
    memory = memory_of(site.group)
    exchange = exchange_for(site, site, memory)
    share = share_of(exchange, programs_of(exchange, memory), memory)
    return overlapped_kernel(site.predicted_us, share)


def operator_of(candidate: Candidate, site: Site, memory: PeerMemory) -> Callable[[Tensor], Tensor]:
    """Return the function that carries out a site by the operator, to be traced into its graph."""
    exchange = exchange_for(candidate, site, memory)
    programs = programs_of(exchange, memory)
    return lambda x: EXCHANGE(
        x,
        site.group,
        exchange.kind,
        exchange.codec.spec,
        exchange.algorithm,
        exchange.op,
        exchange.ranks,
        programs,
        exchange.lanes,
    )
