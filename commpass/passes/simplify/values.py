"""Value numbering: nodes with equal numbers have bit-identical values.

A node's number derives from its operator and its arguments' numbers, so one walk over the graph
finds all equal values. Only pure deterministic operators are compared. Reads of memory that is also
written are excluded.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from commpass.passes.fx.aliasing import Roots
from commpass.passes.fx.ops import frozen, is_repeatable
from commpass.passes.fx.parse import is_wait, parse
from commpass.plan.kinds import KINDS


def value_numbers(graph: fx.Graph, memory: Roots) -> dict[fx.Node, int]:
    """Return the number of every node. Linear."""
    roots, written = memory.of, memory.written
    known: dict[Any, int] = {}
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        key: Any = None
        stays = not written or not any(roots[n] in written for n in (node, *node.all_input_nodes))
        if node.op == "call_function" and stays and _is_deterministic(node):
            args, kwargs = (frozen(x, numbers.__getitem__) for x in (node.args, node.kwargs))
            key = (node.target, args, kwargs)
        numbers[node] = len(numbers) if key is None else known.setdefault(key, len(numbers))
    return numbers


def _is_deterministic(node: fx.Node) -> bool:
    if node.target is operator.getitem or is_wait(node) or is_repeatable(node.target):
        return True
    call = parse(node)
    return call is not None and call.form == "plain" and not KINDS[call.kind].pairwise
