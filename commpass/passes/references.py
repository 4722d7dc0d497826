"""Which all_gathers may keep a reference for the next difference: those of parameters.

Parameters change little from step to step, so a difference codec pays. Activations of the next step
are unrelated. The gathered tensor must therefore be computed from parameters alone. Walking back
from it, the graph must end in inputs that are parameters, without a collective or a random number
in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from commpass.passes.fx import meta
from commpass.passes.fx.direction import AGAIN as TAGGED
from commpass.passes.fx.ops import computes_from_inputs, reached
from commpass.passes.fx.parse import is_collective
from commpass.utils.ambient import ambient_free

NO_WEIGHTS = "nobody says which inputs of its graph are parameters"
BACKWARD = (
    "what a backward graph gathers is no parameter of the next step: give the rule"
    " direction='forward'"
)
GATHERED_AGAIN = (
    "backward gathers it again, and must get the same bits, while the reference would have moved:"
    " let backward keep what forward gathered (reshard_after_forward=False, or no checkpoint around"
    " the gather). The reference takes that memory anyway"
)
ACTIVATION = (
    "what it gathers is not computed from parameters alone: a difference pays where a tensor"
    " changes little from step to step"
)
SEVERAL_TIMES = "it is in a region that may run several times"


@dataclass(frozen=True)
class Weights:
    """Which inputs of a graph are parameters.

    Maps the number of an input to the numbers of its parameters, which index what the owner of the
    call has. ``why`` is the reason if no reference may be kept at all.
    """

    numbers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    why: str | None = None


UNKNOWN = Weights(why=NO_WEIGHTS)


@dataclass(frozen=True)
class Source:
    """The input of an all_gather, as a graph of some inputs of its own graph. ``inputs`` are their
    numbers."""

    gm: fx.GraphModule
    inputs: tuple[int, ...]

    @ambient_free
    def value(self, inputs: Sequence[Any]) -> Tensor:
        """Return the all_gather's input for a call of its graph with ``inputs``."""
        taken: Tensor = self.gm(*(inputs[number] for number in self.inputs))
        return taken


def parameters_behind(node: Any, weights: Weights, recomputed: bool) -> tuple[int, ...] | str:
    """Return the numbers of the parameters that an all_gather's input is computed from, or why it
    may keep no reference.

    ``recomputed`` says that the gather belongs to forward and runs again in backward.
    """
    if recomputed:
        return GATHERED_AGAIN
    if weights.why is not None:
        return weights.why
    if not isinstance(node, fx.Node):
        return ACTIVATION
    order = _placeholders(node.graph)
    found: set[int] = set()
    for each in _ancestors(node):
        if each.op == "placeholder":
            if order[each] not in weights.numbers:
                return ACTIVATION
            found.update(weights.numbers[order[each]])
        elif not _is_pure(each):
            return ACTIVATION
    return tuple(sorted(found)) or ACTIVATION


def is_gathered_again(node: fx.Node) -> bool:
    """Whether torch's partitioner was told to recompute a forward collective in backward."""
    return node.meta.get("recompute") in TAGGED


def source_of(node: fx.Node) -> Source:
    """Return the input of an all_gather as a graph of its own."""
    order, graph = _placeholders(node.graph), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[int] = []
    for each in _ancestors(node):
        if each.op == "placeholder":
            copies[each] = graph.placeholder(each.name)
            inputs.append(order[each])
        else:
            copies[each] = graph.node_copy(each, lambda old: copies[old])
    graph.output(copies[node])
    return Source(fx.GraphModule(torch.nn.Module(), graph), tuple(inputs))


def _placeholders(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """Return a node and all nodes that it depends on: placeholders first, the others in graph
    order."""
    found = reached([node], lambda each: each.all_input_nodes)
    in_order = [each for each in node.graph.nodes if each in found]
    return sorted(in_order, key=lambda each: each.op != "placeholder")


def _is_pure(node: fx.Node) -> bool:
    """Whether a node's result depends only on its input tensors."""
    if node.op != "call_function" or is_collective(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return computes_from_inputs(node.target)
    return meta.tensor(node) is None  # arithmetic on sizes
