"""Collectives with a branch for each number of tokens, where vLLM compiles a single graph.

A step of few tokens then sends what was decided for few. The branches are those of ``torch.cond``.
Each contains one collective alone, and Inductor compiles them with the graph.
"""

from __future__ import annotations

import dataclasses
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

from commpass.passes.fx import meta
from commpass.passes.fx.erase import erase
from commpass.passes.fx.parse import is_collective, is_wait
from commpass.plan import Plan

SLOT = "post_grad_custom_post_pass"
"""The key in vLLM's ``inductor_compile_config``, and the name of Inductor's option."""


@dataclass(frozen=True)
class Branch:
    """A collective as a graph of its own, with the decisions for ``tokens``."""

    tokens: int
    module: fx.GraphModule
    plan: Plan


def starts_of(graph: fx.Graph) -> list[fx.Node] | None:
    """Return the collectives of a graph; None if one of them cannot have branches.

    It must have one input, whose first dimension is a symbol and whose others are fixed, and one
    wait.
    """
    starts = [node for node in graph.nodes if is_collective(node)]
    for start in starts:
        inputs = [meta.tensor(node) for node in start.all_input_nodes]
        if len(inputs) != 1 or inputs[0] is None:
            return None
        rows, *others = (*inputs[0].shape, 0)
        if isinstance(rows, int) or not rows.node.expr.is_Symbol:
            return None  # Inductor does not know the symbols of an expression in a branch
        if not all(isinstance(size, int) for size in others):
            return None
        if [*map(is_wait, start.users)] != [True]:
            return None
    return starts


def graph_of(start: fx.Node) -> fx.GraphModule:
    """Return a collective and its wait as a graph of one input."""
    graph = fx.Graph()
    (given,), (wait,) = start.all_input_nodes, start.users
    x = graph.placeholder("x")
    x.meta["val"] = given.meta["val"]
    copies = {given: x}
    for node in (start, wait):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[wait])
    return fx.GraphModule({}, graph)


def distinct(branches: Sequence[Branch]) -> list[Branch]:
    """Return branches without those whose decisions are those of the next larger number."""
    pairs = itertools.pairwise(branches)
    others = [each for each, after in pairs if each.plan.digest() != after.plan.digest()]
    return [*others, *branches[-1:]]


def joint_plan(branches: Sequence[Branch]) -> Plan:
    """Return one plan for the collectives of a graph, from those of each alone."""
    sites = tuple(site for each in branches for site in each.plan.sites)
    return dataclasses.replace(branches[0].plan, sites=sites)


def limits_of(branches: Sequence[Branch]) -> list[int]:
    """Return up to how many tokens each branch but the last is for: the geometric mean of its
    number and the next one."""
    tokens = [each.tokens for each in branches]
    return [math.isqrt(low * high) for low, high in itertools.pairwise(tokens)]


def insert(graph: fx.Graph, start: fx.Node, branches: Sequence[Branch]) -> None:
    """Replace a collective and its wait by a choice among branches, or by the only one.

    The passes of Inductor that follow the slot do not enter branches, so they run here.
    """
    (x,), (wait,) = start.all_input_nodes, start.users
    *others, module = [each.module for each in branches]
    if others:
        for each in (*others, module):
            output = each.graph.output_node()
            output.args = (output.args,)
            with inductor_config.patch({SLOT: None}):
                post_grad_passes(each, is_inference=True)
        limits = limits_of(branches)
        for small, limit in zip(reversed(others), reversed(limits), strict=True):
            module = _choice(x, wait, limit, small, module)
    owner: Any = graph.owning_module
    names = {
        node: _added(owner, getattr(module, str(node.target)))
        for node in module.graph.nodes
        if node.op == "get_attr"
    }
    copies = dict(zip([n for n in module.graph.nodes if n.op == "placeholder"], [x], strict=True))
    with graph.inserting_before(start):
        for node in module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].target = names.get(node, node.target)
    result: Any = module.graph.output_node().args[0]
    wait.replace_all_uses_with(copies[result[0] if others else result])
    erase(wait)
    erase(start)


def _added(owner: fx.GraphModule, value: Any) -> str:
    """Return the name of a new attribute of a graph with a value."""
    name = next(
        name for n in itertools.count() if not hasattr(owner, name := f"commpass_branch_{n}")
    )
    setattr(owner, name, value)
    return name


def _choice(
    x: fx.Node, wait: fx.Node, limit: int, small: fx.GraphModule, large: fx.GraphModule
) -> fx.GraphModule:
    """Return a graph of one input that runs ``small`` if it has up to ``limit`` rows, else
    ``large``."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x.meta["val"]
    rows = graph.call_function(torch.ops.aten.sym_size.int, (given, 0))
    rows.meta["val"] = x.meta["val"].shape[0]
    is_small = graph.call_function(operator.le, (rows, limit))
    is_small.meta["val"] = rows.meta["val"] <= limit
    modules = [graph.get_attr(name) for name in ("small", "large")]
    call = graph.call_function(torch.ops.higher_order.cond, (is_small, *modules, (given,)))
    call.meta["val"] = (wait.meta["val"],)
    result = graph.call_function(operator.getitem, (call, 0))
    result.meta["val"] = wait.meta["val"]
    graph.output((result,))
    return fx.GraphModule({"small": small, "large": large}, graph)
