"""Insert nodes into a graph, alone or as a copy of a traced graph, with their metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from commpass.errors import VerifyError
from commpass.passes.fx import meta
from commpass.passes.fx.create import copy_of
from commpass.passes.fx.fake_results import FakeResults


def splice(
    body: fx.Graph,
    inputs: Iterable[Any],
    before: Callable[[fx.Node], fx.Node],
    describe: Callable[[fx.Node, fx.Node], None],
) -> Any:
    """Copy the nodes of a traced graph into another graph, and return the copies of its results.

    ``inputs`` take the place of its placeholders, in order. The copy of a node is inserted before
    the node ``before(node)``. ``describe(copy, node)`` then adds its metadata. Raises VerifyError
    if the traced graph has no output.
    """
    given = iter(inputs)
    copies: dict[fx.Node, Any] = {}
    for node in body.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], copies.__getitem__)
        else:
            place = before(node)
            with place.graph.inserting_before(place):
                copies[node] = copy_of(place.graph, node, copies.__getitem__)
            describe(copies[node], node)
    raise VerifyError("the traced graph has no output")


def insert(before: fx.Node, source: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call before a node, with its fake value. Its other metadata comes from
    ``source``."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    meta.carry(source, node)
    set_value(node)
    return node


def set_value(
    node: fx.Node,
    known: FakeResults | None = None,
    value_of: Callable[[fx.Node], Any] = meta.value,
) -> None:
    """Compute the fake value of a call from those of its inputs, under the graph's fake mode."""
    node.meta["val"] = (FakeResults() if known is None else known).of(node, value_of)


def add_input(graph: fx.Graph, name: str) -> fx.Node:
    """Add a last placeholder to a graph."""
    with after_inputs(graph):
        return graph.placeholder(name)


def after_inputs(graph: fx.Graph) -> Any:
    """Return a context in which nodes are inserted after the placeholders."""
    placeholders = graph.find_nodes(op="placeholder")
    return graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before()
