"""What runs with each call of a compiled graph: checks, timing, and samples of errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commpass import groups
from commpass.backend.options import Compiler
from commpass.backend.shared import Shared
from commpass.distributed import step_log
from commpass.distributed.calls import with_name
from commpass.distributed.samples import PLAIN, Sampled, Samples, label
from commpass.distributed.step_timer import StepTimer
from commpass.errors import ScopeError
from commpass.passes import PassContext
from commpass.passes.sample import RECEIVED, UNSEEN
from commpass.policy.annotate import open_scopes

SKIPPED = "the policy skips pass 'sample'"
UNKNOWN = "its error is not sampled, since the inner compiler may not know the sampling operator"


def check_call(
    shared: Shared, graph: str, counted: Callable[[], None] | None, members: groups.Members
) -> None:
    """Run before each call of a compiled graph."""
    members.check()
    if counted is not None:
        counted()
    if scopes := open_scopes():
        raise ScopeError(
            f"compress or keep ({scopes[-1]}) is open around a compiled call, from where it"
            " cannot reach the compiled graph. Write it inside the compiled code (on the"
            " module's class, or `with commpass.compress(...)` in its forward), or use"
            " commpass.apply_policy(model, {...}) before torch.compile; if a graph break"
            " separates the two, remove the break or move the annotation to the inner"
            " module."
        )
    shared.summary.count_call(graph)


def instrument(step_timer: StepTimer, function: Compiler, entry: step_log.Entry) -> Compiler:
    """Wrap a compiled graph: sample its errors, time it, and name it for profilers, as
    planned."""
    plan, labels = entry.plan, tuple(map(label, entry.plan.sites))
    name = f"graph {plan.graph} {plan.direction}"
    if len(labels) == 1:
        name = f"{labels[0]}, {name}"
    if entry.timed is not None:
        function = step_timer.with_timing(function, entry.timed)
    return with_name(function, name, labels, entry.samples)


def samples_of(outcome: PassContext, known: bool) -> Samples:
    """Return the sites of a compiled graph as those whose errors may be measured.

    ``known`` says whether the inner compiler knows the sampling operator.
    """
    policy = outcome.input.policy
    bounds: Sequence[float | None] = [each.allowed.max_error for each in outcome.found]
    forced = [each.allowed.force for each in outcome.found]
    if outcome.plan.fallback:
        bounds = [None] * len(outcome.plan.sites)
        forced = [False] * len(outcome.plan.sites)
    unseen = SKIPPED if "sample" in policy.skip else UNSEEN if known else UNKNOWN
    other = outcome.plan.fallback or unseen
    rows = zip(outcome.plan.sites, bounds, forced, strict=True)
    found = []
    for site, bound, force in rows:
        why = outcome.sampled.get(site.name, other if site.compressed else PLAIN)
        checked = bound is not None and not force and why in ("", RECEIVED)
        found.append(Sampled(site, bound, why, checked and site.compressed))
    return Samples(policy.error_sample_rate, found)
