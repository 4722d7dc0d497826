"""in_place: nodes that will be pinned write into memory that nothing else uses afterwards.

Inductor would do so later, but it does not look inside pins. It would copy the input of an
all_reduce, and the uninitialized output of a Triton kernel.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from commpass.passes.fx.erase import erase
from commpass.passes.fx.marks import STRIDES
from commpass.passes.fx.memory import memory
from commpass.passes.fx.ops import functional, triton_calls
from commpass.passes.fx.parse import is_wait

WRITTEN = "commpass_written"
"""The entry of a kernel's metadata with the names of the arguments that it writes."""


class Uses:
    """Where a graph uses each storage."""

    def __init__(self, graph: fx.Graph):
        self.known = memory(graph)
        self.place = {node: number for number, node in enumerate(graph.nodes)}
        self.touching: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.place:
            for number in self.known.touches[node]:
                self.touching[number].append(node)

    def are_last(self, node: fx.Node, written: Sequence[fx.Node]) -> bool:
        """Whether a node may write into ``written``, which are among its inputs.

        The graph must have allocated them, each by itself. Later nodes must not use them, except
        waits for the node, and the node itself must not use them as other inputs.
        """
        memories = [self.known.gives[each] for each in written]
        numbers = frozenset().union(*memories)
        others = [each for each in node.all_input_nodes if each not in written]
        touching = {each for number in numbers for each in self.touching[number]}
        later = {each for each in touching if self.place[each] > self.place[node]}
        return (
            all(memories)
            and len(numbers) == sum(map(len, memories))
            and not any(self.known.gives[each] & numbers for each in others)
            and not any(each.op in ("placeholder", "get_attr") for each in touching)
            and later <= set(filter(is_wait, node.users))
        )


def sum_in_place(starts: Iterable[fx.Node], uses: Uses) -> None:
    """Make each all_reduce write into its input, if the input has no later uses."""
    for start in starts:
        if start.target is functional.all_reduce.default:
            source: Any = start.args[0]
            if uses.are_last(start, [source]):
                start.target = functional.all_reduce_.default


def can_write(node: fx.Node, uses: Uses) -> bool:
    """Whether a Triton kernel in functional form need not copy the buffers that it writes."""
    return node.target is triton_calls()[0] and uses.are_last(node, _buffers(node))


def _buffers(call: fx.Node) -> list[fx.Node]:
    kwargs: Any = call.kwargs
    return [kwargs["kwargs"][name] for name in kwargs["tensors_to_clone"]]


def write_in_place(call: fx.Node) -> None:
    """Make a Triton kernel (``can_write``) that will be pinned write into its buffers.

    Users still take its results by name, until ``return_written`` is called.
    """
    call.target = triton_calls()[1]
    call.meta[WRITTEN] = call.kwargs["tensors_to_clone"]
    call.kwargs = _without_clones(call.kwargs)
    if STRIDES in call.meta:
        args, kwargs = call.meta[STRIDES]
        call.meta[STRIDES] = (args, _without_clones(kwargs))


def _without_clones(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "tensors_to_clone"}


def return_written(pinned: fx.Node) -> None:
    """Make a pinned kernel (after ``write_in_place``) return the buffers that it writes, so that
    their users depend on it."""
    names = pinned.meta.pop(WRITTEN)
    module = body_of(pinned)
    *_, call, output = module.graph.nodes
    written = [call.kwargs["kwargs"][name] for name in names]
    call.meta["val"] = None
    vals = [each.meta["val"] for each in written]
    users = list(pinned.users)
    if len(names) == 1:
        output.args, pinned.meta["val"] = (written[0],), vals[0]
        results = [pinned]
    else:
        output.args, pinned.meta["val"] = (tuple(written),), tuple(vals)
        with pinned.graph.inserting_after(pinned):
            results = [_item(pinned, number, val) for number, val in enumerate(vals)]
    output.meta["val"] = pinned.meta["val"]
    module.recompile()
    for user in users:
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[names.index(user.args[1])])
            erase(user)
        else:
            user.replace_input_with(pinned, results[0])


def _item(node: fx.Node, number: int, val: Any) -> fx.Node:
    item = node.graph.call_function(operator.getitem, (node, number))
    item.meta["val"] = val
    return item


def body_of(pinned: fx.Node) -> fx.GraphModule:
    """Return the module of a pinned node."""
    body: Any = pinned.args[1]
    module: fx.GraphModule = getattr(pinned.graph.owning_module, str(body.target))
    return module
