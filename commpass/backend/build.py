"""Build one graph: plan it, record it, compile it, and wrap what is then called."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import fx
from torch._dynamo.exc import ShortenTraceback
from torch._guards import tracing

from commpass import groups
from commpass.backend import agree, tune
from commpass.backend.calls import instrument, samples_of
from commpass.backend.records import GraphDump, record_plan
from commpass.backend.shared import Job, Shared
from commpass.costmodel import Profile
from commpass.distributed import compile_progress, record, step_log, step_times
from commpass.distributed.budget import OVER, Check, Key
from commpass.distributed.calls import (
    Raising,
    callable_of,
    constants_of,
    state_for,
    with_more,
)
from commpass.distributed.checked import Built
from commpass.distributed.parts import can_compare
from commpass.distributed.peers import allocate, peer_memory
from commpass.distributed.plan_store import Round
from commpass.distributed.samples import MORE, label
from commpass.distributed.step_timer import TimedGraph
from commpass.errors import PolicyError, Unanswered
from commpass.lowering.gpu import side_stream
from commpass.passes import GraphInput, PassContext
from commpass.passes.fx import meta
from commpass.passes.fx.marks import chunked, has_kernels_beside, has_single_kernels
from commpass.passes.fx.parse import is_collective
from commpass.passes.single_kernel import limit_peer_memory, no_peer_memory
from commpass.passes.timeline import whole_us
from commpass.plan import UNCOMPRESSED, Plan
from commpass.utils.ambient import without_ambient_state

LAST = (
    "%s is compiled for the last time here (torch._dynamo.config.recompile_limit is %d). This rank"
    " would run a call that needs another graph uncompiled, while other ranks run compressed"
    " collectives: then ranks hang, or compute wrong sums. Mark sizes that change with"
    " torch._dynamo.mark_dynamic, raise the limit, or set"
    " torch._dynamo.config.fail_on_recompile_limit_hit, which makes it an error"
)


class PassingUnanswered(Unanswered, ShortenTraceback):
    """An Unanswered that passes through Dynamo unchanged.

    Dynamo keeps nothing of the graph. The next call compiles it again, possibly with new process
    groups.
    """

    def __init__(self, error: Unanswered):
        super().__init__(str(error), first_useful_frame=None)


PassingUnanswered.__name__ = PassingUnanswered.__qualname__ = Unanswered.__name__


@contextmanager
def passing_unanswered() -> Iterator[None]:
    """Let an Unanswered pass through Dynamo unchanged."""
    try:
        yield
    except Unanswered as error:
        raise PassingUnanswered(error) from error


def build(shared: Shared, job: Job, before: PassContext | None = None) -> Built | Raising:
    """Build a graph that is still unchanged. ``before`` is the result that it was compiled from so
    far."""
    step_times.note_compile()
    with compile_progress.compiling(f"graph {job.number} ({job.direction})"):
        return _build(shared, job, before)


def _build(shared: Shared, job: Job, before: PassContext | None) -> Built | Raising:
    instead_of = before.plan if before is not None else None
    gm, calls, profile = job.gm, job.calls, job.profile
    given = _input(shared, job, before.excluded if before is not None else {})
    record.trace_graph(gm, f"{job.direction}_before")
    device = meta.device_of(gm)
    is_timed = groups.is_first_rank() and device in ("cpu", "cuda") and shared.inner == "inductor"
    plain_us = _predicted_us(gm, profile) if is_timed else None
    dump = GraphDump(shared.dump, shared.run, shared.policy)

    def on_pass_end(step: str, context: PassContext) -> None:
        compile_progress.stage(f"passes after {step!r}")
        dump.on_pass_end(step, context)

    compile_progress.stage("passes")
    outcome, mismatch, round = agree.plan_graph(shared, given, job, on_pass_end)
    if mismatch is None and outcome.error is None:
        with passing_unanswered():
            tune.set_tile_sizes(shared, job, outcome, round)
    plan = outcome.plan
    raised = isinstance(outcome.error, PolicyError) or mismatch is not None
    if outcome.error is not None and not raised:
        why, number = plan.fallback, job.number
        record.log.warning("%s graph %s compiled untouched: %s", job.direction, number, why)
    if instead_of is None:
        record_plan(shared, outcome, job, None, summed=not raised)
    record.trace_graph(gm, f"{job.direction}_after")
    if calls.is_last_compile and plan.changed:
        calls.is_last_compile = False
        record.log.warning(LAST, calls.code.name, torch._dynamo.config.recompile_limit)
    dump.write(outcome)
    if isinstance(mismatch, Unanswered):
        raise PassingUnanswered(mismatch)
    if mismatch is not None:
        return Raising(mismatch)
    if isinstance(outcome.error, PolicyError):
        return Raising(outcome.error)
    if outcome.error is not None and shared.strict:
        raise outcome.error
    if job.direction == "backward":
        calls.keeps_state = bool(outcome.state)
    elif outcome.state:
        calls.keeps_references = True
    more = [each.fake for each in outcome.state]
    more += [each.fake for each in outcome.constants]
    planned_us = _predicted_us(gm, profile) if plain_us is not None else None
    allocate(plan.executed)
    has_beside = has_kernels_beside(gm)
    pinned = outcome.moved.pinned or chunked(gm) or has_single_kernels(gm)
    compile_progress.stage("the compiler")
    compiled = job.compile_graph(gm, more, pinned, plan.changed)
    if instead_of is not None:  # not earlier: a failed compile leaves the earlier plan in use
        record_plan(shared, outcome, job, instead_of)
    state = state_for(outcome.state, gm, calls, job.direction)
    graph = None
    if plan.sites and planned_us is not None and plain_us is not None:
        name, warns_if_slower = f"{job.number} ({job.direction})", plan.changed and profile.measured
        graph = TimedGraph(name, planned_us, plain_us, warns_if_slower, device)
    samples = samples_of(outcome, shared.samples)
    entry = step_log.Entry(plan, samples, graph, profile.description)
    shared.step_log.put(entry, instead_of)
    patience, compared = shared.patience(plan), _is_compared(plan, round)
    again = agree.recomputed_sites(job, plan)  # forward checks them
    check = Check(samples, round, given.policy.check_calls, patience, decides=compared, skip=again)
    if job.direction == "forward":
        calls.forward = plan
    function = instrument(shared.step_timer, callable_of(compiled), entry)
    function = side_stream.joining(function) if has_beside else function
    function = with_more(function, functools.partial(constants_of, outcome.constants))
    function = with_more(function, state)
    strides = getattr(compiled, "output_strides", None)
    return Built(compiled, function, check, strides, outcome)


def rebuild(shared: Shared, job: Job, built: Built, over: Mapping[Key, str]) -> Built | None:
    """Compile the graph again without the sites that are ``over`` their budget. Return None if it
    has no such site."""
    outcome = built.outcome
    shared.over |= {(job.place, key): why for key, why in over.items()}
    names = agree.excluded_sites(shared, job, outcome.plan)
    if not names:
        return None
    plan, untouched = outcome.plan, outcome.copies()
    outcome.restore("it is compiled again")
    outcome.plan = plan
    try:
        with torch.inference_mode(False), without_ambient_state(), tracing(job.context):
            made = build(shared, job, outcome)
        if isinstance(made, Raising):
            raise made.error
    except BaseException:
        outcome.untouched = untouched  # for the next call, which tries again
        raise
    if built.check.is_first:
        again = agree.recomputed_sites(job, plan)  # named with the forward graph
        for site in plan.sites:
            if site.name in names and site.name not in again:
                why = names[site.name].removeprefix(UNCOMPRESSED)
                record.log.warning(OVER, label(site), site.kind, why, MORE)
    return made


def is_behind(shared: Shared, job: Job, built: Built) -> bool:
    """Whether a compressed site of a graph must stay uncompressed by now."""
    return bool(agree.excluded_sites(shared, job, built.outcome.plan))


def _input(shared: Shared, job: Job, excluded: Mapping[str, str]) -> GraphInput:
    """Return the input of the passes."""
    policy = shared.policy
    if not shared.samples:
        policy = dataclasses.replace(policy, error_sample_rate=0.0, check_calls=0)
    return GraphInput(
        gm=job.gm,
        direction=job.direction,
        policy=policy,
        profile=job.profile,
        decompositions=job.decompositions,
        stateless=job.stateless,
        weights=job.calls.weights(job.gm, job.direction, job.stateless),
        unsupported_reason=job.unsupported_reason or groups.unsupported_reason(),
        kernels=shared.inner == "inductor",
        operators=shared.samples,
        adds_inputs=True,
        hook=job.calls.hook,
        hidden=shared.hidden,
        densities=shared.densities,
        hides=True,
        excluded=excluded,
        peer_memory=(
            limit_peer_memory(peer_memory, job.gm)
            if _has_one_stream(shared, job)
            else no_peer_memory
        ),
    )


def _has_one_stream(shared: Shared, job: Job) -> bool:
    """Whether the exchanges of a graph follow those of all others in one stream. Hooks may run in a
    stream of their own."""
    return shared.inner == "inductor" and not job.calls.hook


def _predicted_us(gm: fx.GraphModule, profile: Profile) -> float | None:
    """Return the predicted time of a graph with collectives, else None.

    The prediction is only reported, so a failure is only logged.
    """
    if all(not is_collective(node) for node in gm.graph.nodes):
        return None
    try:
        return whole_us(gm, profile)
    except Exception as error:
        record.log.debug("nothing is predicted for this graph: %s", error)
        return None


def _is_compared(plan: Plan, round: Round | None) -> bool:
    """Whether the ranks of a plan's groups compared it, or no group could compare it."""
    return round is not None or not any(can_compare(site.group) for site in plan.sites)
