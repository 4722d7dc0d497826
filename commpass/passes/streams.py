"""streams: gives single kernels a separate stream, so that matmuls run meanwhile.

needs: a graph without codec operators, in which each site in a single kernel is one operator.
gives: the same graph. A start and, directly after it, a wait replace the operator of each site that
takes less time that way. ``move`` then moves computation in between.
changes: no computed value. Sites that gain nothing stay in the stream of the computation.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._ops import HigherOrderOperator

from commpass.costmodel import Profile
from commpass.lowering.exchange import EXCHANGE, START, WAIT, share_of_processors
from commpass.passes.context import PassContext
from commpass.passes.fx import meta
from commpass.passes.fx.erase import erase, replace
from commpass.passes.fx.fakes import mode_of
from commpass.passes.fx.marks import MARK, SHARE, STRIDES, US
from commpass.passes.fx.memory import memory
from commpass.passes.fx.ops import is_matmul
from commpass.passes.fx.schedule import Scheduled, timed
from commpass.passes.fx.splice import set_value
from commpass.passes.fx.work import Work, site_of, unsupported_reason, work_of
from commpass.passes.move import is_faster, ordered
from commpass.passes.single_kernel import PeerMemoryOf
from commpass.plan import SINGLE_KERNEL, PlannedSite

NO_MATMUL = "the graph has no matmul to overlap with"
NO_MEMORY = "another order of the graph would need more memory than allowed"
NOTHING_MEANWHILE = "no matmul runs between its start and its first reader"
NO_SOONER = "beside compute the graph would end no sooner"
CUT = "its CUDA graph is cut in parts at {}, and a part must wait for all that it starts"
INSTEAD = "{:,.1f} us instead of {:,.1f} us"
SLOWER = "beside compute it would take {}"
SKIPPED = "the policy skips pass 'move'"


@dataclass(frozen=True)
class Choice:
    """Whether a single kernel runs in a separate stream, and why."""

    own_stream: bool
    why: str


def run(context: PassContext) -> None:
    """Choose the sites that run beside computation, and note them in the plan."""
    if not any(site.lowering == SINGLE_KERNEL for site in context.plan.sites):
        return
    given = context.input
    if "move" in given.policy.skip:
        choices = {site.name: Choice(False, SKIPPED) for site in context.plan.sites}
    else:
        choices = choose_streams(
            given.gm, given.profile, given.policy.more_memory, given.peer_memory
        )
    context.plan_with(sites=_with_streams(context.plan.sites, choices))


def _with_streams(
    sites: Sequence[PlannedSite], choices: Mapping[str, Choice]
) -> tuple[PlannedSite, ...]:
    """Return a plan that says in which stream each single kernel runs, and why."""

    def of(site: PlannedSite) -> PlannedSite:
        if site.lowering != SINGLE_KERNEL or site.name not in choices:
            return site
        choice = choices[site.name]
        where = "in a separate stream" if choice.own_stream else "in the stream of computation"
        reason = f"{site.reason}; {where}: {choice.why}"
        return dataclasses.replace(site, own_stream=choice.own_stream, reason=reason)

    return tuple(map(of, sites))


def choose_streams(
    gm: fx.GraphModule, profile: Profile, more_memory: float, memory_of: PeerMemoryOf
) -> dict[str, Choice]:
    """Split single kernels of a graph into start and wait, in place, where that takes less time.
    Return the choice for each site with such a kernel.

    In the stream of the computation, a kernel takes its whole time. Beside it, the rank is busy
    with it and waits for it, in the best order of the graph. The difference must exceed the margin
    of the model, and the graph must end sooner.
    """
    every = gm.graph.find_nodes(op="call_function", target=EXCHANGE)
    if why := unsupported_everywhere(gm):
        return {site_of(node): Choice(False, why) for node in every}
    blocking_us = _end_us(gm, profile, more_memory)
    found: dict[str, Choice] = {}
    starts = [_split(node, number, memory_of) for number, node in enumerate(every)]
    while starts:
        work = _work(gm, profile)
        still = timed(work, work.nodes)
        best = ordered(work, still, more_memory)[1]
        if best is None:
            return found | _joined(dict.fromkeys(starts, NO_MEMORY))
        us = {start: _beside_us(start, work, best) for start in starts}
        whys = {start: INSTEAD.format(us[start], start.meta[US]) for start in starts}
        slower = {
            start: SLOWER.format(whys[start])
            for start in starts
            if start.meta[US] - us[start] <= profile.margin * start.meta[US]
        }
        slower |= dict.fromkeys(_without_matmul(starts, work, best), NOTHING_MEANWHILE)
        sooner = best.clock.now < blocking_us and is_faster(best.clock, still)
        if not slower and sooner:
            return found | {site_of(start): Choice(True, whys[start]) for start in starts}
        found |= _joined(slower or dict.fromkeys(starts, NO_SOONER))
        starts = [start for start in starts if slower and start not in slower]
    return found


def unsupported_everywhere(gm: fx.GraphModule) -> str:
    """Return why all single kernels of a graph stay in the stream of the computation, or ""."""
    nodes = gm.graph.nodes
    if not any(map(is_matmul, nodes)):
        return NO_MATMUL
    if why := unsupported_reason(gm):
        return why
    if not config.triton.cudagraphs:
        return ""
    return next((CUT.format(node.name) for node in nodes if _cuts_cuda_graphs(node)), "")


def _cuts_cuda_graphs(node: fx.Node) -> bool:
    """Whether Inductor may cut the CUDA graph of a graph at a node. ``move`` knows nothing of the
    parts."""
    tags = getattr(node.target, "tags", ())
    return (
        any(value.device.type == "cpu" for value in meta.tensors(node.meta.get("val")))
        or "unbacked_bindings" in node.meta
        or torch.Tag.cudagraph_unsafe in tags
        or (isinstance(node.target, HigherOrderOperator) and node.target.name() == "cond")
    )


def _work(gm: fx.GraphModule, profile: Profile) -> Work:
    return work_of(gm.graph, memory(gm.graph, in_place=True), profile)


def _end_us(gm: fx.GraphModule, profile: Profile, more_memory: float) -> float:
    """Return when the rank is done with a graph, in its best order."""
    work = _work(gm, profile)
    still = timed(work, work.nodes)
    best = ordered(work, still, more_memory)[1] if work.starts else None
    return still.now if best is None else min(best.clock.now, still.now)


def _beside_us(start: fx.Node, work: Work, best: Scheduled) -> float:
    """Return for how long the rank is busy with a single kernel beside computation, and waits for
    it."""
    task = work.tasks[start]
    return task.overhead_us + task.slowdown_us + best.clock.exposed[_wait_of(start)]


def _without_matmul(starts: Sequence[fx.Node], work: Work, best: Scheduled) -> list[fx.Node]:
    """Return the starts with no matmul before their waits. What else runs there are other single
    kernels, which have the same stream."""
    place = {node: number for number, node in enumerate(best.order)}
    heavy = sorted(place[node] for node in work.heavy)
    return [
        start
        for start in starts
        if bisect(heavy, place[start]) == bisect(heavy, place[_wait_of(start)])
    ]


# --- edits ----------------------------------------------------------------------------------------


def _split(node: fx.Node, number: int, memory_of: PeerMemoryOf) -> fx.Node:
    """Replace a single kernel by its start and, directly after it, its wait. Return the start."""
    given: Any = node.args
    _, group, kind, *_, ranks, _, _ = given
    with node.graph.inserting_before(node), mode_of(node.graph):
        start = node.graph.call_function(START, (*given, number))
        wait = node.graph.call_function(WAIT, (start, kind, ranks, number))
        for made in (start, wait):
            made.meta = dict(node.meta)
            made.meta[STRIDES] = fx.map_arg((made.args, made.kwargs), meta.value)
            set_value(made)
    start.meta[SHARE] = share_of_processors(start, memory_of(group))
    wait.meta[MARK] = node.meta[MARK].with_role("wait")
    replace(node, wait)
    return start


def _joined(whys: Mapping[fx.Node, str]) -> dict[str, Choice]:
    """Undo ``_split`` for some starts. Return their choices, with the reason of each."""
    choices = {site_of(start): Choice(False, why) for start, why in whys.items()}
    for start in whys:
        wait = _wait_of(start)
        with start.graph.inserting_before(start):
            node = start.graph.call_function(EXCHANGE, start.args[:-1])
        node.meta = {**start.meta, "val": wait.meta["val"]}
        node.meta[STRIDES] = fx.map_arg((node.args, node.kwargs), meta.value)
        del node.meta[SHARE]
        replace(wait, node)
        erase(start)
    return choices


def _wait_of(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    return wait
