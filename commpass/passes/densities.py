"""densities: how much of each selected gradient is sent (SSFusion, section IV.B).

needs: the sites of a graph, each with what it is allowed.
gives: what sites with a selecting codec are now allowed. In each fusion the smallest gradients are
sent whole, up to the limit of equation 2: the previous fusion's exchange takes as long as backward
and selection of this one. The others are sparsified, so that the total number of sent entries
matches the codec's density.
changes: nothing in the graph.

The time of backward depends on a batch that may differ per rank. It counts only if ranks compare
their decisions (``timed``). Otherwise it counts as zero, equation 2 holds earlier, and fewer
gradients are sent whole.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from commpass.codecs import SparseCodec, codec
from commpass.collectives import read_stages
from commpass.costmodel import HOST, Profile
from commpass.costmodel.buffers import BOUND, Gradient, Problem, excluded, slack, sparsified
from commpass.passes.allowed import still_allowed
from commpass.passes.context import PassContext
from commpass.passes.fx import costs
from commpass.passes.fx.marks import ALLOWED
from commpass.passes.fx.parse import graph_modules, is_collective, is_wait
from commpass.passes.graph_site import GraphSite
from commpass.passes.group import Member, fusions, runs_again, selects
from commpass.passes.hidden import facts_of
from commpass.passes.payloads import payload_of, prices_of, request_of
from commpass.passes.results import DecidedDensities, Densities
from commpass.policy import Policy

WHOLE = 1.0
"""The density of a gradient that is sent whole."""
EQUATION_2 = "sent whole: its selection would outlast the exchange before (SSFusion, equation 2)"
NO_SMALLER = "sent whole: its codes would be no smaller"
AGREED = "sent whole, as was agreed on before"


def run(context: PassContext) -> None:
    """Decide the densities of the sites, before group combines them."""
    given = context.input
    what = (given.gm, context.found, given.policy, given.profile, given.direction)
    context.densities = decide_densities(*what, given.densities, timed=given.hides)
    context.plan_with(timed=context.densities.groups)
    if context.densities.by_site:
        context.found = still_allowed(context.found, given.policy, given.direction)


def decide_densities(
    gm: fx.GraphModule,
    found: Sequence[GraphSite],
    policy: Policy,
    profile: Profile,
    direction: str,
    known: Densities | None = None,
    *,
    timed: bool = False,
) -> DecidedDensities:
    """Record at the collectives of a graph what they are now allowed.

    Values ``known`` from earlier for all sites of a set are kept. ``timed`` says whether this
    rank's computation counts.
    """
    if policy.off or not policy.selective or not policy.group_bytes:
        return DecidedDensities()
    fused = fusions(gm, found, policy, profile, direction)
    sets = [members for each in fused for members in each.sets]
    made: dict[tuple[Any, ...], float] = {}
    groups: dict[str, None] = {}
    seen: dict[tuple[Any, ...], Iterator[int]] = defaultdict(itertools.count)
    for _, module in graph_modules(gm):
        mine = [each for each in found if each.module is module and _is_open(each, direction)]
        clock = _clock(module.graph, profile) if mine and timed else None
        for sites in _by_density(mine):
            facts = [(*facts_of(each.site), next(seen[facts_of(each.site)])) for each in sites]
            if known is not None and all(each in known for each in facts):
                chosen = [(known[each], AGREED) for each in facts]
            else:
                runs = _runs(sites, sets)
                chosen = _densities(sites, runs, profile, clock)
                if clock is not None and chosen != _densities(sites, runs, profile, None):
                    groups[sites[0].site.group] = None
            for each, fact, (density, why) in zip(sites, facts, chosen, strict=True):
                made[fact] = density
                _note(each, density, why)
    return DecidedDensities(made, tuple(groups))


def _is_open(each: GraphSite, direction: str) -> bool:
    """Whether the density of a site is undecided: exactly one codec selects from it, and nothing
    forces it."""
    if each.allowed.force or each.site.dynamic or each.site.group_size == 1:
        return False
    if (
        each.call.form != "plain"
        or each.site.unsupported_reason is not None
        or runs_again(each, direction)
    ):
        return False
    return selects(each) and len(_lossy(each)) == 1


def _lossy(each: GraphSite) -> list[SparseCodec]:
    codecs = map(codec, each.allowed.codecs)
    return [coder for coder in codecs if isinstance(coder, SparseCodec)]


def _by_density(sites: Iterable[GraphSite]) -> list[list[GraphSite]]:
    """Group the sites that share one density, in graph order."""
    found: dict[Any, list[GraphSite]] = defaultdict(list)
    for each in sites:
        found[each.site.group, each.site.dtype, each.allowed.terms].append(each)
    return list(found.values())


def _runs(sites: Sequence[GraphSite], sets: Sequence[Sequence[Member]]) -> list[list[int]]:
    """Return site numbers by exchange, in the order in which exchanges start. The sites of a fusion
    form one list."""
    number = {each.call.node: n for n, each in enumerate(sites)}
    together = [[number[m.start] for m in members if m.start in number] for members in sets]
    runs = [run for run in together if run]
    alone = set(number.values()) - set(itertools.chain(*runs))
    return sorted([*runs, *([n] for n in alone)], key=max)


def _densities(
    sites: Sequence[GraphSite],
    runs: Sequence[Sequence[int]],
    profile: Profile,
    clock: Mapping[fx.Node, float] | None,
) -> list[tuple[float, str]]:
    """Return the density of each site, with the reason if it is sent whole."""
    first = sites[0].site
    (codec,), dtype = _lossy(sites[0]), getattr(torch, first.dtype)
    target, bound = codec.density.ratio, min(BOUND, codec.density.ratio)
    us = functools.cache(lambda numel: _coding_us(codec, numel, sites, profile))
    gradients, before = [], 0.0
    for each in sites:
        payload = payload_of(each.site)
        now = clock[each.call.node] if clock is not None else 0.0
        select, around = us(payload.numel)
        name = each.site.name
        gradients.append(
            Gradient(name, payload.numel, dtype.itemsize, now - before, select, 0.0, around)
        )
        before = now

    def row_bytes(entries: int, density: float) -> int:
        return codec.wire_bytes(entries, dtype)

    link = prices_of(first, profile).link
    problem = Problem(gradients, first.group_size, link, row_bytes, target, interleaved=True)
    why = {
        n: NO_SMALLER
        for n, each in enumerate(gradients)
        if row_bytes(each.entries, target) >= each.nbytes
    }
    for number in excluded(problem, runs, frozenset(why), slack(gradients, why, target, bound)):
        why[number] = EQUATION_2
    density = sparsified(gradients, why, target, bound)
    return [(WHOLE, why[n]) if n in why else (density, "") for n in range(len(sites))]


def _coding_us(
    codec: SparseCodec, numel: int, sites: Sequence[GraphSite], profile: Profile
) -> tuple[float, float]:
    """Return the microseconds to select from ``numel`` values, and those of all other computation
    for them."""
    site = next(each.site for each in sites if payload_of(each.site).numel == numel)
    task = prices_of(site, profile).task
    stages = read_stages(site.kind, "sparse", codec.spec, payload_of(site), request_of(site))
    tasks = [(stage.role, task(stage)) for stage in stages]
    select = sum(each.us for role, each in tasks if role == "encode")
    every = sum(each.us for _, each in tasks if each.resource == HOST)
    return select, every - select


def _clock(graph: fx.Graph, profile: Profile) -> dict[fx.Node, float]:
    """Return how many microseconds a rank computes before it reaches each node."""

    times = costs.NodeTimes.of(graph, profile)

    def us(node: fx.Node) -> float:
        exchanged = is_collective(node) or is_wait(node)
        return 0.0 if exchanged else times.us(node)

    nodes = list(graph.nodes)
    return dict(zip(nodes, itertools.accumulate(map(us, nodes), initial=0.0), strict=False))


def _note(each: GraphSite, density: float, why: str) -> None:
    """Record what a site is now allowed."""
    if density == WHOLE:
        allowed = each.allowed.without_lossy(why)
    else:
        (coder,) = _lossy(each)
        spec = coder.spec
        if density < coder.density.ratio:
            spec = codec(spec, density=density).spec
        names = (spec if codec(name) == coder else name for name in each.allowed.codecs)
        allowed = replace(each.allowed, codecs=tuple(names))
    each.call.node.meta[ALLOWED] = {**each.call.node.meta.get(ALLOWED, {}), each.position: allowed}
