"""order: exchanges start, and are waited for, in the order in which the graph has them.

needs: a graph of Inductor's, after its own post-grad passes.
gives: the same graph, in which every start and wait comes after the one before it.
changes: nothing that is computed. Without it Inductor (torch 2.11 to 2.15) brings each wait as near
to its start as it can, to save memory, and nothing of chunks overlaps.

It reads nothing but the graph, so that what Inductor keeps in its cache is that of the same graph.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import fx
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from commpass.passes.graph.parse import is_wait, parse


def order(graph: fx.Graph) -> None:
    """Pins every start and wait behind the one before it, where it does not need its result
    anyway."""
    nodes = [node for node in graph.nodes if is_wait(node) or parse(node) is not None]
    preserve_node_ordering(
        graph,
        {
            node: OrderedSet([before])
            for before, node in pairwise(nodes)
            if before not in node.all_input_nodes
        },
    )


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
        return (
            None
            if None in names
            else (get_hash_for_files((__file__, parse.__code__.co_filename)), *names)
        )


def ordered() -> Any:
    """Inductor's config with the pass, for one compile."""
    slot = config.post_grad_custom_post_pass
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):  # torch 2.13: several have room
        passes = custom_graph_pass.get_custom_graph_passes(slot)
        return config.patch(post_grad_custom_post_pass=[*passes, Order(None)])
    return config.patch(post_grad_custom_post_pass=Order(slot))
