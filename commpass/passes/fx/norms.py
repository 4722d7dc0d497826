"""Norms: the RMSNorms and LayerNorms of a graph, as models and torch's decompositions write them.

Both are ``y = x * rsqrt(mean(x^2) + eps)``, in float32 over the last dimension; a LayerNorm first
subtracts the mean. A weight, a bias and casts follow, in an order that differs between models.
Llama and Qwen multiply by the weight after the cast back, Gemma by ``1 + weight`` before it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from commpass.lowering.chain import Cast, Normalize, Scale, Shift, Step, dtype_after
from commpass.passes.fx import meta
from commpass.passes.fx.ops import arguments, aten, is_float_cast, only_user

ADDED = (aten.add.Tensor, aten.add.Scalar)
MULTIPLIED = (aten.mul.Tensor,)
VALUES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of the values and weights of norms."""


@dataclass(frozen=True)
class Norm:
    """A norm of ``input``: its nodes, users after what they use, of which the last is the result.

    ``steps`` are a ``Normalize``, then the casts, the weight and the bias. ``others`` are the
    weight and the bias, in the order of the steps. ``saved`` are the statistics that other nodes
    use, in the order of ``Normalize.saved``.
    """

    input: fx.Node
    nodes: tuple[fx.Node, ...]
    steps: tuple[Step, ...]
    others: tuple[fx.Node, ...] = ()
    saved: tuple[fx.Node, ...] = ()

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


def norms_of(node: fx.Node) -> Iterator[Norm]:
    """Yield the norms that normalize a node's values. Statistics in another dtype than float32,
    other dimensions than the last, and values inside that others use are no norm."""
    value = meta.tensor(node)
    if value is None or value.dtype not in VALUES or not value.dim() or not meta.is_fixed(value):
        return
    sources = [node] if value.dtype == torch.float32 else []
    sources += [user for user in node.users if is_float_cast(user) and _is_float32(user)]
    for source in sources:
        for user in source.users:
            found = _root_mean_square(source, user) or _centered(source, user)
            if found is not None:
                inner = {*found.nodes}
                if source is not node and inner.issuperset(source.users):
                    found = replace(found, nodes=(source, *found.nodes))
                yield _with_rest(node, found)
    for user in node.users:
        if (whole := _one_operator(node, user)) is not None:
            yield whole


@dataclass(frozen=True)
class _Core:
    """The nodes of a norm up to the normalized values, without weight."""

    nodes: tuple[fx.Node, ...]
    normalize: Normalize
    saved: tuple[fx.Node, ...]


def _root_mean_square(source: fx.Node, square: fx.Node) -> _Core | None:
    """Return the core of an RMSNorm that begins with a square of a source."""
    if not _is_square(source, square):
        return None
    mean = only_user(square)
    if mean is None or mean.target is not aten.mean.dim or not _is_over_last(mean):
        return None
    if arguments(mean).get("keepdim") is not True or arguments(mean).get("dtype") is not None:
        return None
    if (found := _factor(mean)) is None:
        return None
    shifted, rsqrt, eps = found
    y = next((u for u in rsqrt.users if _is_product(u, source, rsqrt)), None)
    if y is None:
        return None
    saved = _saved(rsqrt, (y,))
    normalize = Normalize(_width(source), eps, False, ("rsqrt",) * len(saved))
    return _Core((square, mean, shifted, rsqrt, y), normalize, saved)


def _centered(source: fx.Node, both: fx.Node) -> _Core | None:
    """Return the core of a LayerNorm that begins with the variance and mean of a source."""
    if both.target is not aten.var_mean.correction or not _is_over_last(both):
        return None
    given = arguments(both)
    if given.get("correction", 1) != 0 or given.get("keepdim") is not True:
        return None
    items = {user.args[1]: user for user in both.users if user.target is operator.getitem}
    if set(items) != {0, 1} or len(both.users) != 2 or (found := _factor(items[0])) is None:
        return None
    shifted, rsqrt, eps = found
    mean = items[1]
    minus = next((u for u in mean.users if _is_difference(u, source, mean)), None)
    y = only_user(minus) if minus is not None else None
    if minus is None or y is None or not _is_product(y, minus, rsqrt):
        return None
    saved = {"mean": _saved(mean, (minus,)), "rsqrt": _saved(rsqrt, (y,))}
    names = tuple(name for name, nodes in saved.items() if nodes)
    normalize = Normalize(_width(source), eps, True, names)
    nodes = (both, items[0], mean, shifted, rsqrt, minus, y)
    return _Core(nodes, normalize, (*saved["mean"], *saved["rsqrt"]))


def _with_rest(node: fx.Node, core: _Core) -> Norm:
    """Return the norm with the casts, the weight and the bias after its core."""
    nodes, steps, others = list(core.nodes), list[Step]([core.normalize]), list[fx.Node]()
    while (user := only_user(nodes[-1])) is not None:
        step, row = _after(user, nodes[-1], core.normalize.width)
        if step is None:
            break
        nodes.append(user)
        steps.append(step)
        others += [row] if row is not None else []
        nodes[:0] = _private(user, nodes, row)
    return Norm(node, tuple(sorted(nodes)), tuple(steps), tuple(others), core.saved)


def _private(user: fx.Node, inside: list[fx.Node], row: fx.Node | None) -> list[fx.Node]:
    """Return the nodes that compute what a norm's node reads from a weight, if nothing else uses
    them."""
    found, left = list[fx.Node](), [user]
    while left:
        sources = left.pop().all_input_nodes
        new = [s for s in sources if s is not row and s not in inside and only_user(s) is not None]
        found += [each for each in new if each.op == "call_function"]
        left += new
    return found if row is not None else []


def _after(node: fx.Node, value: fx.Node, width: int) -> tuple[Step | None, fx.Node | None]:
    """Return a node after a norm as a step, and its weight or bias."""
    if is_float_cast(node) and _dtype(node) in VALUES:
        return Cast(_dtype(node)), None
    if node.target not in (*MULTIPLIED, aten.add.Tensor) or node.kwargs.get("alpha", 1) != 1:
        return None, None
    row = next((arg for arg in node.args[:2] if arg is not value), None)
    if not isinstance(row, fx.Node) or not _is_row(row, width):
        return None, None
    dtype = _dtype(value)
    if node.target is aten.add.Tensor:
        step: Step = Shift(width, _dtype(row))
    else:
        row, offset = _weight(row, dtype)
        step = Scale(width, _dtype(row), offset)
    return (step, row) if dtype_after(step, dtype) == _dtype(node) else (None, None)


def _weight(row: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, float]:
    """Return the weight that a row is computed from in float32, and the offset added to it."""
    offset = 0.0
    if row.target in ADDED and _dtype(row) == torch.float32 and _added_number(row):
        offset, row = _added_number(row), row.all_input_nodes[0]
    wide = offset != 0.0 or dtype == torch.float32
    if wide and is_float_cast(row) and _dtype(row) == torch.float32:
        narrow = row.all_input_nodes[0]
        if _dtype(narrow) in VALUES:
            row = narrow
    return row, offset


def _one_operator(node: fx.Node, call: fx.Node) -> Norm | None:
    """Return a norm that is a single operator with several results."""
    if call.target not in (aten.native_layer_norm.default, aten._fused_rms_norm.default):
        return None
    centered = call.target is aten.native_layer_norm.default
    given: dict[str, Any] = arguments(call)
    value = node.meta["val"]
    width, eps = value.shape[-1], given.get("eps")
    items: dict[Any, fx.Node] = {
        user.args[1]: user for user in call.users if user.target is operator.getitem
    }
    statistics = {1: "mean", 2: "rsqrt"} if centered else {1: "rsqrt"}
    if (
        given["input"] is not node
        or list(given["normalized_shape"]) != [width]
        or not isinstance(eps, float)
        or 0 not in items
        or len(items) != len(call.users)
        or not all(_is_float32(items[at]) for at in statistics if _is_used(items, at))
    ):
        return None
    saved = {name: items[at] for at, name in statistics.items() if _is_used(items, at)}
    steps: list[Step] = [Normalize(width, eps, centered, tuple(saved))]
    others, dtype = list[fx.Node](), torch.float32
    for name, kind in (("weight", Scale), ("bias", Shift)):
        row = given.get(name)
        if row is None:
            continue
        if not _is_row(row, width):
            return None
        steps.append(kind(width, _dtype(row)))
        others.append(row)
    if _dtype(items[0]) != dtype:
        steps.append(Cast(_dtype(items[0])))
    nodes = (call, *(items[at] for at in sorted(items, reverse=True)))
    return Norm(node, nodes, tuple(steps), tuple(others), tuple(saved.values()))


def _is_used(items: dict[Any, fx.Node], at: int) -> bool:
    return at in items and bool(items[at].users)


# --- patterns -------------------------------------------------------------------------------------


def _factor(mean: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Return ``mean + eps``, its reciprocal root, and eps, if ``mean`` has no other use."""
    shifted = only_user(mean)
    if shifted is None or shifted.target not in ADDED:
        return None
    eps = _added_number(shifted)
    rsqrt = only_user(shifted)
    if eps is None or rsqrt is None or rsqrt.target is not aten.rsqrt.default:
        return None
    return shifted, rsqrt, eps


def _added_number(node: fx.Node) -> Any:
    """Return the number that a node adds to a tensor, or None."""
    given: Any = [*node.args, None][1]
    known = isinstance(given, (int, float)) and not isinstance(given, bool)
    return float(given) if known and node.kwargs.get("alpha", 1) == 1 else None


def _is_square(source: fx.Node, node: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[0] is source and node.args[1] == 2)
    return node.target is aten.square.default or _is_product(node, source, source)


def _is_product(node: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    return node.target in MULTIPLIED and bool(node.args[:2] in ((a, b), (b, a)))


def _is_difference(node: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    if node.target is not aten.sub.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    return bool(node.args[:2] == (a, b))


def _is_over_last(node: fx.Node) -> bool:
    """Whether a node reduces the last dimension of its input alone."""
    dims: Any = arguments(node).get("dim")
    last = node.all_input_nodes[0].meta["val"].dim() - 1
    return dims is not None and [dim % (last + 1) for dim in dims] == [last]


def _is_row(node: fx.Node, width: int) -> bool:
    """Whether a node is one contiguous row, with a float for each normalized value."""
    value = meta.tensor(node)
    return (
        value is not None
        and tuple(value.shape) == (width,)
        and value.dtype in VALUES
        and value.is_contiguous()
    )


def _saved(statistic: fx.Node, inside: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """Return a statistic if nodes other than those inside the norm use it."""
    return (statistic,) if any(user not in inside for user in statistic.users) else ()


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_float32(node: fx.Node) -> bool:
    return _dtype(node) == torch.float32


def _width(node: fx.Node) -> int:
    return int(node.meta["val"].shape[-1])
