"""The ranks of another compile stack compare what they will send, before they send it.

vLLM starts a process for each rank, on several hosts by several commands, and takes compiled code
from caches, in which case no pass runs. A rank may therefore have another policy, or none. The
comparison is an operator of the graph, just before its first exchange, and so part of the compiled
code. vLLM runs a graph before the first request, on GPUs all of them. torchtitan compiles in each
job, so its ranks compare while they compile.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from commpass.distributed.environment import settings
from commpass.distributed.plan_store import PlanStore, current_store
from commpass.distributed.waiting import listed, published_by_all
from commpass.errors import PlanMismatch, Unanswered
from commpass.groups import is_first_rank, ranks_of
from commpass.passes.fx.parse import parse
from commpass.plan import Plan
from commpass.plan.totals import totals
from commpass.policy import Policy
from commpass.utils.printable import plural

log = logging.getLogger("commpass")

PLAN, ENVIRONMENT = "; plan ", "; environment: "
"""What stands before the digest of a plan, and before the variables, in what ranks publish."""
PATIENCE_S = 300.0
"""How long a rank waits for the others, which may still compile."""
FAREWELL_S = 5.0
"""How long a rank that raises PlanMismatch waits until the others have read the plans."""

_library = torch.library.Library("commpass", "FRAGMENT")
_library.define("compare_plans(Tensor(a!) sent, str plan, str group) -> ()")

_compared: dict[tuple[str, str], PlanStore] = {}
"""The plans that were found equal, by group and text, in which run."""
_rounds: Counter[str] = Counter()


def summary(plan: Plan, policy: Policy, sizes: Mapping[Any, int]) -> str:
    """Return what was decided for a graph, in a line."""
    size = "".join(f" for {plural(tokens, 'token')}" for tokens in sizes.values())
    of = totals([plan])
    reasons = sorted({site.reason for site in plan.sites if not site.compressed and site.reason})
    why = f" ({reasons[0].partition('; ')[0]})" if reasons and not of.compressed else ""
    return (
        f"policy {policy.name!r}: {of.compressed} of {plural(of.sites, 'site')} compressed{why},"
        f" {of.wire_bytes:,} instead of {of.bytes:,} bytes{size}"
    )


def compare_before_sending(graph: fx.Graph, plan: str) -> bool:
    """Insert the comparison before the first exchange of a graph. Return whether there is one."""
    for node in graph.nodes:
        call = parse(node)
        if call is None or not node.all_input_nodes:
            continue
        sent = node.all_input_nodes[0]
        if sent.op == "placeholder":  # an input counts as modified then: Inductor would copy it
            continue
        with graph.inserting_before(node):
            compare = graph.call_function(
                torch.ops.commpass.compare_plans.default,
                (sent, plan, call.group),
            )
        compare.meta = {"val": None}
        return True
    return False


def _compare_in_graph(sent: Tensor, plan: str, group: str) -> None:
    compare(plan, group, "vLLM")


def described(plans: Sequence[Plan], summary: str, graphs: str = "") -> str:
    """Return what ``compare`` needs to know of the plan of a graph; of several plans if it has
    branches, and of none if it could not be planned.

    ``graphs`` is how a rank chooses between several graphs or branches.
    """
    digests = " or ".join(plan.digest() for plan in plans)
    return f"{summary}{PLAN}{digests or 'none'}{graphs}"


def compare(plan: str, group: str, stack: str) -> None:
    """Raise PlanMismatch if another rank of a group has another plan for its graph; Unanswered if
    it does not answer in time.

    The first call for a plan also logs its summary. ``stack`` is the library that runs the graph.
    """
    store = current_store()
    if _compared.get((group, plan)) is store:
        return
    ranks = ranks_of(group)
    key = f"{stack}/{'-'.join(map(str, ranks))}/{_rounds[group]}"
    _rounds[group] += 1
    own = f"{plan}{ENVIRONMENT}{settings().text or 'COMMPASS_POLICY is not set'}"
    store.publish(key, own.encode())
    found = published_by_all(store, key, ranks, PATIENCE_S, "compare plans")
    if missing := [rank for rank in ranks if rank not in found]:
        raise Unanswered(
            f"{plural(len(missing), 'rank')} ({listed(missing)}) did not compare plans within"
            f" {PATIENCE_S:g} s. Does {stack} there have commpass, and the same COMMPASS_POLICY?"
            f" Here: {own}"
        )
    plans = {rank: text.decode() for rank, text in found.items()}
    if len({_digest(text) for text in plans.values()}) > 1:
        _wait_for_readers(store, key, ranks)
        shown = "\n".join(f"  rank {rank}: {text}" for rank, text in sorted(plans.items())[:16])
        raise PlanMismatch(
            f"the ranks of {stack} would send different things. Start all of them with the same"
            f" policy and profile, and the same version of commpass:\n{shown}"
        )
    _compared[group, plan] = store
    log_on_first_rank(plan.partition(PLAN)[0])


def _digest(text: str) -> str:
    return text.partition(PLAN)[2].partition(ENVIRONMENT)[0]


def log_on_first_rank(text: str) -> None:
    if is_first_rank():
        log.info("commpass, %s", text)


def _wait_for_readers(store: PlanStore, key: str, ranks: tuple[int, ...]) -> None:
    """Wait until all ranks have read the plans: the process that raises may be the store's host."""
    end = time.monotonic() + FAREWELL_S
    with contextlib.suppress(dist.DistError):  # the host has raised, so it saw that this rank read
        store.publish(f"{key}/read", b"")
        while len(store.read_published(f"{key}/read", ranks)) < len(ranks):
            if time.monotonic() > end:
                return
            time.sleep(0.05)


_library.impl("compare_plans", _compare_in_graph, "CompositeExplicitAutograd")
torch.library.register_fake("commpass::compare_plans", lambda *_: None, lib=_library)
