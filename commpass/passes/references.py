"""Which all_gathers may keep a reference for the next difference: those of parameters.

A parameter of the next step is close to that of this one, and so a codec of differences pays. An
activation of the next step is another one. So what is gathered must be computed from parameters
alone: seen backwards from it, the graph ends in inputs that are parameters, with no collective and
no random number on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from commpass.passes.fx import meta
from commpass.passes.fx.direction import AGAIN as TAGGED
from commpass.passes.fx.parse import parse
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
    """Which inputs of a graph are parameters: by the number of the input, the numbers among what
    the owner of its call has. ``why`` says why no reference may be kept, whatever is gathered."""

    numbers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    why: str | None = None


UNKNOWN = Weights(why=NO_WEIGHTS)


@dataclass(frozen=True)
class Source:
    """What an all_gather takes, as a graph of some inputs of its own graph: ``inputs`` are their
    numbers."""

    gm: fx.GraphModule
    inputs: tuple[int, ...]

    @ambient_free
    def value(self, inputs: Sequence[Any]) -> Tensor:
        """What the all_gather takes when its graph is called with ``inputs``."""
        taken: Tensor = self.gm(*(inputs[number] for number in self.inputs))
        return taken


def parameters_behind(node: Any, weights: Weights, recomputed: bool) -> tuple[int, ...] | str:
    """The numbers of the parameters from which what an all_gather takes is computed, or why it may
    keep no reference. ``recomputed``: it is forward's, run again in a backward graph."""
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
    """Whether torch's partitioner was told to let backward run a collective of forward again."""
    return node.meta.get("recompute") in TAGGED


def source_of(node: fx.Node) -> Source:
    """What an all_gather takes, as a graph of its own."""
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
    """A node and all that it is computed from: inputs first, then the others in graph order."""
    found, left = {node}, [node]
    while left:
        new = [source for source in left.pop().all_input_nodes if source not in found]
        found.update(new)
        left += new
    in_order = [each for each in node.graph.nodes if each in found]
    return sorted(in_order, key=lambda each: each.op != "placeholder")


def _is_pure(node: fx.Node) -> bool:
    """Whether a node computes the same from the same tensors, and nothing else."""
    target = node.target
    if node.op != "call_function" or parse(node) is not None:
        return False
    if isinstance(target, torch._ops.OpOverload):
        random = torch.Tag.nondeterministic_seeded in target.tags
        return not (random or target._schema.is_mutable or target.namespace.startswith("_c10d"))
    return meta.tensor(node) is None  # arithmetic of sizes
