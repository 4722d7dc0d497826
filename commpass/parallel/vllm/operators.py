"""vLLM's collectives as functional ones, and back.

On GPUs the collectives of vLLM are opaque operators, such as ``vllm::all_reduce``, which name a
group of vLLM's registry. They are replaced by functional collectives during the passes. Those that
stay uncompressed are put back as they were, so that vLLM's own kernels still execute them. On CPUs
vLLM calls torch.distributed, whose collectives are functional already.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from commpass.errors import CommpassError
from commpass.passes.fx.erase import erase
from commpass.passes.fx.marks import MARK, STRIDES
from commpass.passes.fx.parse import is_wait

log = logging.getLogger("commpass")

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


def collectives_in_shared_memory(graph: fx.Graph) -> int:
    """Return how many collectives vLLM's ranks on one host do through shared memory."""
    return sum("shm_" in str(_called(node)) for node in graph.nodes if node.op == "call_function")


def _called(node: fx.Node) -> object:
    """Return the operator of a call, also of one that torch runs without writing to its inputs."""
    wrapped = node.target is torch.ops.higher_order.auto_functionalized
    return node.args[0] if wrapped else node.target
