"""The road of a graph: every pass, in order, in one place.

A pass is a plain function from one stage of the road to the next; what it requires, provides and
changes stands here and is checked (``contract``). Each can be left out by name with
``Policy(skip=...)``.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from torch import fx

from commpass.ambient import rewriting
from commpass.passes.allowed import allow, matched, still_allowed
from commpass.passes.candidates import Options, scoring
from commpass.passes.choose import choose
from commpass.passes.chunk import chunk
from commpass.passes.constants import lift_constants
from commpass.passes.contract import Contracts, Pass
from commpass.passes.densities import thin
from commpass.passes.discover import GraphSite, discover
from commpass.passes.failures import SiteFailure
from commpass.passes.fuse import fuse
from commpass.passes.graph.erase import is_checked
from commpass.passes.graph.marks import MARK
from commpass.passes.graph.parse import graph_modules
from commpass.passes.group import group
from commpass.passes.hidden import course as course_of
from commpass.passes.lower import lower
from commpass.passes.move import move, with_exposure
from commpass.passes.rewrite import rewrite
from commpass.passes.road import Outcome, Road, copied
from commpass.passes.sample import Given, given_to_products, sample, unsupported_reason
from commpass.passes.simplify import simplify
from commpass.passes.sizes import limits, with_limits
from commpass.passes.verify import verify
from commpass.plan import LEFT, Plan

log = logging.getLogger("commpass")


def _discovered(road: Road) -> list[GraphSite]:
    return discover(road.gm, road.direction, road.stateless, road.weights)


def _still_allowed(road: Road) -> tuple[GraphSite, ...]:
    return still_allowed(_discovered(road), road.policy, road.direction)


def _discover(road: Road) -> Road:
    for _, module in graph_modules(road.gm):  # a graph that has been here before
        for node in module.graph.nodes:
            node.meta.pop(MARK, None)
    found = tuple(_discovered(road))
    if (why := road.obstacle) is not None:
        found = tuple(
            dataclasses.replace(f, site=dataclasses.replace(f.site, obstacle=why)) for f in found
        )
    found = allow(found, road.policy, road.direction)
    return dataclasses.replace(road, found=found, matched=matched(found, road.policy))


def _simplify(road: Road) -> Road:
    if not road.found or road.policy.off or road.obstacle is not None:
        return road
    applied = simplify(road.gm, road.found, road.policy, road.profile, road.own)
    found = _still_allowed(road)
    return dataclasses.replace(road, simplified=applied, found=found)


def _group(road: Road) -> Road:
    if road.obstacle is not None:
        return road
    what = (road.gm, road.found, road.policy, road.profile, road.direction)
    thinned = thin(*what, road.densities, timed=road.hides)
    if thinned.densities:
        road = dataclasses.replace(road, found=_still_allowed(road), thinned=thinned)
    grouped = group(road.gm, road.found, road.policy, road.profile, road.direction)
    if not grouped:
        return road
    found = _still_allowed(road)
    return dataclasses.replace(road, grouped=grouped, found=found)


def _chunk(road: Road) -> Road:
    if not road.found or road.policy.off or road.obstacle is not None:
        return road
    done = chunk(road.gm, road.found, road.policy, road.profile, road.direction)
    found = _still_allowed(road)
    return dataclasses.replace(road, chunked=done, found=found)


def _candidates(road: Road) -> Road:
    scored, excluded = scoring(road.profile, road.policy.reassociate), _with_parts(road)

    def options(each: GraphSite) -> Options:
        why = excluded.get(each.site.name)
        site = each.site if why is None else dataclasses.replace(each.site, obstacle=why)
        return scored(site, each.allowed)

    return dataclasses.replace(road, options=tuple(map(options, road.found)))


def _with_parts(road: Road) -> dict[str, str]:
    """What is excluded, with the sites that excluded ones are grouped or split into. Chunks of one
    collective are excluded together."""
    excluded = dict(road.excluded)
    for fusion in road.grouped:
        if (name := next((name for name in fusion.sites if name in excluded), None)) is not None:
            excluded.setdefault(fusion.into, excluded[name])
    for split in road.chunked.done:
        names = (split.site, *split.into)
        if (name := next((name for name in names if name in excluded), None)) is not None:
            excluded |= {part: excluded.get(part, excluded[name]) for part in split.into}
    return excluded


def _choose(road: Road) -> Road:
    sites, allowed = [f.site for f in road.found], [f.allowed for f in road.found]
    wanted = road.hides and road.policy.leave_hidden and road.obstacle is None
    timed = wanted and any(each.possible for each in road.options)
    plan = choose(
        sites,
        road.options,
        allowed,
        road.profile,
        kernels=road.kernels,
        hook=road.hook,
        known=road.hidden if road.policy.leave_hidden else None,
        course=course_of(road.gm, road.found, road.policy, road.profile) if timed else None,
    )
    ends = limits(road.found, road.options, allowed, plan, road.profile)
    told = tuple(map(road.chunked.told, with_limits(plan, ends)))
    return dataclasses.replace(road, sites=told, limits=tuple(ends.values()))


def _rewrite(road: Road) -> Road:
    state, given = rewrite(road.found, road.sites or (), road.decompositions)
    taken = {name: Given((value,)) for name, value in given.items()}
    constants = lift_constants(road.gm, as_inputs=road.adds_inputs)
    return dataclasses.replace(road, state=state, constants=constants, given=taken)


def _fuse(road: Road) -> Road:
    sites = fuse(road.gm, road.sites or (), road.profile)
    return dataclasses.replace(road, sites=sites, given=road.given | given_to_products(road.gm))


def _lower(road: Road) -> Road:
    calls = {"calls": road.operators, "kernels": road.kernels}
    lower(road.gm, road.sites or (), road.decompositions, **calls)
    # Codecs inside of codecs name their constants only now.
    constants = lift_constants(road.gm, as_inputs=road.adds_inputs, before=road.constants)
    return dataclasses.replace(road, constants=constants)


def _move(road: Road) -> Road:
    if not road.found or road.policy.off or road.obstacle is not None:
        return road
    moved = move(road.gm, road.profile, road.policy.more_memory)
    return dataclasses.replace(road, moved=moved, sites=with_exposure(road.sites or (), moved))


def _verify(road: Road) -> Road:
    verify(road.gm, road.sites or ())
    return road


def _sample(road: Road) -> Road:
    checked = checked_sites(road)
    if not road.policy.watch and not checked:
        return road
    watched = bool(road.policy.watch)
    why = sample(road.gm, road.sites or (), road.given, checked, others=watched)
    return dataclasses.replace(road, sampled=why)


def checked_sites(road: Road) -> frozenset[str]:
    """The lossy sites whose budgets are checked on real values, by name."""
    if not road.policy.check_calls:
        return frozenset()
    bounded = {each.site.name for each in road.found if each.allowed.max_error is not None}
    sites = (site for site in road.sites or () if site.compressed and site.name in bounded)
    return frozenset(site.name for site in sites if not unsupported_reason(site))


PASSES: tuple[Pass, ...] = (
    Pass(name="discover", run=_discover, provides=("sites",), needed=True),
    Pass(name="simplify", run=_simplify, requires=("sites",), provides=("sites",), mutates=True),
    Pass(name="group", run=_group, requires=("sites",), provides=("sites",), mutates=True),
    Pass(name="chunk", run=_chunk, requires=("sites",), provides=("sites",), mutates=True),
    Pass(
        name="candidates", run=_candidates, requires=("sites",), provides=("options",), needed=True
    ),
    Pass(
        name="choose",
        run=_choose,
        requires=("sites", "options"),
        provides=("plan",),
        needed=True,
    ),
    Pass(
        name="rewrite",
        run=_rewrite,
        requires=("sites", "plan"),
        provides=("coded",),
        mutates=True,
        needed=True,
    ),
    Pass(
        name="fuse",
        run=_fuse,
        requires=("coded", "plan"),
        provides=("coded", "plan"),
        mutates=True,
    ),
    Pass(
        name="lower",
        run=_lower,
        requires=("coded", "plan"),
        provides=("plain",),
        mutates=True,
        needed=True,
    ),
    Pass(
        name="move",
        run=_move,
        requires=("plain", "plan"),
        provides=("plain", "plan"),
        mutates=True,
    ),
    Pass(name="verify", run=_verify, requires=("plain", "plan")),
    Pass(
        name="sample",
        run=_sample,
        requires=("plain", "plan"),
        provides=("plain", "plan"),
        mutates=True,
    ),
)


Watch = Callable[[str, Road], None]


ROUNDS = 8
"""How many times the passes run again without the sites that failed. One round finds all that fail
in one pass: more are only needed where that of others comes to light."""


@rewriting()
def run(
    road: Road,
    graph: str,
    passes: tuple[Pass, ...] | None = None,
    watch: Watch | None = None,
    *,
    strict: bool = False,
    excluded: Mapping[str, str] | None = None,
) -> Outcome:
    """Takes a graph along the road, in place. If a pass fails, the graph is the untouched one
    again; if only some sites failed, the passes run again without those, and a warning names them.

    ``watch`` is called with the name of each pass that has run. ``strict`` checks after each pass
    what it promises: a promise that is not kept is a failure, and nothing is tried again.
    ``excluded`` are reasons, by the names of sites in a plan of the same untouched graph: those are
    left alone with them, as are those of the road.
    """
    road = dataclasses.replace(road, excluded={**road.excluded, **(excluded or {})})
    given, outcome = road.excluded, _run_once(road, graph, passes, watch, strict)
    times = Counter(outcome.times_ms)
    for _ in range(0 if strict else ROUNDS):
        failed = {n: LEFT + why for n, why in outcome.failed.items()}
        if failed.keys() <= road.excluded.keys():
            break
        road = dataclasses.replace(road, excluded={**failed, **road.excluded})
        outcome = _run_once(road, graph, passes, watch, strict)
        times.update(outcome.times_ms)
    outcome.times_ms, outcome.excluded = dict(times), road.excluded
    left = [f"{name} is {why}" for name, why in road.excluded.items() if name not in given]
    if left and outcome.error is None:
        more = [f"and {len(left) - MOST} more"] if len(left) > MOST else []
        log.warning("%s graph %s: %s", road.direction, graph, "; ".join([*left[:MOST], *more]))
    return outcome


MOST = 4
"""Sites that a warning names."""


def _run_once(
    road: Road, graph: str, passes: tuple[Pass, ...] | None, watch: Watch | None, strict: bool
) -> Outcome:
    """All or nothing: if a pass fails, the graph is the untouched one again."""
    outcome = Outcome(
        Plan(
            graph=graph,
            direction=road.direction,
            policy=road.policy.name,
            profile=road.profile.name,
        )
    )
    contracts = Contracts() if strict or is_checked() else None
    for step in PASSES if passes is None else passes:
        if step.name in road.policy.skip:
            if step.needed:
                outcome.restore(f"the policy skips pass {step.name!r}")
                break
            continue
        start = time.perf_counter()
        if (step.mutates or contracts is not None) and not outcome.untouched:
            outcome.untouched = _copies(road)
        try:
            if contracts is not None:
                contracts.start(step, road)
            road = step.run(road)
            if contracts is not None:
                contracts.end(step, road)
        except SiteFailure as failure:
            outcome.failed = {n: _said(step, each) for n, each in failure.errors.items()}
            outcome.error = failure.first
            outcome.restore("; ".join(dict.fromkeys(outcome.failed.values())))
            return outcome
        except Exception as error:
            outcome.error = error
            outcome.restore(_said(step, error))
            return outcome
        finally:
            outcome.times_ms[step.name] = (time.perf_counter() - start) * 1e3
            outcome.found = road.found
        outcome.state, outcome.constants = road.state, road.constants
        outcome.pinned = road.moved.pinned
        outcome.limits, outcome.sampled = road.limits, road.sampled
        outcome.densities = road.thinned.densities
        outcome.first = outcome.first or tuple(found.site for found in road.found)
        outcome.plan = dataclasses.replace(
            outcome.plan,
            sites=road.sites or (),
            simplified=road.simplified,
            grouped=road.grouped,
            split=tuple(road.chunked.done),
            matched=road.matched,
            reordered=road.moved.reordered,
            order=road.moved.why,
            timed=road.thinned.groups,
        )
        if watch is not None:
            watch(step.name, road)
    if road.sites is not None and not outcome.plan.fallback:
        names = [site.name for site in road.sites]
        outcome.options = dict(zip(names, road.options, strict=True))
    return outcome


def _said(step: Pass, error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]  # torch goes on with hints and addresses
    return f"pass {step.name!r} failed: {type(error).__name__}: {said}"


def _copies(road: Road) -> dict[fx.GraphModule, fx.Graph]:
    """Copies of the graphs, where there is anything that could be changed."""
    if not road.found:
        return {}
    return {module: copied(module.graph) for _, module in graph_modules(road.gm)}
