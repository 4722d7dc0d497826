"""Value numbering: nodes with equal numbers have bit-identical values.

A node's number derives from its operator and its arguments' numbers, so one walk over the graph
finds all equal values. Only pure deterministic operators are compared. Reads of memory that is also
written are excluded.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from commpass.passes.fx.parse import is_wait, parse
from commpass.plan.kinds import KINDS

NAMESPACES = ("aten", "prims")
"""Operators of other namespaces may be random or read state."""
RANDOM = ("nondeterministic_seeded", "nondeterministic_bitwise")


def value_numbers(graph: fx.Graph, memory: Memory) -> dict[fx.Node, int]:
    """Return the number of every node. Linear."""
    roots, written = memory
    pure: dict[Any, bool] = {}
    known: dict[Any, int] = {}
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        key: Any = None
        stays = not written or not any(roots[n] in written for n in (node, *node.all_input_nodes))
        if node.op == "call_function" and stays and _deterministic(node, pure):
            key = (node.target, _frozen(node.args, numbers), _frozen(node.kwargs, numbers))
        numbers[node] = len(numbers) if key is None else known.setdefault(key, len(numbers))
    return numbers


Memory = tuple[dict[fx.Node, fx.Node], set[fx.Node]]


def memory(graph: fx.Graph) -> Memory:
    """Return which node's memory each node may share (the first one that has it), and which of
    these are written to."""
    roots: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    shares: dict[Any, bool] = {}
    for node in graph.nodes:
        takes: Any = node.args[0] if node.args else None
        source = takes[0] if isinstance(takes, (list, tuple)) and takes else takes
        aliased = (
            node.op == "call_function" and isinstance(source, fx.Node) and _shares(node, shares)
        )
        roots[node] = roots[source] if aliased else node
        written |= {roots[n] for n in writes(node)}
    return roots, written


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory a node may write to."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    return _writes(node) if node.op == "call_function" else node.all_input_nodes


def _shares(node: fx.Node, known: dict[Any, bool]) -> bool:
    """Whether a node's result may share the memory of its first argument."""
    target = node.target
    if target not in known:
        schema = getattr(target, "_schema", None)
        call = parse(node)
        known[target] = (
            target is operator.getitem
            or is_wait(node)
            or (call is not None and KINDS[call.kind].receives)
            or (schema is not None and any(r.alias_info is not None for r in schema.returns))
        )
    return known[target]


def _writes(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call mutates."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if (call := parse(node)) is not None and call.ends:
            return [node, *call.written()]
        if not target._schema.is_mutable:
            return []
        given = (
            dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
            | node.kwargs
        )
        changed = [
            given.get(a.name)
            for a in target._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        return [
            n
            for value in changed
            for n in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(n, fx.Node)
        ]
    plain = getattr(target, "__module__", "") in (
        "_operator",
        "builtins",
        "math",
        "torch",
        "torch.fx.experimental.sym_node",
    )
    return [] if plain else node.all_input_nodes


def _deterministic(node: fx.Node, known: dict[Any, bool]) -> bool:
    target = node.target
    if target not in known:
        known[target] = (
            target is operator.getitem
            or is_wait(node)
            or _plain_collective(node)
            or _pure_operator(target)
        )
    return known[target]


def _plain_collective(node: fx.Node) -> bool:
    call = parse(node)
    return call is not None and call.form == "plain" and not KINDS[call.kind].pairwise


def _pure_operator(target: Any) -> bool:
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target.namespace not in NAMESPACES
        or target._schema.is_mutable
    ):
        return False
    random = any(getattr(torch.Tag, tag, None) in target.tags for tag in RANDOM)
    return not random and "empty" not in target._opname  # uninitialized values differ


def _frozen(value: Any, numbers: dict[fx.Node, int]) -> Any:
    """Return an argument in comparable form. Numbers of different types differ, and so do 0.0 and
    -0.0."""
    if isinstance(value, fx.Node):
        return ("value", numbers[value])
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each, numbers) for each in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(each, numbers)) for name, each in value.items())
    if isinstance(value, slice):
        return ("slice", _frozen([value.start, value.stop, value.step], numbers))
    if isinstance(value, (bool, int, float, complex)):
        return (type(value).__name__, repr(value))
    return value
