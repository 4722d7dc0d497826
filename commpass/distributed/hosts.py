"""Determine the number of consecutive ranks on each host, equally on all ranks, if the profile
lacks it.

Each rank publishes its host with its hello record: host name, network, and torchrun's number of
the node. A rank that needs the number waits until all hosts are published. The first answer counts
for all ranks, even one after a time-out (``first_value``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch.distributed as dist
from torch import fx

from commpass.collectives import DEFAULTS
from commpass.costmodel import Profile
from commpass.distributed.first_value import first_value
from commpass.distributed.plan_store import PlanStore, current_store
from commpass.errors import Unanswered
from commpass.groups import ready, unsupported_reason
from commpass.passes.fx.parse import graph_modules
from commpass.policy import Policy
from commpass.policy.annotate import KEY

log = logging.getLogger("commpass")

PATIENCE_S = 60.0
"""How long a rank waits for the hosts of others."""
HIERARCHICAL = "hierarchical"


def with_hosts(
    profile: Profile, policy: Policy, gm: fx.GraphModule, timeout_s: float | None = None
) -> Profile:
    """Return the profile with its ``ranks_per_host``, if that is missing but needed.

    It is needed for ``hierarchical``, if a rule or an annotation names it without a number of
    ranks. The number is 0 on all ranks if hosts have different ones, or if not all ranks use
    commpass.
    """
    if profile.ranks_per_host or not _needs_ranks_per_host(policy, gm) or not is_distributed():
        return profile
    try:
        store = current_store()
        if store.ranks_per_host is None:
            store.ranks_per_host = _agree(store, min(timeout_s or PATIENCE_S, PATIENCE_S))
    except Unanswered:
        raise
    except RuntimeError as error:  # the store is gone: the comparison of plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return profile
    return dataclasses.replace(profile, ranks_per_host=store.ranks_per_host)


def on_each_host(host_of_rank: Sequence[str]) -> int:
    """Return the number of consecutive ranks on each host, from the hosts of all ranks in order.

    Return 0 if it is not the same number on all.
    """
    runs = [(host, len(list(run))) for host, run in groupby(host_of_rank)]
    hosts, sizes = {host for host, _ in runs}, {size for _, size in runs}
    return sizes.pop() if len(hosts) == len(runs) and len(sizes) == 1 else 0


def _needs_ranks_per_host(policy: Policy, gm: fx.GraphModule) -> bool:
    """Return whether the policy, or an annotation in a graph, names the algorithm without
    ``node``."""
    named = [spec for rule in policy.rules for spec in rule.algorithm or ()]
    named += policy.algorithms if policy.algorithms != DEFAULTS else ()
    nodes = (node for _, module in graph_modules(gm) for node in module.graph.nodes)
    customs = (node.meta.get("custom") for node in nodes)
    named += [str(custom[KEY]) for custom in customs if isinstance(custom, dict) and KEY in custom]
    return any(HIERARCHICAL in spec and "node=" not in spec for spec in named)


def is_distributed() -> bool:
    """Return whether there are other ranks that may be waited for.

    A fake group, which simulates many ranks in one, has none. Those that are threads of this
    process cannot answer while it compiles.
    """
    if not ready() or dist.get_world_size() == 1 or "fake" in dist.get_backend():
        return False
    return unsupported_reason() is None


def _agree(store: PlanStore, patience_s: float) -> int:
    ranks = range(dist.get_world_size())

    def value(hosts: Mapping[int, str]) -> str:
        complete = len(hosts) == len(ranks)
        return str(on_each_host([hosts[rank] for rank in ranks]) if complete else 0)

    found = first_value(
        store,
        "hosts",
        store.host_ids,
        value,
        without_rank_0="0",
        patience_s=patience_s,
        silent=SILENT,
    )
    return int(found)


SILENT = (
    "%d ranks did not publish their host within %g s, so algorithm hierarchical is not available."
    " Give the number of ranks of a host in the profile, Profile(ranks_per_host=8), or in the rule,"
    " hierarchical(node=8)"
)
