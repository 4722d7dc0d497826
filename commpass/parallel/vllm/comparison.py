"""The ranks compare what they will send, when a graph runs for the first time.

vLLM starts a process for each rank, on several hosts by several commands, and takes compiled code
from caches, in which case no pass runs. A rank may therefore have another policy, or none. The
comparison is an operator of the graph, just before its first exchange, and so part of the compiled
code. vLLM runs each graph once before the first request.
"""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch import Tensor, fx

from commpass.distributed.environment import settings
from commpass.distributed.plan_store import PlanStore, current_store
from commpass.errors import PlanMismatch, Unanswered
from commpass.groups import ranks_of
from commpass.passes.fx.parse import parse
from commpass.plan import Plan
from commpass.policy import Policy
from commpass.utils.printable import plural

PATIENCE_S = 60.0
"""How long a rank waits for the others. They compile the same graph, and begin at the same time."""

_library = torch.library.Library("commpass", "FRAGMENT")
_library.define("compare_plans(Tensor(a!) sent, str plan, str group) -> ()")

_compared: dict[tuple[str, str], PlanStore] = {}
"""The plans that were found equal, by group and text, in which run."""
_rounds: Counter[str] = Counter()


def compare_before_sending(graph: fx.Graph, plan: Plan, policy: Policy) -> None:
    """Insert the comparison before the first exchange of a graph, if it has one."""
    for node in graph.nodes:
        call = parse(node)
        if call is None or not node.all_input_nodes:
            continue
        sent = node.all_input_nodes[0]
        if sent.op == "placeholder":  # an input counts as modified then: Inductor would copy it
            continue
        what = f"policy {policy.name!r}, plan {plan.digest()}, {_in_words(plan)}"
        with graph.inserting_before(node):
            compare = graph.call_function(
                torch.ops.commpass.compare_plans.default, (sent, what, call.group)
            )
        compare.meta = {"val": None}
        return


def _in_words(plan: Plan) -> str:
    compressed = sum(site.compressed for site in plan.sites)
    return f"{compressed} of {plural(len(plan.sites), 'site')} compressed"


def _compare(sent: Tensor, plan: str, group: str) -> None:
    """Raise PlanMismatch if another rank of a group runs a graph with another plan; Unanswered if
    it does not answer in time."""
    store = current_store()
    if _compared.get((group, plan)) is store:
        return
    ranks = ranks_of(group)
    key = f"vllm/{'-'.join(map(str, ranks))}/{_rounds[group]}"
    _rounds[group] += 1
    own = f"{plan}; {settings().text or 'COMMPASS_POLICY is not set'}"
    store.publish(key, own.encode())
    found = _wait_for(store, key, ranks)
    if missing := [rank for rank in ranks if rank not in found]:
        raise Unanswered(
            f"{plural(len(missing), 'rank')} ({_listed(missing)}) did not compare plans within"
            f" {PATIENCE_S:g} s. Does vLLM there have commpass, and the same COMMPASS_POLICY?"
            f" Here: {own}"
        )
    plans = {rank: text.decode() for rank, text in found.items()}
    if len({text.partition(";")[0] for text in plans.values()}) > 1:
        shown = "\n".join(f"  rank {rank}: {text}" for rank, text in sorted(plans.items())[:16])
        raise PlanMismatch(
            "the ranks of vLLM would send different things. Start all of them with the same policy"
            f" and profile, and the same version of commpass:\n{shown}"
        )
    _compared[group, plan] = store


def _wait_for(store: PlanStore, key: str, ranks: tuple[int, ...]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    end, pause = time.monotonic() + PATIENCE_S, 0.001
    while True:
        found |= store.read_published(key, [rank for rank in ranks if rank not in found])
        if len(found) == len(ranks) or time.monotonic() > end:
            return found
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")


_library.impl("compare_plans", _compare, "CompositeExplicitAutograd")
torch.library.register_fake("commpass::compare_plans", lambda *_: None, lib=_library)
