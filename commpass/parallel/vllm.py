"""vLLM: the passes in the slot that it has for passes of its users.

vLLM compiles its models with Inductor and passes of its own at Inductor's post-grad slot. Its
collectives are opaque operators there, ``vllm::all_reduce`` and its kin, which name a group of its
own registry. They are taken as functional collectives along the road, and those that are left alone
are put back as they were, so that vLLM's own kernels go on carrying them.
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
from commpass.distributed.environment import policy_here
from commpass.distributed.machine import profile_here
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
"""vLLM's operators and the functional collectives that they are."""
ORIGIN = "commpass_vllm"
"""In the metadata of a functional collective: what of vLLM's it was."""
STRIDES = "eager_input_vals"
"""In the metadata of an operator that Inductor does not know: what its arguments were like."""


@dataclass(frozen=True)
class Origin:
    """An operator of vLLM's, its arguments but the tensor, and the metadata of its node; the name
    of its group in torch, and the shape of its result."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    group: str
    shape: torch.Size

    def is_still(self, node: fx.Node) -> bool:
        """Whether a node does what it did, and was not made out of it by a pass."""
        form, group = FORMS[self.target._schema.name], node.args[-1]
        return (node.target, group, node.meta["val"].shape) == (form, self.group, self.shape)


def _base() -> Any:
    """vLLM's class of passes, which it insists on; where there is no vLLM, torch's."""
    for place in ("vllm.compilation.passes.inductor_pass", "vllm.compilation.inductor_pass"):
        try:
            return importlib.import_module(place).InductorPass
        except ModuleNotFoundError:
            continue
    return CustomGraphPass


class CollectivePass(_base()):  # type: ignore[misc]
    """A pass for vLLM's slot (``SLOT``) that compresses the collectives of each graph.

    policy, profile, strict: as ``commpass.backend`` has them; ``strict`` raises where a graph would
    otherwise be compiled untouched, with a warning.
    groups: the process group, or its name in torch, for a name of vLLM's such as ``"tp:0"``; if
        None vLLM's own registry is asked. It must be importable where vLLM starts processes.

    No ranks are asked: all must be started with the same policy and profile. Both are part of the
    pass's name in Inductor's cache and vLLM's. Raises PolicyError for a policy that is not known.
    """

    def __init__(
        self,
        policy: str | Path | Policy = "lossless",
        *,
        profile: str | Path | Profile | None = None,
        groups: Groups | None = None,
        strict: bool = False,
    ):
        self.policy, self.profile = policy_here(policy), profile_here(profile)
        self.groups, self.strict = groups or group_of_vllm, strict

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites a graph in place. If that fails it is left as it was."""
        before, why = copy.deepcopy(graph), None
        try:
            take(graph, self.groups)
            plan = self._rewritten(graph)
            why = plan.fallback
        except Exception as error:
            if self.strict:
                raise
            why = f"{type(error).__name__}: {error}"
        if why:
            log.warning("a graph of vLLM's compiled untouched: %s", why)
            _refill(graph, before)
        put_back(graph)
        graph.lint()

    def _rewritten(self, graph: fx.Graph) -> Plan:
        module = graph.owning_module
        if module is None:
            raise CommpassError("a graph without a module cannot be rewritten")
        try:
            return rewrite(module, (), self.policy, profile=self.profile, strict=self.strict)
        finally:
            if module.graph is not graph:  # a copy, where a pass failed; vLLM goes on with this one
                module.graph = graph

    def uuid(self) -> str:
        """Changes with all that decides what becomes of a graph. A rank is part of that: caches may
        be shared by ranks, who have the same graph before the pass, but not after it."""
        profile = digest_of(self.profile) if self.profile is not None else ""
        groups = f"{self.groups.__module__}.{self.groups.__qualname__}"
        rank = (dist.get_rank(), dist.get_world_size()) if ready() else None
        said = [msgspec.to_builtins(self.policy), profile, groups, self.strict, rank, _sources()]
        return msgspec.json.encode(said).hex()


@functools.cache
def _sources() -> str:
    root = Path(__file__).parent.parent
    return get_hash_for_files(tuple(map(str, sorted(root.rglob("*.py"))))).hex()


def group_of_vllm(name: str) -> dist.ProcessGroup:
    """The process group that carries the tensors of a group of vLLM's, such as ``tp:0``."""
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    if state is None:
        raise CommpassError(
            f"group {name!r} is one of vLLM's, which is not loaded here: give"
            " CollectivePass(groups=...), a function from its name to a process group"
        )
    coordinator = held() if (held := state._groups.get(name)) is not None else None
    if coordinator is None:
        known = ", ".join(state._groups) or "none"
        raise CommpassError(f"vLLM has no group {name!r} (any more). It has: {known}")
    return coordinator.device_group


def take(graph: fx.Graph, groups: Groups) -> None:
    """Replaces vLLM's collectives by functional ones and their waits. A gather or scatter along
    another dimension than the first is not replaced."""
    for node in list(graph.nodes):
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if node.op != "call_function" or name not in FORMS:
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        tensor = given[names[0]]
        if given.get("dim", 0) % tensor.meta["val"].dim():
            log.info("%s stays as it is: it is along dimension %s", node, given["dim"])
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


def put_back(graph: fx.Graph) -> None:
    """Replaces functional collectives that were vLLM's, and are not compressed, by vLLM's."""
    for node in [node for node in graph.nodes if ORIGIN in node.meta]:
        origin = node.meta.pop(ORIGIN)
        if MARK in node.meta or not origin.is_still(node):
            continue
        with graph.inserting_before(node):
            own = graph.call_function(origin.target, (node.args[0], *origin.args), origin.kwargs)
        own.meta = dict(origin.meta)
        for wait in [user for user in node.users if is_wait(user)]:
            wait.replace_all_uses_with(own)
            erase(wait)
        node.replace_all_uses_with(own)
        erase(node)


def _refill(graph: fx.Graph, source: fx.Graph) -> None:
    """Gives a graph the nodes of another: others hold on to the graph itself."""
    for node in reversed(list(graph.nodes)):
        erase(node)
    *_, output = source.nodes
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(source, copies)
    graph.output(result).meta = dict(output.meta)
