"""Symbolic sizes: how they divide, and nodes that compute them from the inputs of a graph.

torch reads a new symbolic size from the first tensor that has it, which may be the result of a
collective. But it follows from the sizes of the inputs, so it is known before the collective.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from commpass.passes.fx.ops import aten

OPERATORS = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
}
"""How the operators of sizes are computed in a graph. All of them keep whole numbers whole."""
Source = tuple[fx.Node, int | None]
"""An input that has the value of a symbol: a number, or a dimension of a tensor."""


def expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def product(sizes: Iterable[Any]) -> sympy.Expr:
    return sympy.Mul(*map(expression, sizes))


def symbols(sizes: Iterable[Any]) -> set[sympy.Symbol]:
    """Return the symbols that sizes are computed from."""
    return set[sympy.Symbol]().union(*(expression(size).free_symbols for size in sizes))


def is_multiple(size: Any, of: int) -> bool:
    """Whether a size is a multiple of a number, for each value of its symbols."""
    if isinstance(size, int):
        return size % of == 0
    return bool((expression(size) / of).is_integer)


def sources(graph: fx.Graph) -> dict[sympy.Symbol, Source]:
    """Return the inputs of a graph that have the values of symbols."""
    found: dict[sympy.Symbol, Source] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        given = value.shape if isinstance(value, torch.Tensor) else [value]
        for dim, size in enumerate(given):
            if isinstance(size, torch.SymInt) and expression(size).is_Symbol:
                source = (node, dim if isinstance(value, torch.Tensor) else None)
                if source[1] is None or expression(size) not in found:
                    found[expression(size)] = source
    return found


def can_compute(size: Any, known: Iterable[sympy.Symbol]) -> bool:
    """Whether ``compute`` has an operator for each part of a size, given these symbols."""

    def is_known(part: sympy.Basic) -> bool:
        if part.is_Symbol or part.is_Integer:
            return bool(part.is_Integer) or part in known
        return type(part) in OPERATORS and all(map(is_known, part.args))

    return is_known(expression(size))


class Lengths:
    """The sizes of a graph as nodes, which are inserted behind its inputs."""

    def __init__(self, graph: fx.Graph):
        self.sources = sources(graph)
        self.made: dict[sympy.Expr, fx.Node] = {}

    def can_compute(self, size: Any) -> bool:
        return can_compute(size, self.sources)

    def node(self, size: Any, emit: Any) -> int | fx.Node:
        """Return a size: a number, or a node that computes it.

        ``emit(place, target, *args)`` inserts a node before another one.
        """
        return self._node(expression(size), emit)

    def _node(self, part: sympy.Basic, emit: Any) -> int | fx.Node:
        if part.is_Integer:
            return int(part)
        if part.is_Symbol and self.sources[part][1] is None:
            return self.sources[part][0]
        if part not in self.made or self.made[part]._erased:
            self.made[part] = self._insert(part, emit)
        return self.made[part]

    def _insert(self, part: sympy.Basic, emit: Any) -> fx.Node:
        if part.is_Symbol:
            return _behind(self.sources[part], aten.sym_size.int, emit)
        first, *rest = (self._node(each, emit) for each in part.args)
        for each in rest:
            first = _behind((first, each), OPERATORS[type(part)], emit)
        assert isinstance(first, fx.Node)
        return first


def _behind(args: tuple[Any, ...], target: Any, emit: Any) -> fx.Node:
    """Insert a node behind its arguments and all inputs."""
    place = max(each for each in args if isinstance(each, fx.Node)).next
    while place.op == "placeholder":
        place = place.next
    node: fx.Node = emit(place, target, *args)
    return node
