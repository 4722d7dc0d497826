"""Where a matmul's rows are in tensors computed from its result, and which operators are row-wise.

Rows are the entries of a matmul's first dimension. A tensor that holds them has a dimension along
which a chunk of rows is a slice. This is 0 for ``[M, N]``, and for ``[B, S, N]`` if chunks end
between batch entries; it is 1 for ``[1, S, N]``. A tensor gathered from R ranks has R blocks along
it, one per rank, and a chunk is a slice of each block.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from commpass.passes.fx import meta
from commpass.passes.fx.ops import RESHAPES, ROW_MATMULS, aten, is_pointwise


@dataclass(frozen=True)
class Axis:
    """Where a tensor has rows: along ``dim``, in ``blocks`` of equal length. A chunk of rows is a
    slice of each block."""

    dim: int
    blocks: int = 1


Takes = tuple[Axis | None, ...]


@dataclass(frozen=True)
class Rows:
    """How a node treats rows.

    Its result has them along ``axis``. ``takes`` gives, for each argument, the axis along which a
    chunk slices it, or None if each chunk uses it whole. For a list, the axis holds for each
    tensor.
    """

    axis: Axis
    takes: Takes


REDUCTIONS = (
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.var_mean.correction,
)
"""Operators that reduce some dimensions, given by the second argument."""
OVER_ONE = (aten._softmax.default, aten._log_softmax.default)
"""Operators along one dimension, given by the second argument."""


def matmul_rows(node: fx.Node, blocks: int = 1) -> Rows | None:
    """Return how a matmul treats the rows of its result in ``blocks`` blocks; None for other
    nodes."""
    if node.op != "call_function" or node.target not in ROW_MATMULS:
        return None
    axis = Axis(0, blocks)
    if node.target == aten.mm.default:
        return Rows(axis, (axis, None))
    bias = meta.tensor(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    return None if bias is None else Rows(axis, (_axis_of(bias, axis, 2), axis, None))


def rows_of(node: fx.Node, axes: Mapping[fx.Node, Axis]) -> Rows | None:
    """Return how a node treats the rows of its inputs, which have them along ``axes``.

    Return None if it has no rows, if a row depends on other rows, or if this is unknown.
    """
    if node.op != "call_function":
        return None
    if node.target == aten.cat.default:
        return _joined(node, axes)
    given = [each if isinstance(each, fx.Node) else None for each in node.args]
    if not any(each in axes for each in given):
        return None
    if any(each not in given for each in node.all_input_nodes):
        return None  # in a list or by keyword
    if (found := _rule(node, axes)) is None:
        return None
    pairs = zip(given, found.takes, strict=True)
    fits = all(each is None or axes.get(each, axis) == axis for each, axis in pairs)
    return found if fits else None


def length(node: fx.Node, axis: Axis) -> int:
    """Return the entries of a block of a node's result."""
    return int(_first(node).shape[axis.dim]) // axis.blocks


def is_contiguous(node: fx.Node) -> bool:
    """Whether all results of a node are contiguous, one row after the other."""
    return all(each.is_contiguous() for each in _values(node))


def is_fixed(node: fx.Node) -> bool:
    """Whether all sizes of a node's results are numbers."""
    return all(isinstance(size, int) for each in _values(node) for size in each.shape)


def _values(node: fx.Node) -> list[Tensor]:
    return list(meta.tensors(node.meta.get("val")))


def _rule(node: fx.Node, axes: Mapping[fx.Node, Axis]) -> Rows | None:
    target, rest = node.target, (None,) * (len(node.args) - 1)
    if target in ROW_MATMULS:
        place = 0 if target == aten.mm.default else 1
        axis = axes.get(node.args[place])  # type: ignore[arg-type]
        return None if axis is None else matmul_rows(node, axis.blocks)
    if is_pointwise(target):
        return _pointwise(node, axes)
    axis = axes.get(node.args[0])  # type: ignore[arg-type]
    if axis is None:
        return None
    if target is operator.getitem:
        return Rows(axis, (axis, *rest))
    given = meta.tensor(node.args[0])  # type: ignore[arg-type]
    if given is None:
        return None
    if target in RESHAPES:
        made = _viewed(given, axis, _first(node))
    elif target in REDUCTIONS:
        over = node.args[1] if rest else None  # default: all dimensions
        made = _reduced(given, axis, over, _first(node))
    elif target in OVER_ONE:
        made = None if node.args[1] % given.dim() == axis.dim else axis  # type: ignore[operator]
    elif target == aten.split.Tensor:
        made = _divided(node, given, axis)
    elif target == aten._to_copy.default:
        made = axis
    else:
        return None
    return None if made is None else Rows(made, (axis, *rest))


def _pointwise(node: fx.Node, axes: Mapping[fx.Node, Axis]) -> Rows | None:
    """Return the rows of a pointwise operator. Inputs are aligned at the last dimension; missing
    dimensions and those of size 1 are broadcast."""
    made = meta.tensor(node)
    if made is None:
        return None
    takes: list[Axis | None] = []
    had = [each for each in node.args if isinstance(each, fx.Node) and each in axes]
    found = {
        Axis(axes[each].dim + made.dim() - _first(each).dim(), axes[each].blocks) for each in had
    }
    if len(found) != 1:
        return None
    (axis,) = found
    for each in node.args:
        value = meta.tensor(each) if isinstance(each, fx.Node) else None
        if isinstance(each, fx.Node) and value is None:
            return None  # a number that depends on the input
        takes.append(None if value is None else _axis_of(value, axis, made.dim()))
    return Rows(axis, tuple(takes))


def _axis_of(value: Tensor, axis: Axis, rows: int) -> Axis | None:
    """Return the axis of an input for a result of ``rows`` dimensions; None if the input is
    broadcast along it."""
    own = axis.dim - (rows - value.dim())
    return Axis(own, axis.blocks) if own >= 0 and value.shape[own] != 1 else None


def _viewed(source: Tensor, axis: Axis, result: Tensor) -> Axis | None:
    """Return the rows' axis of a view. A block must stay contiguous, so only dimensions of size 1
    may precede it."""
    if any(size != 1 for size in source.shape[: axis.dim]):
        return None
    dim = next((place for place, size in enumerate(result.shape) if size != 1), None)
    return None if dim is None or result.shape[dim] % axis.blocks else Axis(dim, axis.blocks)


def _reduced(source: Tensor, axis: Axis, over: Any, result: Tensor) -> Axis | None:
    if not over:
        return None
    dims = {each % source.dim() for each in (over if isinstance(over, (list, tuple)) else [over])}
    if axis.dim in dims:
        return None
    less = 0 if result.dim() == source.dim() else sum(each < axis.dim for each in dims)
    return Axis(axis.dim - less, axis.blocks)


def _divided(node: fx.Node, source: Tensor, axis: Axis) -> Axis | None:
    """Return the rows' axis after a split along another dimension or into the blocks."""
    _, size, *along = node.args
    dim: int = (along[0] if along else 0) % source.dim()  # type: ignore[operator, assignment]
    if dim != axis.dim:
        return axis
    one_each = size * axis.blocks == source.shape[dim]  # type: ignore[operator]
    return Axis(dim) if one_each and axis.blocks > 1 else None


def _joined(node: fx.Node, axes: Mapping[fx.Node, Axis]) -> Rows | None:
    """Return the rows of a concatenation, along another dimension or along the rows. In the latter
    case each input becomes a block."""
    parts, made = node.args[0], meta.tensor(node)
    found = {axes.get(part) for part in parts}  # type: ignore[union-attr, arg-type]
    axis = next(iter(found))
    if len(found) != 1 or axis is None or made is None:
        return None
    rest = (None,) * (len(node.args) - 1)
    dim: int = (node.args[1] if rest else 0) % made.dim()  # type: ignore[operator, assignment]
    if dim != axis.dim:
        return Rows(axis, (axis, *rest))
    lengths = {length(part, axis) for part in parts}  # type: ignore[union-attr, arg-type]
    if axis.blocks != 1 or len(lengths) != 1:
        return None
    return Rows(Axis(dim, len(parts)), (axis, *rest))  # type: ignore[arg-type]


def _first(node: fx.Node) -> Tensor:
    """Return the fake value of a node, or the first of several, which have equal shapes."""
    return _values(node)[0]


# --- chunk bounds ---------------------------------------------------------------------------------


def step_of(rows: int, entries: int) -> int:
    """Return the number of rows that chunks must be multiples of, so that each is a slice of a
    dimension of ``entries``."""
    return rows // math.gcd(rows, entries)


def bounds(rows: int, chunks: int, step: int) -> tuple[int, ...]:
    """Return the bounds of chunks of nearly equal size, as multiples of ``step``."""
    return (*(round(number * rows / (chunks * step)) * step for number in range(chunks)), rows)
