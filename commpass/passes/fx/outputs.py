"""Edits of graphs with many outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from commpass.passes.fx.erase import erase


@contextmanager
def outputs_apart(*graphs: fx.Graph) -> Iterator[None]:
    """Let each output of some graphs have a node of its own in this context, which only holds it.

    All outputs are one argument of the output node, and torch copies an argument to replace one
    value in it. A pass that replaces every output would take a time that grows with the square of
    their number. After an error the nodes stay in the graph, which the manager then restores.
    """
    outputs = [graph.output_node() for graph in graphs]
    for output in outputs:
        holders = dict(map(_with_holder, output.all_input_nodes))
        output.args = fx.map_arg(output.args, holders.__getitem__)
    yield
    for output in outputs:
        holding = output.all_input_nodes
        output.args = fx.map_arg(output.args, lambda holder: holder.args[0])
        for holder in holding:
            erase(holder)


def _with_holder(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return a node, and a new one that holds it."""
    with node.graph.inserting_before(node.graph.output_node()):
        return node, node.graph.call_function(held_output, (node,))


def held_output(value: Any) -> Any:
    """The target of a node that holds an output."""
    return value
