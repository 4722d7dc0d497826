"""vLLM: run the passes in its slot for user passes.

vLLM compiles its models with Inductor and adds its own passes at Inductor's post-grad slot. Its
collectives are opaque operators there, such as ``vllm::all_reduce``, which name a group of vLLM's
registry. They are replaced by functional collectives during the passes. Those that stay
uncompressed are put back as they were, so that vLLM's own kernels still execute them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
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
from commpass.distributed.record import log
from commpass.errors import CommpassError
from commpass.groups import ready
from commpass.passes.fx.erase import erase
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import is_wait
from commpass.plan import Plan
from commpass.policy import Policy
from commpass.standalone import rewrite

SLOT = "post_grad_custom_post_pass"
"""The key in vLLM's ``inductor_compile_config``, and the name of Inductor's option."""
Groups = Callable[[str], "dist.ProcessGroup | str"]

c10d: Any = torch.ops._c10d_functional
FORMS: dict[str, Any] = {
    "vllm::all_reduce": c10d.all_reduce.default,
    "vllm::all_gather": c10d.all_gather_into_tensor.default,
    "vllm::reduce_scatter": c10d.reduce_scatter_tensor.default,
}
"""vLLM's operators and the functional collectives that they correspond to."""
ORIGIN = "commpass_vllm"
"""Metadata key of a functional collective: the vLLM operator that it replaced."""
STRIDES = "eager_input_vals"
"""Metadata key of an operator that Inductor does not know: the layout of its arguments."""


@dataclass(frozen=True)
class Origin:
    """A vLLM operator: its arguments except the tensor, its node's metadata, its group in torch and
    the shape of its result."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    group: str
    shape: torch.Size

    def is_still(self, node: fx.Node) -> bool:
        """Return whether a node still does the same, and was not made out of it by a pass."""
        form, group = FORMS[self.target._schema.name], node.args[-1]
        return (node.target, group, node.meta["val"].shape) == (form, self.group, self.shape)


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

    Ranks do not compare plans: all must be started with the same policy and profile. Both are part
    of the pass's name in Inductor's cache and vLLM's. Raise PolicyError for an unknown policy.
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
        before, why = copy.deepcopy(graph), None
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
    root = Path(__file__).parent.parent
    return get_hash_for_files(tuple(map(str, sorted(root.rglob("*.py"))))).hex()


def group_of_vllm(name: str) -> dist.ProcessGroup:
    """Return the process group that carries the tensors of a vLLM group such as ``tp:0``."""
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    if state is None:
        raise CommpassError(
            f"group {name!r} is one of vLLM's, which is not loaded here: give"
            " CollectivePass(groups=...), a function from its name to a process group"
        )
    coordinator = reference() if (reference := state._groups.get(name)) is not None else None
    if coordinator is None:
        known = ", ".join(state._groups) or "none"
        raise CommpassError(f"vLLM has no group {name!r} (any more). It has: {known}")
    return coordinator.device_group


def to_functional(graph: fx.Graph, groups: Groups) -> None:
    """Replace vLLM's collectives by functional ones and their waits.

    A gather or scatter along another dimension than the first is not replaced.
    """
    for node in list(graph.nodes):
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if node.op != "call_function" or name not in FORMS:
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        tensor = given[names[0]]
        if given.get("dim", 0) % tensor.meta["val"].dim():
            log.info("%s stays uncompressed: it is along dimension %s", node, given["dim"])
            continue
        group = groups(given["group_name"])
        label = group if isinstance(group, str) else group.group_name
        sums = () if name == "vllm::all_gather" else ("sum",)
        size = (given["world_size"],) if "world_size" in given else ()
        with graph.inserting_before(node):
            start = graph.call_function(FORMS[name], (tensor, *sums, *size, label))
            wait = graph.call_function(c10d.wait_tensor.default, (start,))
        wait.meta = {key: value for key, value in node.meta.items() if key != STRIDES}
        shape = node.meta["val"].shape
        origin = Origin(node.target, node.args[1:], dict(node.kwargs), node.meta, label, shape)
        start.meta = {**wait.meta, ORIGIN: origin}
        node.replace_all_uses_with(wait)
        erase(node)


def to_vllm(graph: fx.Graph) -> None:
    """Replace the uncompressed functional collectives that were vLLM's by vLLM's operators."""
    for node in [node for node in graph.nodes if ORIGIN in node.meta]:
        origin = node.meta.pop(ORIGIN)
        if MARK in node.meta or not origin.is_still(node):
            continue
        with graph.inserting_before(node):
            operator = graph.call_function(
                origin.target, (node.args[0], *origin.args), origin.kwargs
            )
        operator.meta = dict(origin.meta)
        for wait in [user for user in node.users if is_wait(user)]:
            wait.replace_all_uses_with(operator)
            erase(wait)
        node.replace_all_uses_with(operator)
        erase(node)


def _refill(graph: fx.Graph, source: fx.Graph) -> None:
    """Give a graph the nodes of another, since other objects refer to the graph itself."""
    for node in reversed(list(graph.nodes)):
        erase(node)
    *_, output = source.nodes
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(source, copies)
    graph.output(result).meta = dict(output.meta)
