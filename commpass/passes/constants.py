"""The constants of codecs in a graph: inputs of it, where its caller can give it more of them, else
buffers of its module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from commpass.codecs import constants
from commpass.codecs.operators import CONSTANT
from commpass.passes.fx.erase import erase

INPUT = "commpass_constant"
"""The beginning of the names of inputs and buffers that hold constants."""


@dataclass(frozen=True)
class ConstantInput:
    """A constant that a graph takes as one of its last inputs."""

    name: str
    device: torch.device
    fake: Tensor

    def tensor(self) -> Tensor:
        """Its values: one tensor for all graphs of the process, which nobody changes."""
        return constants.on_device(self.name, self.device)


def lift_constants(
    gm: fx.GraphModule, *, as_inputs: bool, before: Sequence[ConstantInput] = ()
) -> tuple[ConstantInput, ...]:
    """Puts an input, or a buffer, in the place of all nodes that name the same constant; returns
    the inputs, those there were ``before`` first, in order. Graphs inside of the graph keep the
    operator."""
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
        node.replace_all_uses_with(held[key])
        erase(node)
    if nodes:
        gm.recompile()
    return tuple(made)


def _add(gm: fx.GraphModule, name: str, device: str, number: int, as_input: bool) -> fx.Node:
    """A node that holds a constant: the last input, or a buffer, whose name says what it holds: a
    graph may come here again."""
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    first = next(iter(graph.nodes))
    with graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(first):
        if as_input:
            return graph.placeholder(f"{INPUT}_{number}")
        known = f"{INPUT}_{name}_{device.replace(':', '_')}"
        gm.register_buffer(known, constants.on_device(name, device), persistent=False)
        return graph.get_attr(known)
