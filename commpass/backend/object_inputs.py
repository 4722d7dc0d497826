"""Inputs of a graph that are no tensors and that only its output reads, such as the DeviceMesh of a
DTensor.

Inductor's cache identifies a graph by a pickle of its inputs. The pickle of a DeviceMesh differs in
each process (torch 2.13). So no other rank and no later start would find the graph in the cache.
These inputs therefore bypass the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._library.fake_class_registry import FakeScriptObject

from commpass.passes.fx.erase import erase


@dataclass(frozen=True)
class Bypass:
    """The numbers of the inputs that were removed, and of the outputs that each of them is."""

    outputs: dict[int, tuple[int, ...]]

    def kept(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the other inputs."""
        return [each for number, each in enumerate(inputs) if number not in self.outputs]

    def renumbered(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers among the kept inputs of those with ``numbers`` among all."""
        return [
            number - sum(removed < number for removed in self.outputs)
            for number in numbers
            if number not in self.outputs
        ]

    def around(self, function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a function of all inputs, whose outputs have the removed ones again.

        ``function`` takes one list of the kept inputs, and so does the result of all.
        """

        def run(inputs: list[Any]) -> Any:
            objects = {number: inputs[number] for number in self.outputs}
            inputs[:] = self.kept(inputs)
            results = list(function(inputs))
            for number, positions in self.outputs.items():
                for position in positions:
                    results[position] = objects[number]
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def bypass_objects(gm: fx.GraphModule, inputs: Sequence[Any]) -> Bypass:
    """Remove the inputs that are no tensors and that no operator reads from a graph. The outputs
    that they are become None.

    ``inputs`` are the example inputs, one for each placeholder.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    output = next(node for node in gm.graph.nodes if node.op == "output")
    removed = {
        number: node
        for number, (node, value) in enumerate(zip(placeholders, inputs, strict=True))
        if isinstance(value, FakeScriptObject) and set(node.users) <= {output}
    }
    if not removed or not isinstance(output.args[0], (list, tuple)):
        return Bypass({})
    results = tuple(output.args[0])
    positions = {
        number: tuple(place for place, result in enumerate(results) if result is node)
        for number, node in removed.items()
    }
    erased = set(removed.values())
    output.args = (tuple(None if result in erased else result for result in results),)
    for node in removed.values():
        erase(node)
    gm.recompile()
    return Bypass(positions)
