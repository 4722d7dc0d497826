"""Turn the constants of codecs into inputs of the graph if its caller can pass more, else into
buffers of its module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from commpass.codecs import constants
from commpass.codecs.operators import CONSTANT
from commpass.passes.fx.erase import replace
from commpass.passes.fx.splice import after_inputs
from commpass.passes.results import ConstantInput

INPUT = "commpass_constant"
"""The name prefix of inputs and buffers that hold constants."""


def lift_constants(
    gm: fx.GraphModule, *, as_inputs: bool, before: Sequence[ConstantInput] = ()
) -> tuple[ConstantInput, ...]:
    """Replace all nodes that name the same constant by one input or buffer.

    Return the inputs in order, after those that existed ``before``. Sub-graphs keep the operator.
    """
    graph, made = gm.graph, [*before]
    added = graph.find_nodes(op="placeholder")[-len(before) :] if before else []
    held = {(each.name, str(each.device)): node for each, node in zip(before, added, strict=True)}
    nodes = graph.find_nodes(op="call_function", target=CONSTANT)
    for node in nodes:
        key = name, device = str(node.args[0]), str(node.args[1])
        if key not in held:
            held[key] = _add(gm, name, device, len(held), as_inputs)
            held[key].meta["val"] = node.meta["val"]
            if as_inputs:
                made.append(ConstantInput(name, torch.device(device), node.meta["val"]))
        replace(node, held[key])
    if nodes:
        gm.recompile()
    return tuple(made)


def _add(gm: fx.GraphModule, name: str, device: str, number: int, as_input: bool) -> fx.Node:
    """Add a node that holds a constant: the last input, or a buffer.

    The buffer's name identifies the constant, because a graph may run through the passes again.
    """
    graph = gm.graph
    with after_inputs(graph):
        if as_input:
            return graph.placeholder(f"{INPUT}_{number}")
        known = f"{INPUT}_{name}_{device.replace(':', '_')}"
        gm.register_buffer(known, constants.on_device(name, device), persistent=False)
        return graph.get_attr(known)
