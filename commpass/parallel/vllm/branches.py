"""One graph with a branch for each number of tokens, where vLLM compiles only one graph.

A step of few tokens then runs a graph whose decisions were made for few. The branches are those of
``torch.cond``, and Inductor compiles each.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch.utils import _pytree as pytree

from commpass.passes.fx import meta
from commpass.plan import Plan

SLOT = "post_grad_custom_post_pass"
"""The key in vLLM's ``inductor_compile_config``, and the name of Inductor's option."""
FEW, MANY = "commpass_few_tokens", "commpass_many_tokens"
"""The attributes of a graph that hold its two branches."""


@dataclass(frozen=True)
class Branch:
    """A copy of a graph with the decisions for ``tokens``, and its plan in a line."""

    tokens: int
    module: fx.GraphModule
    plan: Plan
    summary: str


def distinct(branches: Sequence[Branch]) -> list[Branch]:
    """Return branches without those whose decisions are those of the next larger number."""
    pairs = itertools.pairwise(branches)
    return [each for each, other in pairs if each.plan.digest() != other.plan.digest()] + [
        *branches[-1:]
    ]


def ends(tokens: Sequence[int]) -> list[int]:
    """Return the number of tokens up to which each number but the last counts: the geometric mean
    of it and the next one."""
    return [math.isqrt(low * high) for low, high in itertools.pairwise(tokens)]


def unsupported_reason(graph: fx.Graph) -> str:
    """Return why a graph cannot become a branch, or ""."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            return f"it modifies its input {node.args[0].name}"
    if any(meta.tensor(node) is None for node in _computed(graph)):
        return "it returns something else than tensors"
    return ""


def count_of(graph: fx.Graph, symbol: Any = None) -> int | None:
    """Return which input is the number of tokens, from 0; None if there is no such input."""
    for at, node in enumerate(_inputs(graph)):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == symbol:
            return at
    return None


def joined(graph: fx.Graph, count: int, branches: Sequence[Branch]) -> fx.GraphModule:
    """Return a graph that runs one of several branches, which are copies of ``graph``.

    Input number ``count`` is the number of tokens. The passes of Inductor that follow the slot do
    not enter branches, so they run here.
    """
    for each in branches:
        output = each.module.graph.output_node()
        output.args = (tuple(_computed(each.module.graph)),)
        with inductor_config.patch({SLOT: None}):
            post_grad_passes(each.module, is_inference=True)
    *others, found = [each.module for each in branches]
    limits = ends([each.tokens for each in branches])
    for few, limit in zip(reversed(others), reversed(limits), strict=True):
        found = _choice(graph, count, limit, few, found)
    _return_all(graph, found.graph)
    return found


def _choice(
    graph: fx.Graph, count: int, limit: int, few: fx.GraphModule, many: fx.GraphModule
) -> fx.GraphModule:
    """Return a graph that runs ``few`` for up to ``limit`` tokens, and ``many`` for more.

    It has the inputs of ``graph``, and returns what that computes.
    """
    found = fx.Graph()
    inputs = [found.node_copy(node) for node in _inputs(graph)]
    is_few = found.call_function(operator.le, (inputs[count], limit))
    is_few.meta["val"] = inputs[count].meta["val"] <= limit
    modules = [found.get_attr(name) for name in (FEW, MANY)]
    call = found.call_function(torch.ops.higher_order.cond, (is_few, *modules, tuple(inputs)))
    call.meta["val"] = tuple(node.meta["val"] for node in _computed(graph))
    results = []
    for at, value in enumerate(call.meta["val"]):
        result = found.call_function(operator.getitem, (call, at))
        result.meta["val"] = value
        results.append(result)
    found.output(tuple(results))
    return fx.GraphModule({FEW: few, MANY: many}, found)


def _return_all(graph: fx.Graph, found: fx.Graph) -> None:
    """Let a graph that returns what ``graph`` computes return all that ``graph`` returns: inputs
    too, and in its structure."""
    output = found.output_node()
    results: Any = output.args[0]
    new = dict(zip(_inputs(graph), _inputs(found), strict=True))
    new |= dict(zip(_computed(graph), results, strict=True))
    old = graph.output_node()
    output.args = fx.map_arg(old.args, new.__getitem__)
    output.meta = dict(old.meta)


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _computed(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that a graph returns, each once, without inputs."""
    leaves = pytree.tree_leaves(graph.output_node().args)
    found = (each for each in leaves if isinstance(each, fx.Node) and each.op != "placeholder")
    return list(dict.fromkeys(found))
