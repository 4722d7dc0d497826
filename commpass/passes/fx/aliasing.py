"""Which nodes share memory, and which memory a node writes.

Three questions are alike. ``is_alias`` asks the operator, whose result may share memory.
``is_view`` asks the fake values, which do share it. ``Roots`` assumes sharing wherever an operator
may, since rules and fusions must be right in each case. ``memory.Memory`` counts bytes, and follows
the fake values.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from commpass.passes.fx.fakes import storage
from commpass.passes.fx.ops import arguments, aten
from commpass.passes.fx.parse import Call, is_wait, parse
from commpass.plan.kinds import KINDS
from commpass.utils.by_identity import cached_by_identity

BY_ADDRESS = (aten.as_strided.default,)
"""Operators that read memory by address, regardless of the tensor."""
NUMBERS = ("_operator", "builtins", "math", "torch", "torch.fx.experimental.sym_node")
"""Modules of Python functions that compute with sizes."""


def is_alias(node: fx.Node) -> bool:
    """Whether a node's result may share the memory of another tensor, without changing it."""
    return _gives_alias(node.target)


@cached_by_identity
def _gives_alias(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(
        given.alias_info is not None and not given.alias_info.is_write for given in schema.returns
    )


def is_view(node: fx.Node) -> bool:
    """Whether a node is a tensor whose fake value shares its storage with an input."""
    own = node.meta.get("val")
    if not isinstance(own, Tensor):
        return False
    memory = storage(own)
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, Tensor) and storage(value) == memory:
            return True
    return False


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a call's arguments that its operator writes, by its schema, and the
    buffers that it receives into."""
    return _written_arguments(node, parse(node))


def _written_arguments(node: fx.Node, call: Call | None) -> list[fx.Node]:
    """Return the same for a node that is this collective, if any."""
    found = list(call.written()) if call is not None else []
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return found
    given = arguments(node)
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            each = value if isinstance(value, (list, tuple)) else [value]
            found += [one for one in each if isinstance(one, fx.Node)]
    return found


def may_write(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory a node may write. What is unknown may write all its inputs."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if isinstance(node.target, OpOverload):
        call = parse(node)
        return [
            *([node] if call is not None and call.ends else []),
            *_written_arguments(node, call),
        ]
    numbers = node.op == "call_function" and getattr(node.target, "__module__", "") in NUMBERS
    return [] if numbers else node.all_input_nodes


@dataclass(frozen=True)
class Roots:
    """Which memory the nodes of a graph may share, and where it is written.

    ``of`` maps each node to the first one that has its memory. ``written`` has the places of the
    nodes that may write it, by that first node.
    """

    of: dict[fx.Node, fx.Node]
    written: dict[fx.Node, list[int]]

    def fixed(self) -> frozenset[fx.Node]:
        """Return the memory that must stay as it is: it is written, or read by address."""
        readers = (node for node in self.of if node.target in BY_ADDRESS)
        return frozenset(self.written) | {self.of[node.all_input_nodes[0]] for node in readers}


def roots(graph: fx.Graph) -> Roots:
    """Return what memory the nodes of a graph may share. Linear."""
    of: dict[fx.Node, fx.Node] = {}
    written: dict[fx.Node, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        source = _shared_source(node)
        of[node] = node if source is None else of[source]
        for root in {of[each] for each in may_write(node)}:
            written.setdefault(root, []).append(place)
    return Roots(of, written)


def _shared_source(node: fx.Node) -> fx.Node | None:
    """Return the first argument of a node if its result may share the memory of it, else None."""
    source = node.args[0] if node.args else None
    if isinstance(source, (list, tuple)) and source:
        source = source[0]
    if node.op != "call_function" or not isinstance(source, fx.Node):
        return None
    return source if _may_share(node) else None


def _root(node: fx.Node) -> fx.Node:
    while (source := _shared_source(node)) is not None:
        node = source
    return node


class Writers:
    """The nodes of a graph that may write memory. Edits must not erase them."""

    def __init__(self, graph: fx.Graph):
        self.nodes = [node for node in graph.nodes if may_write(node)]

    def change(self, values: Iterable[fx.Node], first: fx.Node, last: fx.Node) -> bool:
        """Whether memory of some values may be written between two nodes, so that reads must not
        move from one of them to the other."""
        end = bisect_left(self.nodes, last)
        if bisect_right(self.nodes, first) >= end:
            return False
        return any(
            _root(value) == _root(each)
            for value in values
            for node in self.nodes[bisect_right(self.nodes, max(first, value)) : end]
            for each in may_write(node)
        )


def _may_share(node: fx.Node) -> bool:
    """Whether a node's result may share the memory of its first argument."""
    if node.target is operator.getitem or is_wait(node):
        return True
    call = parse(node)
    received = call is not None and KINDS[call.kind].receives
    return received or _has_alias_info(node.target)


@cached_by_identity
def _has_alias_info(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)
