"""Extract the tables of a codec from a kernel's graph.

A table depends on no input. It is computed once, when the kernel is compiled, and passed with each
call, which leaves Inductor a third less to compile.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

MOST = 1 << 14
"""The most values of a table that is kept; larger ones are computed in each call."""


def without_tables(body: fx.GraphModule) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """Return the graph with its tables as further inputs, and the tables in that order."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    known: dict[fx.Node, Tensor] = {}
    given = [node for node in body.graph.nodes if node.op == "placeholder"]
    for node in body.graph.nodes:
        if _is_constant(node, known):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    tables = [node for node in known if _is_table(node, known)]
    for node in [*given, *tables]:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.eliminate_dead_code()
    return fx.GraphModule(body, graph), tuple(known[node] for node in tables)


def _is_constant(node: fx.Node, known: dict[fx.Node, Tensor]) -> bool:
    """Whether a node depends on no input and is small. Copies of a table for many rows do not
    count."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, Tensor)
        and value.numel() <= MOST
        and node.target is not torch.ops.aten.expand.default
        and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
        and all(source in known for source in node.all_input_nodes)
    )


def _is_table(node: fx.Node, known: dict[fx.Node, Tensor]) -> bool:
    """Whether a constant is worth an input: it is computed, and a computation that is kept uses
    it."""
    computed = bool(node.all_input_nodes) and known[node].numel() > 1
    return computed and any(user not in known for user in node.users)
