"""Whether a collective hides behind what is computed: what counts is the end of a graph's timeline,
and not the sum of its parts.

needs: a graph with its sites, and a chosen candidate for each.
gives: when the rank is done with the graph, if this is done to each site; and which sites may be
left alone after all, because their codes would not end it earlier.
changes: nothing.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from commpass.costmodel import HOST, Profile
from commpass.passes.chunk.gain import exchange_of
from commpass.passes.discover import GraphSite
from commpass.passes.fx import costs
from commpass.passes.fx.memory import memory
from commpass.passes.fx.schedule import Clock, Work, timed
from commpass.passes.move import ordered, unsupported_reason, work_of
from commpass.plan import ALIKE, Plan, PlannedSite, Site
from commpass.plan.kinds import KINDS
from commpass.policy import Policy
from commpass.policy.rules import Allowed

UNSURE = 0.5
"""The share of the predicted compute that a collective must hide behind: what a matmul takes is
known less surely than what a link carries (a core does 40 GFLOP/s, or twice as many)."""

Known = Mapping[tuple[Any, ...], bool]
"""By ``facts_of`` a site: whether it was left alone because it is hidden, or not."""


def facts_of(site: Site) -> tuple[Any, ...]:
    """What a site has in common on all ranks, and each time that it is compiled."""
    return (site.group, site.tag, *(getattr(site, name) for name in ALIKE))


def decided(plan: Plan) -> dict[tuple[Any, ...], bool]:
    """What is known of the sites of a plan from now on."""
    sites = plan.sites if not plan.fallback else ()
    return {facts_of(site): site.hidden for site in sites if site.compressed or site.hidden}


@dataclass(frozen=True)
class Schedule:
    """A graph in an order, and the nodes at which its sites start."""

    work: Work
    order: Sequence[fx.Node]
    starts: tuple[fx.Node, ...]
    profile: Profile

    def end_us(self, plan: Sequence[PlannedSite]) -> float:
        """Microseconds until the rank is done, with this done to each site."""
        return self._clock(plan).now

    def exposed_us(self, plan: Sequence[PlannedSite]) -> list[float]:
        """Microseconds for which the rank stands still for each site."""
        found: dict[fx.Node, float] = defaultdict(float)
        for wait, us in self._clock(plan).exposed.items():
            for start in self.work.waited[wait]:
                found[start] += us
        return [found[start] for start in self.starts]

    def _clock(self, plan: Sequence[PlannedSite]) -> Clock:
        """What is done to the sites of a coalesced collective is done one after the other."""
        tasks, of_node = dict(self.work.tasks), defaultdict(list)
        for site, start in zip(plan, self.starts, strict=True):
            of_node[start].append(site)
        for start, its in of_node.items():
            if any(site.compressed for site in its):
                parts = [exchange_of(site, self.profile) for site in its]
                us, busy = (sum(getattr(p, name) for p in parts) for name in ("us", "busy_us"))
                tasks[start] = dataclasses.replace(tasks[start], us=us, latency_us=0, busy_us=busy)
        return timed(dataclasses.replace(self.work, tasks=tasks), self.order)


def initial_schedule(
    gm: fx.GraphModule, found: Sequence[GraphSite], policy: Policy, profile: Profile
) -> Schedule | None:
    """A graph in the order that suits it as it came. None where nothing can hide, and where it is
    plain that ranks may compute different things: they would decide differently (law 5)."""
    nodes = tuple(gm.graph.nodes)
    if unsupported_reason(gm) or any(_may_differ(each.site) for each in found):
        return None
    if not any(map(costs.is_heavy, nodes)):
        return None
    work = _with_least_compute(work_of(gm.graph, memory(gm.graph, in_place=True), profile))
    order: Sequence[fx.Node] = nodes
    if "move" not in policy.skip:
        order = ordered(work, timed(work, nodes), policy.more_memory)[1] or nodes
    return Schedule(work, order, tuple(each.call.node for each in found), profile)


def _may_differ(site: Site) -> bool:
    """Whether a site is not known to be the same on all ranks."""
    return site.uneven or site.pairwise or site.bytes < 0 or site.kind not in KINDS


def _with_least_compute(work: Work) -> Work:
    """A graph whose compute takes as little as it may."""
    tasks = {
        node: dataclasses.replace(task, us=task.us * UNSURE) if task.resource == HOST else task
        for node, task in work.tasks.items()
    }
    return dataclasses.replace(work, tasks=tasks)


def allow_hiding(
    plan: Sequence[PlannedSite],
    uncompressed: Sequence[PlannedSite],
    allowed: Sequence[Allowed],
    known: Known,
    schedule: Schedule | None,
) -> list[PlannedSite]:
    """A plan in which sites are left alone whose codes do not end the graph earlier.

    ``uncompressed`` are the same sites left alone; what is ``known`` of a site from before stays
    so, and without a ``initial_schedule`` nothing else is found hidden. Sites that nothing tells
    apart are decided alike, and those with a forced codec keep it.
    """
    classes: dict[tuple[Any, ...], list[int]] = {}
    for number, (site, its) in enumerate(zip(plan, allowed, strict=True)):
        if site.compressed and not its.force:
            classes.setdefault(facts_of(site), []).append(number)
    spared = {n for facts, numbers in classes.items() if known.get(facts) for n in numbers}
    fresh = [numbers for facts, numbers in classes.items() if facts not in known]
    if fresh and schedule is not None:
        spared |= _search(plan, uncompressed, spared, fresh, schedule)
    return [_hidden(site, uncompressed[n]) if n in spared else site for n, site in enumerate(plan)]


MANY = 32
"""Sites, of those that are not known together to be hidden, that are each tried alone."""


def _search(
    plan: Sequence[PlannedSite],
    uncompressed: Sequence[PlannedSite],
    spared: set[int],
    classes: Sequence[Sequence[int]],
    schedule: Schedule,
) -> set[int]:
    """The sites that can be left alone beside those that are ``spared``. Those come first for which
    the rank would stand still the least: of many as many at once as can be, by bisection, and of
    what follows each that still can. A site's codes must end the graph earlier by more than the
    margin of its plain time (law 10)."""

    def end_us(some: set[int]) -> float:
        return schedule.end_us(
            [uncompressed[n] if n in some else each for n, each in enumerate(plan)]
        )

    def plain_us(numbers: Sequence[int]) -> list[float]:
        return [plan[n].plain_us for n in numbers]

    every = {n for numbers in classes for n in numbers}
    all_alone = [uncompressed[n] if n in spared | every else each for n, each in enumerate(plan)]
    exposed = schedule.exposed_us(all_alone)
    ranked = sorted(classes, key=lambda numbers: sum(exposed[n] for n in numbers))
    found, end, margin = set(spared), end_us(spared), schedule.profile.margin
    first = 0

    def stay_hidden(count: int) -> bool:
        some = {n for numbers in ranked[:count] for n in numbers}
        return end_us(spared | some) - end <= margin * min(map(min, map(plain_us, ranked[:count])))

    if len(ranked) > MANY:
        first = bisect_left(
            range(1, len(ranked) + 1), True, key=lambda count: not stay_hidden(count)
        )
        found |= {n for numbers in ranked[:first] for n in numbers}
        end = end_us(found)
    for numbers in ranked[first : first + MANY]:
        later = end_us(found | {*numbers})
        if later - end <= margin * sum(plain_us(numbers)):
            found, end = found | {*numbers}, later
    return found


def _hidden(site: PlannedSite, uncompressed: PlannedSite) -> PlannedSite:
    what = f"{site.codec} by {site.algorithm}"
    times = f"{site.predicted_us:,.0f} us instead of {site.plain_us:,.0f} us"
    reason = (
        f"hidden: {what} would take {times}, but the rank computes meanwhile, and the graph would"
        " not end earlier"
    )
    return dataclasses.replace(uncompressed, reason=reason, hidden=True)
