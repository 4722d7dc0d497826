"""The pass for the slot of user passes in vLLM.

vLLM compiles its models with Inductor, and adds its own passes at Inductor's post-grad slot.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from commpass.costmodel import Profile
from commpass.costmodel.files import digest as digest_of
from commpass.distributed.agreed_network import agreed_network
from commpass.distributed.environment import policy_here
from commpass.distributed.integration import Integration
from commpass.distributed.machine import profile_here
from commpass.distributed.plan_store import publish_hello
from commpass.errors import CommpassError
from commpass.groups import is_first_rank, ready
from commpass.parallel.vllm.comparison import compare_before_sending
from commpass.parallel.vllm.operators import (
    Groups,
    collectives_in_shared_memory,
    group_of_vllm,
    to_functional,
    to_vllm,
)
from commpass.passes.fx.erase import erase
from commpass.plan import Plan
from commpass.plan.totals import totals
from commpass.policy import Policy
from commpass.standalone import rewrite
from commpass.utils.printable import plural

log = logging.getLogger("commpass")

SLOT = "post_grad_custom_post_pass"
"""The key in vLLM's ``inductor_compile_config``, and the name of Inductor's option."""


def _base() -> Any:
    """Return vLLM's base class of passes, which it requires; torch's if there is no vLLM."""
    for place in ("vllm.compilation.passes.inductor_pass", "vllm.compilation.inductor_pass"):
        try:
            return importlib.import_module(place).InductorPass
        except ModuleNotFoundError:
            continue
    return CustomGraphPass


class CollectivePass(Integration, _base()):  # type: ignore[misc]
    """A pass for vLLM's slot (``SLOT``) that compresses the collectives of each graph.

    policy, profile, strict: those of ``commpass.backend``. With ``strict`` a pass raises if a graph
    would otherwise be compiled untouched with a warning. groups: the process group, or its name in
    torch, for a vLLM group name such as ``"tp:0"``. If it is None, vLLM's own registry is used. It
    must be importable if vLLM starts processes.

    Policy and profile are part of the pass's name in Inductor's cache and vLLM's. The ranks compare
    what they will send when a graph runs for the first time, whether it was compiled or comes from
    a cache; it raises PlanMismatch if they differ. Raise PolicyError for an unknown policy.
    """

    call = "CollectivePass"
    policy: Policy

    def __init__(
        self,
        policy: str | Path | Policy = "lossless",
        *,
        profile: str | Path | Profile | None = None,
        groups: Groups | None = None,
        strict: bool = False,
    ):
        super().__init__(policy=policy_here(policy))
        self.profile, self._plans = profile_here(profile), list[Plan]()
        self.groups, self.strict = groups or group_of_vllm, strict
        publish_hello()

    @property
    def plans(self) -> list[Plan]:
        """The plans of the graphs that vLLM compiled in this process, in order."""
        return list(self._plans)

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place. If that fails it is unchanged."""
        log_as_vllm_does()
        before, plan, why = copy.deepcopy(graph), None, None
        try:
            to_functional(graph, self.groups)
            plan = self._rewritten(graph)
            self._plans.append(plan)
            why = plan.fallback
        except Exception as error:
            if self.strict:
                raise
            why = f"{type(error).__name__}: {error}"
        if why:
            log.warning("a graph of vLLM's compiled untouched: %s", why)
            _refill(graph, before)
        to_vllm(graph)
        if plan is not None and self.policy.name != "off":
            compare_before_sending(graph, plan, self.policy)
            _log(plan, self.policy, graph)
        graph.lint()

    def _rewritten(self, graph: fx.Graph) -> Plan:
        module = graph.owning_module
        if module is None:
            raise CommpassError("a graph without a module cannot be rewritten")
        try:
            return rewrite(module, (), self.policy, profile=self.profile, strict=self.strict)
        finally:
            if module.graph is not graph:  # a copy, if a pass failed; vLLM keeps using this one
                module.graph = graph

    def uuid(self) -> str:
        """Return a key of all that determines the resulting graph.

        The rank is part of it: ranks may share caches, and have the same graph before the pass but
        not after it.
        """
        profile = digest_of(self.profile) if self.profile is not None else agreed_network()
        groups = f"{self.groups.__module__}.{self.groups.__qualname__}"
        rank = (dist.get_rank(), dist.get_world_size()) if ready() else None
        facts = [msgspec.to_builtins(self.policy), profile, groups, self.strict, rank, _sources()]
        return msgspec.json.encode(facts).hex()


@functools.cache
def _sources() -> str:
    root = Path(__file__).parent.parent.parent
    return get_hash_for_files(tuple(map(str, sorted(root.rglob("*.py"))))).hex()


def log_as_vllm_does() -> None:
    """Print what commpass logs where vLLM prints its own lines, unless the program has set that
    up."""
    theirs = logging.getLogger("vllm")
    if not log.handlers and theirs.handlers:
        log.handlers, log.propagate = list(theirs.handlers), False
        if log.level == logging.NOTSET:
            log.setLevel(theirs.level)


def _log(plan: Plan, policy: Policy, graph: fx.Graph) -> None:
    """Log what was decided for a graph, in the first rank's process."""
    if not is_first_rank():
        return
    if inside := collectives_in_shared_memory(graph):
        log.info(
            "%s of vLLM's through the shared memory of this host: left as %s, since nothing is"
            " sent over a network",
            plural(inside, "collective"),
            "it is" if inside == 1 else "they are",
        )
    if not plan.sites:
        return
    of = totals([plan])
    reasons = sorted({site.reason for site in plan.sites if not site.compressed and site.reason})
    why = f": {reasons[0]}" if reasons and not of.compressed else ""
    log.info(
        "policy %r: %d of %s compressed, %s instead of %s bytes a call of the traced size%s",
        policy.name,
        of.compressed,
        plural(of.sites, "site"),
        f"{of.wire_bytes:,}",
        f"{of.bytes:,}",
        why,
    )


def _refill(graph: fx.Graph, source: fx.Graph) -> None:
    """Give a graph the nodes of another, since other objects refer to the graph itself."""
    for node in reversed(list(graph.nodes)):
        erase(node)
    *_, output = source.nodes
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(source, copies)
    graph.output(result).meta = dict(output.meta)
