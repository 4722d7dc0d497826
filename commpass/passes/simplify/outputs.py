"""Keeps the outputs of a graph in separate memory, so that a write into one does not change
another."""

from __future__ import annotations

from torch import fx

from commpass.passes.fx.aliasing import Roots, roots
from commpass.passes.fx.ops import aten
from commpass.passes.simplify.editor import Editor


def output_memory(graph: fx.Graph, memory: Roots) -> list[fx.Node]:
    """Return the node in whose memory each output lies. ``memory`` is that of the graph."""
    return [memory.of[node] for node in _outputs(graph)]


def separate_outputs(editor: Editor, before: list[fx.Node]) -> None:
    """Copy each output that now shares memory with another output or an input, but did not
    ``before``."""
    taken: dict[fx.Node, fx.Node] = {}
    copies: list[fx.Node] = []
    last = editor.graph.output_node()
    now = output_memory(editor.graph, roots(editor.graph))
    for node, root, old in zip(_outputs(editor.graph), now, before, strict=True):
        shared = taken.setdefault(root, old) is not old or (
            root.op == "placeholder" and root is not old
        )
        copies.append(
            editor.emit(last, "separate outputs", node, aten.clone.default, node)
            if shared
            else node
        )
    rest = iter(copies)
    last.args = fx.map_arg(last.args, lambda _: next(rest))


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    nodes: list[fx.Node] = []

    def take(node: fx.Node) -> fx.Node:
        nodes.append(node)
        return node

    fx.map_arg(graph.output_node().args, take)
    return nodes
