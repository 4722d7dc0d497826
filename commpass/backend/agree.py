"""Plan one graph, and agree with the other ranks on its plan."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from commpass.backend.shared import Job, Shared
from commpass.costmodel.files import digest as digest_of
from commpass.distributed import agreement, record
from commpass.distributed.budget import keys_of
from commpass.distributed.origin import call_of
from commpass.distributed.plan_store import Round
from commpass.errors import CommpassError, PlanMismatch
from commpass.groups import ready
from commpass.passes import GraphInput, PassContext
from commpass.passes import run as run_passes
from commpass.passes.fx.parse import describe_group, graph_modules, parse
from commpass.passes.hidden import decided
from commpass.passes.manager import OnPassEnd
from commpass.plan import NONE, UNCOMPRESSED, Plan

Agreed = tuple[PassContext, PlanMismatch | None, Round | None]


def plan_graph(shared: Shared, graph_input: GraphInput, job: Job, on_pass_end: OnPassEnd) -> Agreed:
    """Run the passes and compare the plan with the other ranks. Return the result, a mismatch if
    any, and the round of the comparison.

    If one rank cannot carry out the common plan, the result is the untouched graph (law 7).
    """
    number = job.number
    while True:
        outcome = run_passes(graph_input, number, on_pass_end=on_pass_end, strict=shared.strict)
        if not (over := excluded_sites(shared, job, outcome.plan)):
            break
        outcome.restore("a site stays uncompressed")
        graph_input = dataclasses.replace(graph_input, excluded={**outcome.excluded, **over})
    plan = outcome.plan
    try:
        agreement.same_environment(shared.timeout)
        why, round = agreement.agree(
            plan, outcome.first, _ends(outcome), _participant(shared, job), shared.timeout
        )
    except PlanMismatch as mismatch:
        outcome.restore(f"the ranks planned differently: {mismatch}")
        return outcome, mismatch, None
    if why in (agreement.HIDDEN, agreement.LOCAL_PART):
        record.log.info("graph %s is planned once more: %s", number, why)
        outcome.restore(why)
        changes: dict[str, Any] = {"own": False}
        if why == agreement.HIDDEN:
            changes = {"hides": False} if graph_input.hides else {"hidden": None, "densities": None}
            changes["excluded"] = outcome.excluded
        return plan_graph(shared, dataclasses.replace(graph_input, **changes), job, on_pass_end)
    if why and not plan.fallback:
        outcome.restore(why)
        outcome.error = CommpassError(why)
    shared.hidden |= decided(outcome.plan)
    shared.densities |= outcome.densities.by_site
    for limit in outcome.limits:
        limit.install_guard()
    return outcome, None, round


def excluded_sites(shared: Shared, job: Job, plan: Plan) -> dict[str, str]:
    """Return the compressed sites of a plan that must stay uncompressed, with the reasons.

    They are known to be over their budget, or backward recomputes them and forward leaves them
    uncompressed.
    """
    rank = dist.get_rank() if ready() else 0
    keys, place = keys_of(plan.sites, rank), job.place
    found = {site.name: (place, keys[site.name]) for site in plan.compressed}
    over = {n: UNCOMPRESSED + shared.over[key] for n, key in found.items() if key in shared.over}
    return over | _excluded_in_forward(job, recomputed_sites(job, plan))


def _excluded_in_forward(job: Job, names: Sequence[str]) -> dict[str, str]:
    """Return those of the recomputed sites that forward leaves uncompressed, with the reasons.

    Backward numbers the branches of ``torch.cond`` anew. So several sites of forward may be the one
    that is recomputed in a branch. It is left uncompressed if one of them is.
    """
    if job.calls.forward is None or not names:
        return {}
    plain = (site for site in job.calls.forward.sites if site.codec == NONE)
    left = {_unnumbered(s.name): s.reason for s in plain if s.reason.startswith(UNCOMPRESSED)}
    return {name: left[_unnumbered(name)] for name in names if _unnumbered(name) in left}


def _unnumbered(name: str) -> str:
    """Return a site's name without the numbers of sub-graphs: ``true_graph.all_reduce``."""
    return re.sub(r"_\d+(?=\.)", "", name)


def recomputed_sites(job: Job, plan: Plan) -> list[str]:
    """Return the compressed sites of a backward graph that send again what its forward graph sent.
    They must send the same."""
    if job.direction != "backward" or job.calls.forward is None:
        return []
    return [site.name for site in plan.compressed if site.direction == "forward"]


def _participant(shared: Shared, job: Job) -> agreement.Participant:
    """Return this rank's participant. It identifies policy and profile by their contents, not their
    names, and what is compiled."""
    facts = [{**msgspec.to_builtins(shared.policy), "name": ""}, digest_of(job.profile)]
    digest = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]
    origin = job.origin
    return agreement.Participant(
        digest,
        shared.policy.name,
        f"{shared.run}/{shared.resets}",
        origin.function,
        call_of(origin, job.direction) if origin.code else "",
    )


def _ends(outcome: PassContext) -> set[tuple[str, int | None]]:
    """Return (group, peer) of a graph's collectives if a pass failed before sites were found, else
    nothing."""
    if outcome.first or not outcome.plan.fallback:
        return set()
    calls = (parse(node) for _, module in graph_modules(outcome.gm) for node in module.graph.nodes)
    return {
        (describe_group(call)[0], end.peer if end else None)
        for call in calls
        if call is not None
        for end in call.ends or (None,)
    }
