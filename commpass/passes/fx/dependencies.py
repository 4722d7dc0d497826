"""The order constraints of nodes beyond data dependencies."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator

from commpass.passes.fx.marks import MARK
from commpass.passes.fx.memory import Memory, written
from commpass.passes.fx.ops import is_random
from commpass.passes.fx.parse import is_collective, is_wait
from commpass.utils.by_identity import cached_by_identity


def orders(graph: fx.Graph, known: Memory) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the nodes that must come before it.

    These are its inputs and the last writer of each storage that it touches. For storages that it
    writes, all earlier readers are included. Nodes with side effects or random numbers keep their
    order. Nothing that Inductor may run in place may write into data in flight, between the start
    of an exchange and its wait.
    """
    before: dict[fx.Node, dict[fx.Node, None]] = {}
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    writer: dict[int, fx.Node] = {}
    travels: dict[int, list[fx.Node]] = defaultdict(list)  # starts and waits
    in_place: dict[int, list[fx.Node]] = defaultdict(list)
    effect: fx.Node | None = None
    for node in graph.nodes:
        first = dict.fromkeys(node.all_input_nodes)
        into, touched = written(node, known), known.touches[node]
        for number in touched:
            if number in writer:
                first[writer[number]] = None
            if number in into:
                first |= dict.fromkeys(readers[number])
        for number in touched:
            if number in into:
                writer[number], readers[number] = node, []
            else:
                readers[number].append(node)
        waits = is_wait(node)
        for number in touched if waits or is_collective(node) else ():
            first |= {} if waits else dict.fromkeys(in_place[number])
            travels[number].append(node)
        for number in _written_in_place(node, known):
            first |= dict.fromkeys(travels[number])
            in_place[number].append(node)
        if _has_effects(node):
            if effect is not None:
                first[effect] = None
            effect = node
        first.pop(node, None)
        before[node] = first
    return {node: list(first) for node, first in before.items()}


IN_PLACE = ("index_put", "_scatter", "_foreach_")
"""Name parts of operators that Inductor runs in place if the old values have no further users. It
does not know that an exchange may still read them."""


def _written_in_place(node: fx.Node, known: Memory) -> frozenset[int]:
    """Return the storages that Inductor may let a node write.

    For an operator on one tensor, that of its first argument. For a wrapper of another operator
    (``auto_functionalized``), those of all inputs.
    """
    if node.op != "call_function" or is_wait(node) or is_collective(node):
        return frozenset()
    if not _may_run_in_place(node.target):
        return frozenset()
    first: Any = node.args[0] if node.args else ()
    found = list(first) if isinstance(first, (list, tuple)) else [first]
    if isinstance(node.target, HigherOrderOperator):
        found = list(node.all_input_nodes)
    return frozenset(
        number for each in found if isinstance(each, fx.Node) for number in known.gives[each]
    )


@cached_by_identity
def _may_run_in_place(target: Any) -> bool:
    """Whether Inductor may run an operator in place, or the operator that it wraps."""
    if isinstance(target, HigherOrderOperator):
        return "functional" in target.name()
    return any(part in str(getattr(target, "_opname", "")) for part in IN_PLACE)


def _has_effects(node: fx.Node) -> bool:
    """Whether a node has effects beyond its result and its writes."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if isinstance(node.target, HigherOrderOperator):
        return MARK not in node.meta  # commpass kernels only return a result
    if is_random(node.target):
        return True
    return node.target in fx.node._side_effectful_functions and not is_wait(node)
