"""Where the rows of a matmul are in what is computed from its result, and which operators compute
each row from that row alone.

Rows are the entries of a matmul's first dimension. A tensor that holds them has a dimension along
which a chunk of rows is a slice: ``[M, N]`` has 0, and so has ``[B, S, N]`` where chunks end
between entries of the batch; ``[1, S, N]`` has 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from commpass.passes.graph import meta
from commpass.passes.graph.costs import tensors

aten = torch.ops.aten
Takes = tuple[int | None, ...]


@dataclass(frozen=True)
class Rows:
    """How a node treats rows: ``dim`` is the dimension of its result along which it has them, and
    ``takes`` has for each of its arguments the dimension along which a chunk takes a slice; None
    for what each chunk takes whole."""

    dim: int
    takes: Takes


MATMULS = (aten.mm.default, aten.addmm.default)
"""The matmuls whose rows are the entries of the first dimension."""
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
"""What gives the same values another shape."""
REDUCTIONS = (
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.var_mean.correction,
)
"""What combines the values of some dimensions, which are the second argument."""
OVER_ONE = (aten._softmax.default, aten._log_softmax.default)
"""What computes values from others of one dimension, the second argument."""


def matmul_rows(node: fx.Node) -> Rows | None:
    """How a matmul treats the rows that it makes; None for any other node."""
    if node.op != "call_function" or node.target not in MATMULS:
        return None
    if node.target == aten.mm.default:
        return Rows(0, (0, None))
    bias = meta.tensor(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    return None if bias is None else Rows(0, (_dim_of(bias, 0, 2), 0, None))


def rows_of(node: fx.Node, dims: Mapping[fx.Node, int]) -> Rows | None:
    """How a node treats the rows of those that it takes, whose dimensions are ``dims``; None if it
    has none, if a row of it depends on other rows, or if that is not known."""
    given = [each if isinstance(each, fx.Node) else None for each in node.args]
    if node.op != "call_function" or not any(each in dims for each in given):
        return None
    if any(each not in given for each in node.all_input_nodes):
        return None  # in a list, or by keyword
    if (found := _rule(node, dims)) is None:
        return None
    pairs = zip(given, found.takes, strict=True)
    fits = all(each is None or dims.get(each, dim) == dim for each, dim in pairs)
    return found if fits else None


def length(node: fx.Node, dim: int) -> int:
    """The entries of a node's result along a dimension."""
    return int(_first(node).shape[dim])


def is_contiguous(node: fx.Node) -> bool:
    """Whether all that a node gives lies in memory without gaps, one row after the other."""
    return all(each.is_contiguous() for each in _values(node))


def is_fixed(node: fx.Node) -> bool:
    """Whether all sizes of what a node gives are numbers."""
    return all(isinstance(size, int) for each in _values(node) for size in each.shape)


def _values(node: fx.Node) -> list[Tensor]:
    return list(tensors(node.meta.get("val")))


def _rule(node: fx.Node, dims: Mapping[fx.Node, int]) -> Rows | None:
    target, rest = node.target, (None,) * (len(node.args) - 1)
    if target in MATMULS:
        return matmul_rows(node)
    if _is_pointwise(target):
        return _pointwise(node, dims)
    dim = dims.get(node.args[0])  # type: ignore[arg-type]
    if dim is None:
        return None
    if target is operator.getitem:
        return Rows(dim, (dim, *rest))
    given = meta.tensor(node.args[0])  # type: ignore[arg-type]
    if given is None:
        return None
    if target in VIEWS:
        made = _viewed(given, dim, _first(node))
    elif target in REDUCTIONS:
        made = _reduced(given, dim, node.args[1], _first(node))
    elif target in OVER_ONE:
        made = None if node.args[1] % given.dim() == dim else dim  # type: ignore[operator]
    elif target == aten._to_copy.default:
        made = dim
    else:
        return None
    return None if made is None else Rows(made, (dim, *rest))


def _is_pointwise(target: Any) -> bool:
    tags = getattr(target, "tags", ())
    return (
        torch.Tag.pointwise in tags
        and torch.Tag.nondeterministic_seeded not in tags
        and not target._schema.is_mutable
    )


def _pointwise(node: fx.Node, dims: Mapping[fx.Node, int]) -> Rows | None:
    """Inputs are aligned from the last dimension on; what has one entry, or none, is repeated."""
    made = meta.tensor(node)
    if made is None:
        return None
    takes: list[int | None] = []
    had = [each for each in node.args if isinstance(each, fx.Node) and each in dims]
    found = {dims[each] + made.dim() - _first(each).dim() for each in had}
    if len(found) != 1:
        return None
    (dim,) = found
    for each in node.args:
        value = meta.tensor(each) if isinstance(each, fx.Node) else None
        if isinstance(each, fx.Node) and value is None:
            return None  # a number that depends on the input
        takes.append(None if value is None else _dim_of(value, dim, made.dim()))
    return Rows(dim, tuple(takes))


def _dim_of(value: Tensor, dim: int, many: int) -> int | None:
    """The dimension of an input that becomes ``dim`` of ``many`` in the result; None if it is
    repeated along it."""
    own = dim - (many - value.dim())
    return own if own >= 0 and value.shape[own] != 1 else None


def _viewed(given: Tensor, dim: int, made: Tensor) -> int | None:
    """Along which dimension a view has the rows: chunks must be one piece, so that nothing but
    dimensions of one entry comes before."""
    if any(size != 1 for size in given.shape[:dim]):
        return None
    return next((place for place, size in enumerate(made.shape) if size != 1), None)


def _reduced(given: Tensor, dim: int, over: Any, made: Tensor) -> int | None:
    if not over:  # all of them
        return None
    gone = {each % given.dim() for each in (over if isinstance(over, (list, tuple)) else [over])}
    if dim in gone:
        return None
    return dim if made.dim() == given.dim() else dim - sum(each < dim for each in gone)


def _first(node: fx.Node) -> Tensor:
    """The fake value of a node, or the first of several, which have the same shape."""
    return _values(node)[0]


# --- where rows are cut ---------------------------------------------------------------------------


def step_of(rows: int, entries: int) -> int:
    """Of how many rows chunks must be multiples so that each is a slice of a dimension of so many
    entries."""
    return rows // math.gcd(rows, entries)


def bounds(rows: int, chunks: int, step: int) -> tuple[int, ...]:
    """Where chunks of nearly as many rows begin and end: multiples of ``step``."""
    return (*(round(number * rows / (chunks * step)) * step for number in range(chunks)), rows)
