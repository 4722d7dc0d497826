"""Which collectives of a backward graph carry gradients, and which are recomputed forward
collectives.

Activation checkpointing makes backward recompute parts of forward, including collectives. Such a
collective is a forward site: it is compressed as in forward, so that the gradients match the
forward that was run. Two conditions identify it. torch's partitioner was told to recompute it, or
made it in forward; and no gradient reaches it. A collective without a gradient in a user's backward
formula is therefore still a backward site.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

RECOMPUTED = "commpass_recomputed"
"""The key in ``node.meta["custom"]`` of recomputed nodes in a graph of compiled autograd."""
AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
TAGS = ("recompute", "ac_graph_id", "partitioner_tag")
"""The metadata keys of checkpointing and the partitioner."""


def gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that an incoming gradient reaches.

    AOTAutograd names these inputs ``tangents``, and identifies them by that name itself.
    """
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def recomputed(node: fx.Node, reached: Collection[fx.Node]) -> bool:
    """Whether a node of a backward graph is a recomputed forward node. ``reached`` are the
    ``gradients`` of its graph."""
    if node in reached:
        return False
    custom = node.meta.get("custom")
    return _is_forward(node.meta) or (isinstance(custom, dict) and bool(custom.get(RECOMPUTED)))


def _is_forward(meta: dict[str, Any]) -> bool:
    return meta.get("recompute") in AGAIN or meta.get("partitioner_tag") == "is_forward"


def keep_metadata(gm: fx.GraphModule) -> None:
    """Keep the node metadata of a compiled-autograd graph in the graph that AOTAutograd makes of
    it.

    Such a graph takes a list of tensors. torch then calls it as Python code, which loses metadata
    of modules, annotations and checkpointing. Recomputed nodes get a key of commpass instead:
    nothing in the graph needs to be recomputed, and torch would reject random operators under its
    own keys.
    """
    from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
    from torch.fx.traceback import preserve_node_meta

    for node in gm.graph.nodes:
        if _is_forward(node.meta):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), RECOMPUTED: True}
        for tag in TAGS:
            node.meta.pop(tag, None)

    def forward(*inputs: Any) -> Any:
        with preserve_node_meta():
            return PropagateUnbackedSymInts(gm).run(*inputs)

    gm.forward = forward
