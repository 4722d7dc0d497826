"""Which collectives of a backward graph carry gradients, and which are forward's, run again.

Activation checkpointing lets backward run a part of forward again, collectives included. Such a
collective is a forward site: it is compressed as forward compressed it, so that gradients are those
of the forward that was run. It is told by two things that must both hold: torch's partitioner was
told to recompute it, or made it in forward; and no gradient reaches it. A collective of a user's
own backward formula that takes no gradient is therefore still a backward site.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

RECOMPUTED = "commpass_recomputed"
"""Key in ``node.meta["custom"]`` of what is run again in a graph of compiled autograd."""
AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
TAGS = ("recompute", "ac_graph_id", "partitioner_tag")
"""What checkpointing and the partitioner say of a node, in its metadata."""


def gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that an incoming gradient reaches: AOTAutograd calls those inputs ``tangents``, and
    tells them by that name itself."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def recomputed(node: fx.Node, reached: Collection[fx.Node]) -> bool:
    """Whether a node of a backward graph is forward's, run again. ``reached`` are the ``gradients``
    of its graph."""
    if node in reached:
        return False
    custom = node.meta.get("custom")
    return _is_forward(node.meta) or (isinstance(custom, dict) and bool(custom.get(RECOMPUTED)))


def _is_forward(meta: dict[str, Any]) -> bool:
    return meta.get("recompute") in AGAIN or meta.get("partitioner_tag") == "is_forward"


def keep_metadata(gm: fx.GraphModule) -> None:
    """Lets a graph of compiled autograd keep its nodes' metadata in the graph that AOTAutograd
    makes.

    Such a graph takes a list of tensors; torch then calls it as Python code, and what its nodes say
    of modules, words and checkpointing is lost. What is run again is marked under a key of our own:
    nothing is left to recompute in it, and torch would refuse random operators under its own.
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
