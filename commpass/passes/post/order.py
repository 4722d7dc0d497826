"""order: exchanges start, and are waited for, in the order in which the graph has them.

needs: a graph of Inductor's, after its own post-grad passes.
gives: the same graph, in which every start and wait comes after the one before it, and matmuls stay
between those that they stand between.
changes: nothing that is computed. Without it Inductor (torch 2.11 to 2.15) brings each wait as near
to its start as it can, to save memory, and nothing overlaps.

It reads nothing but the graph, so that what Inductor keeps in its cache is that of the same graph.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from commpass.passes.graph.costs import is_matmul
from commpass.passes.graph.parse import is_wait, parse

READS_WITH = (parse.__code__.co_filename, is_matmul.__code__.co_filename)
"""The files of what it reads graphs with: part of its name in Inductor's cache."""


def order(graph: fx.Graph) -> None:
    """Pins every start and wait behind the one before it and the matmuls in between, and matmuls
    behind the starts of what travels meanwhile, where they do not take it anyway."""
    pins: dict[fx.Node, OrderedSet[fx.Node]] = {}
    last: fx.Node | None = None
    latest: fx.Node | None = None  # start that nobody has waited for yet
    between: list[fx.Node] = []
    for node in graph.nodes:
        if is_wait(node) or parse(node) is not None:
            behind = [*([] if last is None else [last]), *between]
            last, between = node, []
            latest = None if is_wait(node) else node
        elif is_matmul(node):
            behind = [] if latest is None else [latest]
            between.append(node)
        else:
            continue
        if found := [each for each in behind if each not in node.all_input_nodes]:
            pins[node] = OrderedSet(found)
    preserve_node_ordering(graph, pins)


class Order(CustomGraphPass):
    """``order`` behind what is in the slot already."""

    def __init__(self, before: Any):
        self.before = before if isinstance(before, (list, tuple)) else [before] if before else []

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.before:
            each(graph)
        order(graph)

    def uuid(self) -> Any:
        """Names this pass and those before it; None, as torch has it, where one has no name."""
        names = [each.uuid() if hasattr(each, "uuid") else None for each in self.before]
        return None if None in names else (get_hash_for_files((__file__, *READS_WITH)), *names)


def ordered() -> Any:
    """Inductor's config with the pass, for one compile. Nor does it bring what is computed nearer
    to those who take it."""
    slot: Any = config.post_grad_custom_post_pass
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):  # torch 2.13: several have room
        slot = [*custom_graph_pass.get_custom_graph_passes(slot), Order(None)]
    else:
        slot = Order(slot)
    return config.patch(post_grad_custom_post_pass=slot, reorder_for_locality=False)
