"""The pipeline: the ordered list of passes, and the function that runs them on a graph.

A pass is a function from one PassContext to the next. ``PASSES`` declares what it requires,
provides and changes; ``contract`` checks this. ``Policy(skip=...)`` skips passes by name.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from torch import fx

from commpass.passes.allowed import allow, matched, still_allowed
from commpass.passes.candidates import Options, scoring
from commpass.passes.choose import choose
from commpass.passes.chunk import chunk
from commpass.passes.constants import lift_constants
from commpass.passes.context import PassContext, PassResult, copied
from commpass.passes.contract import Contracts, Pass
from commpass.passes.densities import thin
from commpass.passes.discover import GraphSite, discover
from commpass.passes.failures import SiteFailure
from commpass.passes.fuse import fuse
from commpass.passes.fx.erase import is_checked
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import graph_modules
from commpass.passes.group import group
from commpass.passes.hidden import initial_schedule as course_of
from commpass.passes.lower import lower
from commpass.passes.move import move, with_exposure
from commpass.passes.rewrite import rewrite
from commpass.passes.sample import EncodedValue, given_to_products, sample, unsupported_reason
from commpass.passes.simplify import simplify
from commpass.passes.sizes import limits, with_limits
from commpass.passes.verify import verify
from commpass.plan import LEFT, Plan
from commpass.utils.ambient import rewriting

log = logging.getLogger("commpass")


def _discovered(context: PassContext) -> list[GraphSite]:
    return discover(context.gm, context.direction, context.stateless, context.weights)


def _still_allowed(context: PassContext) -> tuple[GraphSite, ...]:
    return still_allowed(_discovered(context), context.policy, context.direction)


def _discover(context: PassContext) -> PassContext:
    for _, module in graph_modules(context.gm):  # the graph may have been through the passes before
        for node in module.graph.nodes:
            node.meta.pop(MARK, None)
    found = tuple(_discovered(context))
    if (why := context.obstacle) is not None:
        found = tuple(
            dataclasses.replace(f, site=dataclasses.replace(f.site, obstacle=why)) for f in found
        )
    found = allow(found, context.policy, context.direction)
    return dataclasses.replace(context, found=found, matched=matched(found, context.policy))


def _simplify(context: PassContext) -> PassContext:
    if not context.found or context.policy.off or context.obstacle is not None:
        return context
    applied = simplify(context.gm, context.found, context.policy, context.profile, context.own)
    found = _still_allowed(context)
    return dataclasses.replace(context, simplified=applied, found=found)


def _group(context: PassContext) -> PassContext:
    if context.obstacle is not None:
        return context
    what = (context.gm, context.found, context.policy, context.profile, context.direction)
    thinned = thin(*what, context.densities, timed=context.hides)
    if thinned.densities:
        context = dataclasses.replace(context, found=_still_allowed(context), thinned=thinned)
    grouped = group(context.gm, context.found, context.policy, context.profile, context.direction)
    if not grouped:
        return context
    found = _still_allowed(context)
    return dataclasses.replace(context, grouped=grouped, found=found)


def _chunk(context: PassContext) -> PassContext:
    if not context.found or context.policy.off or context.obstacle is not None:
        return context
    done = chunk(context.gm, context.found, context.policy, context.profile, context.direction)
    found = _still_allowed(context)
    return dataclasses.replace(context, chunked=done, found=found)


def _candidates(context: PassContext) -> PassContext:
    scored, excluded = scoring(context.profile, context.policy.reassociate), _with_parts(context)

    def options(each: GraphSite) -> Options:
        why = excluded.get(each.site.name)
        site = each.site if why is None else dataclasses.replace(each.site, obstacle=why)
        return scored(site, each.allowed)

    return dataclasses.replace(context, options=tuple(map(options, context.found)))


def _with_parts(context: PassContext) -> dict[str, str]:
    """Return the excluded sites, with the sites that they were grouped or split into. The chunks of
    one collective are excluded together."""
    excluded = dict(context.excluded)
    for fusion in context.grouped:
        if (name := next((name for name in fusion.sites if name in excluded), None)) is not None:
            excluded.setdefault(fusion.into, excluded[name])
    for split in context.chunked.done:
        names = (split.site, *split.into)
        if (name := next((name for name in names if name in excluded), None)) is not None:
            excluded |= {part: excluded.get(part, excluded[name]) for part in split.into}
    return excluded


def _choose(context: PassContext) -> PassContext:
    sites, allowed = [f.site for f in context.found], [f.allowed for f in context.found]
    wanted = context.hides and context.policy.leave_hidden and context.obstacle is None
    timed = wanted and any(each.possible for each in context.options)
    plan = choose(
        sites,
        context.options,
        allowed,
        context.profile,
        kernels=context.kernels,
        hook=context.hook,
        known=context.hidden if context.policy.leave_hidden else None,
        timeline=course_of(context.gm, context.found, context.policy, context.profile)
        if timed
        else None,
    )
    ends = limits(context.found, context.options, allowed, plan, context.profile)
    told = tuple(map(context.chunked.with_reason, with_limits(plan, ends)))
    return dataclasses.replace(context, sites=told, limits=tuple(ends.values()))


def _rewrite(context: PassContext) -> PassContext:
    state, given = rewrite(context.found, context.sites or (), context.decompositions)
    taken = {name: EncodedValue((value,)) for name, value in given.items()}
    constants = lift_constants(context.gm, as_inputs=context.adds_inputs)
    return dataclasses.replace(context, state=state, constants=constants, given=taken)


def _fuse(context: PassContext) -> PassContext:
    sites = fuse(context.gm, context.sites or (), context.profile)
    return dataclasses.replace(
        context, sites=sites, given=context.given | given_to_products(context.gm)
    )


def _lower(context: PassContext) -> PassContext:
    calls = {"calls": context.operators, "kernels": context.kernels}
    lower(context.gm, context.sites or (), context.decompositions, **calls)
    # Codecs inside codecs only now introduce their constants.
    constants = lift_constants(context.gm, as_inputs=context.adds_inputs, before=context.constants)
    return dataclasses.replace(context, constants=constants)


def _move(context: PassContext) -> PassContext:
    if not context.found or context.policy.off or context.obstacle is not None:
        return context
    moved = move(context.gm, context.profile, context.policy.more_memory)
    return dataclasses.replace(
        context, moved=moved, sites=with_exposure(context.sites or (), moved)
    )


def _verify(context: PassContext) -> PassContext:
    verify(context.gm, context.sites or ())
    return context


def _sample(context: PassContext) -> PassContext:
    checked = checked_sites(context)
    if not context.policy.watch and not checked:
        return context
    watched = bool(context.policy.watch)
    why = sample(context.gm, context.sites or (), context.given, checked, other_ranks=watched)
    return dataclasses.replace(context, sampled=why)


def checked_sites(context: PassContext) -> frozenset[str]:
    """Return the names of lossy sites whose error budgets are checked on real values."""
    if not context.policy.check_calls:
        return frozenset()
    bounded = {each.site.name for each in context.found if each.allowed.max_error is not None}
    sites = (site for site in context.sites or () if site.compressed and site.name in bounded)
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


Watch = Callable[[str, PassContext], None]


ROUNDS = 8
"""How many times the passes run again without the sites that failed.

One round finds all failures of one pass. Further rounds are needed only if their removal exposes
other failures.
"""


@rewriting()
def run(
    context: PassContext,
    graph: str,
    passes: tuple[Pass, ...] | None = None,
    watch: Watch | None = None,
    *,
    strict: bool = False,
    excluded: Mapping[str, str] | None = None,
) -> PassResult:
    """Run the passes on a graph, in place.

    If a pass fails, the untouched graph is restored. If only some sites failed, the passes run
    again without them, and a warning names them. ``watch`` is called with the name of each pass
    that has run. If ``strict``, the contract of each pass is checked; a broken contract is a
    failure, and nothing is retried. ``excluded`` maps names of sites in a plan of the same
    untouched graph to reasons. These sites stay uncompressed, like the sites that the context
    excludes.
    """
    context = dataclasses.replace(context, excluded={**context.excluded, **(excluded or {})})
    given, outcome = context.excluded, _run_once(context, graph, passes, watch, strict)
    times = Counter(outcome.times_ms)
    for _ in range(0 if strict else ROUNDS):
        failed = {n: LEFT + why for n, why in outcome.failed.items()}
        if failed.keys() <= context.excluded.keys():
            break
        context = dataclasses.replace(context, excluded={**failed, **context.excluded})
        outcome = _run_once(context, graph, passes, watch, strict)
        times.update(outcome.times_ms)
    outcome.times_ms, outcome.excluded = dict(times), context.excluded
    left = [f"{name} is {why}" for name, why in context.excluded.items() if name not in given]
    if left and outcome.error is None:
        more = [f"and {len(left) - MOST} more"] if len(left) > MOST else []
        log.warning("%s graph %s: %s", context.direction, graph, "; ".join([*left[:MOST], *more]))
    return outcome


MOST = 4
"""The maximum number of sites that a warning names."""


def _run_once(
    context: PassContext,
    graph: str,
    passes: tuple[Pass, ...] | None,
    watch: Watch | None,
    strict: bool,
) -> PassResult:
    """Run the passes once. If one fails, restore the untouched graph."""
    outcome = PassResult(
        Plan(
            graph=graph,
            direction=context.direction,
            policy=context.policy.name,
            profile=context.profile.name,
        )
    )
    contracts = Contracts() if strict or is_checked() else None
    for step in PASSES if passes is None else passes:
        if step.name in context.policy.skip:
            if step.needed:
                outcome.restore(f"the policy skips pass {step.name!r}")
                break
            continue
        start = time.perf_counter()
        if (step.mutates or contracts is not None) and not outcome.untouched:
            outcome.untouched = _copies(context)
        try:
            if contracts is not None:
                contracts.start(step, context)
            context = step.run(context)
            if contracts is not None:
                contracts.end(step, context)
        except SiteFailure as failure:
            outcome.failed = {n: _failure_text(step, each) for n, each in failure.errors.items()}
            outcome.error = failure.first
            outcome.restore("; ".join(dict.fromkeys(outcome.failed.values())))
            return outcome
        except Exception as error:
            outcome.error = error
            outcome.restore(_failure_text(step, error))
            return outcome
        finally:
            outcome.times_ms[step.name] = (time.perf_counter() - start) * 1e3
            outcome.found = context.found
        outcome.state, outcome.constants = context.state, context.constants
        outcome.pinned = context.moved.pinned
        outcome.limits, outcome.sampled = context.limits, context.sampled
        outcome.densities = context.thinned.densities
        outcome.first = outcome.first or tuple(found.site for found in context.found)
        outcome.plan = dataclasses.replace(
            outcome.plan,
            sites=context.sites or (),
            simplified=context.simplified,
            grouped=context.grouped,
            split=tuple(context.chunked.done),
            matched=context.matched,
            reordered=context.moved.reordered,
            order=context.moved.why,
            timed=context.thinned.groups,
        )
        if watch is not None:
            watch(step.name, context)
    if context.sites is not None and not outcome.plan.fallback:
        names = [site.name for site in context.sites]
        outcome.options = dict(zip(names, context.options, strict=True))
    return outcome


def _failure_text(step: Pass, error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]  # torch appends hints and addresses
    return f"pass {step.name!r} failed: {type(error).__name__}: {said}"


def _copies(context: PassContext) -> dict[fx.GraphModule, fx.Graph]:
    """Copy the graphs if they contain sites, else return nothing."""
    if not context.found:
        return {}
    return {module: copied(module.graph) for _, module in graph_modules(context.gm)}
