"""The manager: the index of all passes, in order, and the function that runs them on a graph.

    pass        requires        provides       what it does
    discover    -               sites          finds the collectives, and what is allowed them
    simplify    sites           sites          removes or shrinks exchanges by algebra
    group       sites           sites          combines small exchanges
    chunk       sites           sites          splits exchanges beside matmuls into chunks of rows
    candidates  sites           options        lists all ways to carry out each site
    choose      sites, options  plan           chooses one of them, by the end of the graph
    rewrite     sites, plan     coded          inserts the chosen algorithms as codec operators
    fuse        coded, plan     coded, plan    joins codec operators that one kernel can compute
    lower       coded, plan     plain          replaces codec operators by what Inductor compiles
    streams     plain, plan     plain, plan    gives single kernels a separate stream
    move        plain, plan     plain, plan    starts exchanges early, and computes meanwhile
    verify      plain, plan     -              compares the graph with the plan
    sample      plain, plan     plain, plan    inserts the operator that samples errors
    order       plain           -              keeps that order in Inductor (phase post-grad)

Before all of them, ``joint`` marks what the joint graph of forward and backward saves. It is not
called by the manager.

Each pass is in a file of its name. ``contract`` explains and checks the facts that passes require
and provide. ``Policy(skip=...)`` skips passes by name. The manager runs the passes of phase graph;
``post.order.ordered`` gives Inductor those of phase post-grad.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from commpass import groups
from commpass.passes import (
    candidates,
    choose,
    chunk,
    densities,
    discover,
    fuse,
    group,
    lower,
    move,
    rewrite,
    sample,
    simplify,
    streams,
    verify,
)
from commpass.passes.context import GraphInput, PassContext
from commpass.passes.contract import GRAPH, POST_GRAD, Contracts, Pass
from commpass.passes.failures import SiteFailure
from commpass.passes.fx.erase import is_checked
from commpass.passes.fx.parse import parsing_once
from commpass.plan import UNCOMPRESSED
from commpass.utils.ambient import rewriting
from commpass.utils.collector import collection_paused
from commpass.utils.frames import roomy

log = logging.getLogger("commpass")


def _group(context: PassContext) -> None:
    densities.run(context)  # not in group, which it imports
    group.run(context)


SITES, CODED, LOWERED = ("sites",), ("coded", "plan"), ("plain", "plan")
EDIT_SITES: dict[str, Any] = {
    "requires": SITES,
    "provides": SITES,
    "mutates": True,
    "needs_sites": True,
}
EDIT_LOWERED = EDIT_SITES | {"requires": LOWERED, "provides": LOWERED}

PASSES: tuple[Pass, ...] = (
    Pass(name="discover", run=discover.run, provides=SITES, needed=True),
    Pass(name="simplify", run=simplify.run, **EDIT_SITES),
    Pass(name="group", run=_group, **EDIT_SITES),
    Pass(name="chunk", run=chunk.run, **EDIT_SITES),
    Pass(name="candidates", run=candidates.run, requires=SITES, provides=("options",), needed=True),
    Pass(
        name="choose",
        run=choose.run,
        requires=("sites", "options"),
        provides=("plan",),
        needed=True,
    ),
    Pass(
        name="rewrite",
        run=rewrite.run,
        requires=("sites", "plan"),
        provides=("coded",),
        mutates=True,
        needed=True,
    ),
    Pass(name="fuse", run=fuse.run, requires=CODED, provides=CODED, mutates=True),
    Pass(
        name="lower", run=lower.run, requires=CODED, provides=("plain",), mutates=True, needed=True
    ),
    Pass(name="streams", run=streams.run, **EDIT_LOWERED),
    Pass(name="move", run=move.run, **EDIT_LOWERED),
    Pass(name="verify", run=verify.run, requires=LOWERED),
    Pass(name="sample", run=sample.run, **EDIT_LOWERED),
    Pass(name="order", phase=POST_GRAD, requires=("plain",), mutates=True),
)

OnPassEnd = Callable[[str, PassContext], None]


ROUNDS = 8
"""How many times the passes run again without the sites that failed.

One round finds all failures of one pass. Further rounds are needed only if their removal exposes
other failures.
"""
MOST = 4
"""The maximum number of sites that a warning names."""


@roomy
@collection_paused()
@rewriting()
@parsing_once()
@groups.unchanged()
def run(
    graph_input: GraphInput,
    graph: str,
    passes: tuple[Pass, ...] | None = None,
    on_pass_end: OnPassEnd | None = None,
    *,
    strict: bool = False,
    excluded: Mapping[str, str] | None = None,
) -> PassContext:
    """Run the passes of phase graph on a graph, in place, and return their results.

    If a pass fails, the untouched graph is restored. If only some sites failed, the passes run
    again without them, from a fresh context, and a warning names them. ``on_pass_end`` is called
    with the name of each pass that has run. If ``strict``, the contract of each pass is checked; a
    broken contract is a failure, and nothing is retried. ``excluded`` maps names of sites in a plan
    of the same untouched graph to reasons. These sites stay uncompressed, like the sites that the
    input excludes.
    """
    given = {**graph_input.excluded, **(excluded or {})}
    steps = [step for step in (PASSES if passes is None else passes) if step.phase == GRAPH]
    times: Counter[str] = Counter()
    left, rounds = dict(given), 0 if strict else ROUNDS
    while True:
        context = PassContext.of(dataclasses.replace(graph_input, excluded=left), graph)
        _run_once(context, steps, on_pass_end, strict)
        times.update(context.times_ms)
        failed = {name: UNCOMPRESSED + why for name, why in context.failed.items()}
        if not rounds or failed.keys() <= left.keys():
            break
        left, rounds = {**failed, **left}, rounds - 1
    context.times_ms = dict(times)
    new = [f"{name} is {why}" for name, why in left.items() if name not in given]
    if new and context.error is None:
        more = [f"and {len(new) - MOST} more"] if len(new) > MOST else []
        reasons = "; ".join([*new[:MOST], *more])
        log.warning("%s graph %s: %s", graph_input.direction, graph, reasons)
    return context


def _run_once(
    context: PassContext, steps: list[Pass], on_pass_end: OnPassEnd | None, strict: bool
) -> None:
    """Run the passes once. If one fails, restore the untouched graph."""
    contracts = Contracts() if strict or is_checked() else None
    for step in steps:
        if step.name in context.input.policy.skip:
            if step.needed:
                context.restore(f"the policy skips pass {step.name!r}")
                return
            continue
        start = time.perf_counter()
        if step.mutates or contracts is not None:
            context.keep_untouched()
        try:
            if contracts is not None:
                contracts.start(step, context)
            if step.run is not None and (context.changeable or not step.needs_sites):
                step.run(context)
            if context.sites_changed:
                discover.refresh_sites(context)
            if contracts is not None:
                contracts.end(step, context)
        except SiteFailure as failure:
            texts = {name: _failure_text(step, each) for name, each in failure.errors.items()}
            context.failed, context.error = texts, failure.first
        except Exception as error:
            context.error = error
        finally:
            context.times_ms[step.name] = (time.perf_counter() - start) * 1e3
        if context.error is not None:
            whys = context.failed.values() or (_failure_text(step, context.error),)
            context.restore("; ".join(dict.fromkeys(whys)))
            return
        if on_pass_end is not None:
            on_pass_end(step.name, context)


def _failure_text(step: Pass, error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]  # torch appends hints and addresses
    return f"pass {step.name!r} failed: {type(error).__name__}: {first_line}"
