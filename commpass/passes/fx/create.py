"""Creation of nodes whose arguments are known to hold no symbolic number.

``fx.Graph.create_node`` walks through all arguments in Python to warn of symbolic numbers, which
takes most of its time. Arguments that a node gets after its creation are not walked through.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx


def call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Insert a call at the graph's insert point. Its arguments are nodes and constants."""
    node = graph.create_node("call_function", target)
    _give(node, args, kwargs)
    return node


def copy_of(graph: fx.Graph, node: fx.Node, of_node: Callable[[fx.Node], Any]) -> fx.Node:
    """Insert a copy of a node at the graph's insert point, without metadata. ``of_node`` returns
    what takes the place of an input. Like ``fx.Graph.node_copy`` otherwise."""
    args: Any = fx.map_arg(node.args, of_node)  # may insert inputs, which come first
    kwargs: Any = fx.map_arg(node.kwargs, of_node)
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    _give(made, args, kwargs)
    return made


def copy_of_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph with its metadata, so that new nodes get the same names as in the original."""
    made, copies = fx.Graph(tracer_cls=graph._tracer_cls), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = copy_of(made, node, copies.__getitem__)
        copies[node].meta.update(node.meta)
    made._codegen = copy.deepcopy(graph._codegen)
    names, known = made._graph_namespace, graph._graph_namespace
    names._used_names |= known._used_names
    names._base_count |= known._base_count
    return made


def _give(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
    """Set the arguments of a new node. ``fx.Node.__setattr__`` would also register it anew under
    its operator, which stays the same."""
    if args:
        object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)
