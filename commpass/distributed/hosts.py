"""Determine the number of consecutive ranks on each host, alike on all ranks, if the profile lacks
it.

Each rank publishes its place with its hello record: host name, network, and torchrun's number of
the node. A rank that needs the number waits until all places are published. The first answer counts
for all ranks, even one after a time-out: it is written to the store by compare-and-set.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist
from torch import fx

from commpass.collectives import DEFAULTS
from commpass.costmodel import Profile
from commpass.distributed.plan_store import PlanStore, board
from commpass.groups import ready
from commpass.passes.fx.parse import graph_modules
from commpass.policy import Policy
from commpass.policy.annotate import KEY

log = logging.getLogger("commpass")

PATIENCE_S = 60.0
"""How long a rank waits for the places of others."""
LONGEST_PAUSE_S = 0.25
HIERARCHICAL = "hierarchical"


def with_hosts(
    profile: Profile, policy: Policy, gm: fx.GraphModule, timeout_s: float | None = None
) -> Profile:
    """Return the profile with its ``ranks_per_host``, if that is missing but needed.

    It is needed for ``hierarchical``, if a rule or an annotation names it without a number of
    ranks. The number is 0 on all ranks if hosts have different ones, or if not all ranks use
    commpass.
    """
    if profile.ranks_per_host or not _asks(policy, gm) or not _is_distributed():
        return profile
    try:
        here = board()
        if here.node is None:
            here.node = _agreed(here, min(timeout_s or PATIENCE_S, PATIENCE_S))
    except RuntimeError as error:  # the store is gone: the comparison of plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return profile
    return dataclasses.replace(profile, ranks_per_host=here.node)


def on_each_host(places: Sequence[str]) -> int:
    """Return the number of consecutive ranks on each host, from the places of all ranks in order.

    Return 0 if it is not the same number on all.
    """
    runs = [(place, len(list(run))) for place, run in groupby(places)]
    hosts, sizes = {place for place, _ in runs}, {size for _, size in runs}
    return sizes.pop() if len(hosts) == len(runs) and len(sizes) == 1 else 0


def _asks(policy: Policy, gm: fx.GraphModule) -> bool:
    """Return whether the policy, or an annotation in a graph, names the algorithm without
    ``node``."""
    named = [spec for rule in policy.rules for spec in rule.algorithm or ()]
    named += policy.algorithms if policy.algorithms != DEFAULTS else ()
    nodes = (node for _, module in graph_modules(gm) for node in module.graph.nodes)
    words = (node.meta.get("custom") for node in nodes if node.meta.get("custom"))
    named += [str(custom[KEY]) for custom in words if isinstance(custom, dict) and KEY in custom]
    return any(HIERARCHICAL in spec and "node=" not in spec for spec in named)


def _is_distributed() -> bool:
    """Return whether there are other ranks. A fake group, which simulates many ranks in one, has
    none."""
    return ready() and dist.get_world_size() > 1 and "fake" not in dist.get_backend()


def _agreed(store: PlanStore, patience_s: float) -> int:
    start, pause, ranks = time.monotonic(), 0.001, range(dist.get_world_size())
    while len(places := store.places(ranks)) < len(ranks):
        if time.monotonic() - start > patience_s:
            log.warning(SILENT, len(ranks) - len(places), patience_s)
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    if 0 not in places:
        return 0
    whole = len(places) == len(ranks)
    mine = on_each_host([places[rank] for rank in ranks]) if whole else 0
    return int(store.agree_on_first("hosts", str(mine)))


SILENT = (
    "%d ranks have not said within %g s where they run: algorithm hierarchical is no choice. Say it"
    " in the profile, as Profile(ranks_per_host=8), or in the rule, as hierarchical(node=8)"
)
