"""move: starts exchanges as early as possible and delays their waits as long as that helps.

needs: a graph without codec operators.
gives: the same nodes in another order, in which matmuls run while exchanges are in flight. Matmuls
whose result is needed late (weight gradients in a backward graph) are delayed until the rank would
otherwise wait. The order of exchanges depends only on the graph, not on times.
changes: no computed value. The peak memory grows at most as far as the policy allows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from commpass.costmodel import Profile
from commpass.passes.context import PassContext
from commpass.passes.fx.marks import started_by, starts, waits
from commpass.passes.fx.memory import memory, peak
from commpass.passes.fx.ops import is_heavy
from commpass.passes.fx.schedule import Clock, Scheduled, schedule, sequence, timed
from commpass.passes.fx.work import Work, site_of, unsupported_reason, work_of
from commpass.passes.results import Moved
from commpass.plan import PlannedSite

WINDOWS = (0, 1, 2)
"""Over how many sites' exchanges a matmul may be delayed."""
WORTH = 0.01
"""The share of the waiting time that another order, or a larger window with its higher memory use,
must save."""


def run(context: PassContext) -> None:
    """Reorder the graph, and note in its plan how long the rank waits."""
    given = context.input
    context.moved = moved = move(given.gm, given.profile, given.policy.more_memory)
    sites = with_exposure(context.plan.sites, moved)
    context.plan_with(sites=sites, reordered=moved.reordered, order=moved.why)


def move(gm: fx.GraphModule, profile: Profile, more_memory: float) -> Moved:
    """Reorder a graph in place. ``more_memory`` is the allowed relative increase of peak memory."""
    nodes = tuple(gm.graph.nodes)
    program = [node for node in nodes if starts(node)]
    if (why := unsupported_reason(gm)) or not program:
        return Moved(why=why)
    known = memory(gm.graph, in_place=True)
    work = work_of(gm.graph, known, profile)
    was = timed(work, nodes)
    first, found = ordered(work, was, more_memory)
    if found is None:
        why = f"any other order would need more memory than {more_memory:.0%} above the peak"
        return _moved(gm, was, was, why=why)
    now = found.clock
    if first == program and not is_faster(now, was):
        why = "no other order would be faster"
        return _moved(gm, was, was, why=why, missed=_missed(work, program, found, was, more_memory))
    *others, output = found.order
    for node in others:
        output.prepend(node)
    gm.recompile()
    reordered = () if first == program else tuple(map(site_of, first))
    missed = _missed(work, first, found, now, more_memory)
    return _moved(gm, now, was, reordered=reordered, missed=missed)


def ordered(
    work: Work, was: Clock, more_memory: float
) -> tuple[Sequence[fx.Node], Scheduled | None]:
    """Return the exchanges in the order of their starts, and the order of all nodes that overlaps
    them best.

    Return None if every order exceeds the memory limit. ``was`` is the clock of the original order.
    """
    bound, worth = (1 + more_memory) * peak(work.nodes, work.memory), _worth(was)
    program = sorted(work.starts, key=work.index.__getitem__)
    for first in (sequence(work), program):
        if found := _best(work, first, bound, worth):
            return first, found
    return program, None


def is_faster(now: Clock, was: Clock) -> bool:
    """Whether an order is faster than the original one, by as much as is worth a change."""
    return was.now - now.now > _worth(was)


def _worth(was: Clock) -> float:
    return WORTH * sum(was.exposed.values())


def _moved(gm: fx.GraphModule, clock: Clock, was: Clock, **more: Any) -> Moved:
    return Moved(_exposed(clock), _exposed(was), pinned=_overlapped(gm), **more)


NEEDED = "nothing else can be computed while it travels: all that is left needs it"


def _missed(
    work: Work, starts: Sequence[fx.Node], best: Scheduled, clock: Clock, more_memory: float
) -> dict[str, str]:
    """Return why the rank waits, for each site that it waits for. ``best`` is the best order of
    these starts, and ``clock`` that of the order that is used."""
    if not any(clock.exposed.values()):
        return {}
    if best.windowed or best.bounded:
        best = schedule(work, starts, _windows(starts)[-1], math.inf)
    roomy = _exposed(best.clock)
    found = {}
    for site, us in _exposed(clock).items():
        gain = us - roomy.get(site, 0.0)
        if us > 0:
            room = f"{gain:,.0f} us less if more_memory={more_memory:g} allowed more memory"
            found[site] = room if gain > WORTH * us else NEEDED
    return found


def with_exposure(plan: Sequence[PlannedSite], moved: Moved) -> tuple[PlannedSite, ...]:
    """Return the plan with the waiting time for each site. That of a coalesced collective counts
    for its first site."""
    now, was = dict(moved.exposed_us), dict(moved.original_us)

    def of(site: PlannedSite) -> PlannedSite:
        name = site.name if site.name in was else site.name.rpartition(".")[0]
        exposed, unmoved = now.pop(name, 0.0), was.pop(name, 0.0)
        return replace(
            site,
            exposed_us=round(exposed, 3),
            unmoved_us=round(unmoved, 3),
            missed=moved.missed.get(name, moved.why if exposed else ""),
        )

    return tuple(map(of, plan))


def _best(work: Work, starts: Sequence[fx.Node], bound: float, worth: float) -> Scheduled | None:
    """Return the order with the smallest window that is at most ``worth`` microseconds slower than
    the fastest.

    Return None if every order exceeds the memory limit.
    """
    orders: list[Scheduled] = []
    for window in _windows(starts):
        orders.append(schedule(work, starts, window, bound))
        if not orders[-1].windowed:  # larger windows give the same order
            break
    fitting = [each for each in orders if each.peak <= bound]
    least = min((each.clock.now for each in fitting), default=0.0)
    return next((each for each in fitting if each.clock.now <= least + worth), None)


def _windows(starts: Sequence[fx.Node]) -> list[int]:
    """Return the numbers of exchange starts that a matmul may be delayed over."""
    most = max(Counter(map(site_of, starts)).values())
    return [sites * most for sites in WINDOWS]


def _exposed(clock: Clock) -> dict[str, float]:
    """Return the microseconds of waiting for each site."""
    found: dict[str, float] = defaultdict(float)
    for wait, us in clock.exposed.items():
        found[site_of(wait)] += us
    return dict(found)


def _overlapped(gm: fx.GraphModule) -> bool:
    """Whether another exchange starts, or heavy computation runs, while an exchange is in
    flight."""
    travelling: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if waits(node):
            travelling.difference_update(started_by(node))
        elif starts(node):
            if travelling:
                return True
            travelling.add(node)
        elif travelling and is_heavy(node):
            return True
    return False
