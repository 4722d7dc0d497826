"""Whether computation overlaps a collective completely.

The criterion is the end of the graph's timeline, not the sum of its parts.

needs: a graph with its sites, and a chosen candidate for each.
gives: when the rank finishes the graph for given candidates, and which sites can stay uncompressed
because their codecs would not end the graph earlier.
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

from commpass.costmodel import HOST, Profile, Task
from commpass.passes.candidates import joint_tasks, stage_tasks
from commpass.passes.coded_clock import CodedClock
from commpass.passes.fx.memory import memory
from commpass.passes.fx.ops import is_heavy
from commpass.passes.fx.schedule import Clock, timed
from commpass.passes.fx.work import Work, unsupported_reason, work_of
from commpass.passes.graph_site import GraphSite
from commpass.passes.move import ordered
from commpass.passes.results import Known
from commpass.passes.single_kernel import PeerMemoryOf, in_separate_stream, no_peer_memory
from commpass.passes.streams import unsupported_everywhere
from commpass.plan import ALIKE, SINGLE_KERNEL, Plan, PlannedSite, Site
from commpass.plan.kinds import KINDS
from commpass.policy import Policy
from commpass.policy.rules import Allowed

UNSURE = 0.5
"""The share of the predicted compute time that is assumed available for overlap.

The time of a matmul is known less precisely than that of a transfer (a core does 40 GFLOP/s, or
twice as many). A codec must gain if compute is that short, and not lose if it is as predicted.
"""


ROUNDS = 4
"""How many times a graph is timed to find the single kernels that gain in a separate stream. If
some still lose, all count as in the stream of computation."""


def facts_of(site: Site) -> tuple[Any, ...]:
    """Return what identifies a site on all ranks and in every compile."""
    return (site.group, site.tag, *(getattr(site, name) for name in ALIKE))


def decided(plan: Plan) -> dict[tuple[Any, ...], bool]:
    """Return the decisions of a plan, to be kept for later plans."""
    sites = plan.sites if not plan.fallback else ()
    return {facts_of(site): site.hidden for site in sites if site.compressed or site.hidden}


@dataclass(frozen=True)
class Schedule:
    """A graph in a given order, and the nodes at which its sites start.

    ``work`` has the lowest plausible compute times, and ``predicted`` those that are predicted.
    ``reordered`` says whether the graph will be reordered after codecs are inserted. If
    ``peer_memory`` is given, single kernels may run in a separate stream.
    """

    work: Work
    order: Sequence[fx.Node]
    starts: tuple[fx.Node, ...]
    profile: Profile
    predicted: Work
    reordered: bool
    peer_memory: PeerMemoryOf | None = None

    def as_predicted(self) -> Schedule:
        """Return the same graph with the predicted compute times."""
        return dataclasses.replace(self, work=self.predicted)

    def end_us(self, plan: Sequence[PlannedSite]) -> float:
        """Return the microseconds until the rank finishes with these candidates."""
        return self._clock(plan).now

    def exposed_us(self, plan: Sequence[PlannedSite]) -> list[float]:
        """Return the microseconds that the rank waits for each site."""
        found = self._exposed_us(self._clock(plan))
        return [found[start] for start in self.starts]

    def _exposed_us(self, clock: Clock) -> dict[fx.Node, float]:
        """Return the microseconds that the rank waits for each start."""
        found: dict[fx.Node, float] = defaultdict(float)
        for wait, us in clock.exposed.items():
            for start in self.work.waited[wait]:
                found[start] += us
        return found

    def _clock(self, plan: Sequence[PlannedSite]) -> Clock:
        """Time the graph with the candidates of a plan, and single kernels in the stream that is
        better for the graph.

        As in ``streams``, a kernel that takes no less of the rank's time beside computation stays
        in the stream of computation.
        """
        of_node = defaultdict(list)
        for site, start in zip(plan, self.starts, strict=True):
            of_node[start].append(site)
        coded = {
            start: _tasks(its, self.profile)
            for start, its in of_node.items()
            if any(site.compressed for site in its)
        }
        blocking, separate = self._timed(coded), self._in_separate_streams(of_node)
        for _ in range(ROUNDS):
            if not separate:
                return blocking
            clock = self._timed(coded | {start: [task] for start, task in separate.items()})
            gaining = self._gaining(separate, clock)
            if len(gaining) == len(separate):
                return min(clock, blocking, key=lambda clock: clock.now)
            separate = gaining
        return blocking

    def _timed(self, coded: Mapping[fx.Node, Sequence[Task]]) -> Clock:
        clock = CodedClock(self.work, coded=coded, early=self.reordered)
        for node in self.order:
            clock.run(node)
        return clock

    def _in_separate_streams(
        self, plan: Mapping[fx.Node, Sequence[PlannedSite]]
    ) -> dict[fx.Node, Task]:
        """Return the single kernels of a plan in a separate stream, by start. Those of coalesced
        collectives stay in the stream of computation."""
        if self.peer_memory is None:
            return {}
        return {
            start: in_separate_stream(sites[0], self.peer_memory)
            for start, sites in plan.items()
            if len(sites) == 1 and sites[0].lowering == SINGLE_KERNEL
        }

    def _gaining(self, separate: Mapping[fx.Node, Task], clock: Clock) -> dict[fx.Node, Task]:
        """Return the single kernels that take less of the rank's time beside computation, by more
        than the margin of the model."""
        waited_us = self._exposed_us(clock)
        return {
            start: task
            for start, task in separate.items()
            if task.overhead_us + task.slowdown_us + waited_us[start]
            < (1 - self.profile.margin) * task.us
        }


def _tasks(members: Sequence[PlannedSite], profile: Profile) -> list[Task]:
    """Return the tasks of a coded exchange, or of a coalesced collective."""
    if len(members) > 1:
        return joint_tasks(members, profile)
    return stage_tasks(members[0].stages, members[0], profile)


def initial_schedule(
    gm: fx.GraphModule,
    found: Sequence[GraphSite],
    policy: Policy,
    profile: Profile,
    peer_memory: PeerMemoryOf = no_peer_memory,
) -> Schedule | None:
    """Return the graph in its best order.

    Return None if nothing can be overlapped, or if ranks may compute different things. They would
    then decide differently (law 5).
    """
    nodes = tuple(gm.graph.nodes)
    if unsupported_reason(gm) or any(_may_differ(each.site) for each in found):
        return None
    if not any(map(is_heavy, nodes)):
        return None
    predicted = work_of(gm.graph, memory(gm.graph, in_place=True), profile)
    work = _with_least_compute(predicted)
    order: Sequence[fx.Node] = nodes
    reordered = "move" not in policy.skip
    if reordered:
        best = ordered(work, timed(work, nodes), policy.more_memory)[1]
        order = nodes if best is None else best.order
    starts = tuple(each.call.node for each in found)
    separate = reordered and "streams" not in policy.skip and not unsupported_everywhere(gm)
    memory_of = peer_memory if separate else None
    return Schedule(work, order, starts, profile, predicted, reordered, memory_of)


def _may_differ(site: Site) -> bool:
    """Whether a site may differ between ranks."""
    return site.uneven or site.pairwise or site.bytes < 0 or site.kind not in KINDS


def _with_least_compute(work: Work) -> Work:
    """Return the work with the lowest plausible compute times."""
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
    """Return a plan in which sites stay uncompressed if their codecs do not end the graph earlier.

    ``uncompressed`` holds the uncompressed form of each site. Decisions ``known`` from earlier are
    kept. Without a ``schedule`` no other site counts as overlapped. Indistinguishable sites share a
    decision, and sites with a forced codec keep it.
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
"""The maximum number of undecided classes of sites that are tried one by one."""


def _search(
    plan: Sequence[PlannedSite],
    uncompressed: Sequence[PlannedSite],
    spared: set[int],
    classes: Sequence[Sequence[int]],
    schedule: Schedule,
) -> set[int]:
    """Return the sites that can stay uncompressed, including those in ``spared``.

    Classes are tried in the order of the time that the rank would wait for them. If there are many,
    bisection finds the largest first part that can stay uncompressed together; the next ones are
    tried one by one. Codecs must end the graph earlier by more than the margin of the plain time
    (law 10).
    """

    def end_us(some: set[int], timed: Schedule = schedule) -> float:
        return timed.end_us([uncompressed[n] if n in some else each for n, each in enumerate(plan)])

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
    as_predicted = schedule.as_predicted()
    for numbers in ranked[first : first + MANY]:
        more = found | {*numbers}
        later = end_us(more)
        gains = later - end > margin * sum(plain_us(numbers))
        if not gains or end_us(more, as_predicted) < end_us(found, as_predicted):
            found, end = more, later
    is_slower = end_us(found, as_predicted) > as_predicted.end_us(all_alone)
    return spared | every if is_slower else found


def _hidden(site: PlannedSite, uncompressed: PlannedSite) -> PlannedSite:
    what = f"{site.codec} by {site.algorithm}"
    times = f"{site.predicted_us:,.0f} us instead of {site.plain_us:,.0f} us"
    reason = (
        f"overlapped with compute: {what} would take {times}, but the graph would not end earlier"
    )
    return dataclasses.replace(uncompressed, reason=reason, hidden=True)
