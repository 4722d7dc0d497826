"""Which values that are computed from a gathered one can be computed on each rank's part of it.

A gathered value has a part from each rank. An operator on it *keeps parts* if each part of its
result depends on the same part of its input alone, and has the same bits for a part as for the
whole. Then it may run before the gather. A maximum over the parts is the maximum of the parts'
maxima, which are one number per rank. What is computed from that is equal on all ranks.

"The same bits" restricts operators. Vectorized functions such as ``exp`` may round a value
differently at another position, so only operators that round correctly are listed. The sign of a
maximum of 0.0 and -0.0 depends on the order, so it is tracked until an operator removes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.lengths import expression, is_multiple, product
from commpass.passes.fx.ops import ADDITIONS, RESHAPES, VIEWS, arguments, aten, is_cast, is_copy
from commpass.passes.fx.parse import is_wait
from commpass.passes.simplify.chains import rejoined_source
from commpass.passes.simplify.editor import fake


@dataclass(frozen=True)
class Shard:
    """How a value depends on the parts of a gathered one.

    Equal parts of dimension ``dim`` belong to the ranks, in rank order. If it is None, the value
    comes from maxima over all parts, and is equal on all ranks. If ``zero_sign``, the sign of a
    zero depends on the order of computation.
    """

    dim: int | None
    zero_sign: bool = False


@dataclass(frozen=True)
class Parts:
    """The parts of a gathered value, one of each of ``ranks`` ranks.

    If they are not ``even``, a view must leave their dimension as it is, and there are no maxima
    over them: each rank has other rows of the others. ``is_common`` says whether a size is equal on
    all ranks, and known before the gather.
    """

    ranks: int
    even: bool
    is_common: Callable[[Any], bool]

    def are_common(self, sizes: Iterable[Any]) -> bool:
        return all(map(self.is_common, sizes))


EXTREMA = (aten.amax.default, aten.amin.default)
WHOLE_EXTREMA = (aten.max.default, aten.min.default)
ABSOLUTE = (aten.abs.default,)
COMPARISONS = tuple(
    getattr(getattr(aten, name), kind)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("Tensor", "Scalar")
)
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
INTEGRAL = (aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default)
"""Operators whose results are whole numbers."""
WHOLE_SUMS = (aten.add.Tensor, aten.sub.Tensor)
LINEAR = (
    *(aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar),
    *(aten.sub.Tensor, aten.sub.Scalar, aten.neg.default, aten.maximum.default),
    *(aten.minimum.default, aten.where.self, *INTEGRAL),
)
"""Operators that turn a zero of unknown sign into a value that differs in the sign of a zero at
most."""
ROUNDED = (
    *LINEAR,
    *(aten.div.Tensor, aten.div.Scalar, aten.reciprocal.default, *CLAMPS, *COMPARISONS),
    *(aten.sign.default, aten.isnan.default, aten.isinf.default, aten.logical_not.default),
    *(aten.logical_and.default, aten.logical_or.default, aten.bitwise_not.default),
    *(aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.bitwise_or.Tensor),
    *(aten.bitwise_or.Scalar, aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar),
    *(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar),
    *(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar),
    *(aten.__rshift__.Scalar, aten.__lshift__.Scalar),
    *(aten.zeros_like.default, aten.ones_like.default, *ABSOLUTE),
)
"""Elementwise operators with the same bits at each position: exact, or correctly rounded."""
FILLS = {aten.full.default: "fill_value", aten.scalar_tensor.default: "s"}
"""Operators that give one number, which takes any shape, and the argument that has it."""
SIZED = (*RESHAPES, aten.expand.default)
"""Operators whose arguments besides the value are the sizes of the result."""
BITS = aten.view.dtype
INEXACT = (
    *(aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor),
    *(aten.sub.Scalar, aten.div.Tensor, aten.div.Scalar, aten.reciprocal.default),
)
"""Those whose results are rounded to their dtype."""
CHOICES = (
    *(*CLAMPS, *ABSOLUTE, *EXTREMA, *WHOLE_EXTREMA),
    *(aten.neg.default, aten.maximum.default, aten.minimum.default),
)
"""Those whose results are among their inputs and numbers, maybe negated."""


def shard_of(node: fx.Node, shards: Mapping[fx.Node, Shard], parts: Parts) -> Shard | None:
    """Return how the result of a node depends on the parts, given that of its inputs; None if it
    does not keep them."""
    source = rejoined_source(node)
    if source is not None:
        return _rejoined(node, source, shards, parts.ranks) if parts.even else None
    inputs = node.all_input_nodes
    if node.target in SIZED:
        inputs = [each for each in inputs if meta.tensor(each) is not None]
    if any(each not in shards and not _is_fill(each, parts) for each in inputs):
        return None
    if not isinstance(meta.tensor(node), torch.Tensor):
        return None
    if not any(each in shards for each in inputs) or _may_contract(node):
        return None
    if is_cast(node) or node.target in ROUNDED or _is_exact_power(node) or _is_masked_fill(node):
        return _elementwise(node, shards)
    given = shards.get(node.args[0])  # type: ignore[arg-type]
    if given is None or len(inputs) != 1:
        return None
    if node.target is BITS:
        same = fake(node).dtype.itemsize == fake(inputs[0]).dtype.itemsize
        return given if same and not given.zero_sign else None
    if node.target in EXTREMA or node.target in WHOLE_EXTREMA:
        return _extremum(node, shards[inputs[0]], parts)
    if given.dim is None:
        return given if is_copy(node) or _moves(node, parts) else None
    dim = dim_after(node, given.dim, parts)
    return None if dim is None else replace(given, dim=dim)


def _is_fill(node: fx.Node, parts: Parts) -> bool:
    """Whether a node is one number in a shape that is known before the gather."""
    if node.target not in FILLS or not parts.are_common(fake(node).shape):
        return False
    return isinstance(arguments(node)[FILLS[node.target]], (int, float))


def rounds_to_16_bits(node: fx.Node) -> bool:
    """Whether a node rounds its result to bfloat16 or float16.

    Inductor omits that rounding inside a kernel, and other kernels are made if nodes move across a
    collective.
    """
    dtype = fake(node).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    rounds = is_cast(node) or node.target in (*INEXACT, *CLAMPS)
    return rounds and not _is_exact(node, dtype)


def _is_exact(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a dtype holds the values of a node, since it is computed from such values by
    operators that keep or choose them."""
    if is_cast(node):
        return _is_exact_or_of(node.all_input_nodes[0], dtype)
    if node.target not in CHOICES:
        return False
    numbers = [each for each in arguments(node).values() if isinstance(each, (int, float))]
    fit = node.target not in CLAMPS or all(
        torch.tensor(each, dtype=dtype).item() == each for each in numbers
    )
    return fit and all(_is_exact_or_of(each, dtype) for each in node.all_input_nodes)


def _is_exact_or_of(node: fx.Node, dtype: torch.dtype) -> bool:
    return fake(node).dtype == dtype or _is_exact(node, dtype)


def _may_contract(node: fx.Node) -> bool:
    """Whether a compiler may join an addition with the product that computes the gathered values.

    Before the gather the two may be in one kernel, and a GPU would round once instead of twice.
    """
    if node.target not in ADDITIONS or fake(node).device.type == "cpu":
        return False
    return any(_is_gathered(each) for each in node.all_input_nodes)


def _is_gathered(node: fx.Node) -> bool:
    """Whether a value is a gathered one, moved or negated at most."""
    while not is_wait(node):
        moved = node.target in (*VIEWS, aten.neg.default) or is_copy(node)
        source = rejoined_source(node) or (node.args[0] if moved else None)
        if not isinstance(source, fx.Node):
            return False
        node = source
    return True


def is_extremum_of_parts(node: fx.Node, shards: Mapping[fx.Node, Shard]) -> bool:
    """Whether a node is a maximum or minimum over all parts: its input has them, its result has
    not."""
    given = shards.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    return given is not None and given.dim is not None and shards[node].dim is None


def _moves(node: fx.Node, parts: Parts) -> bool:
    if node.target in SIZED:
        return parts.are_common(fake(node).shape)
    return dim_after(node, 0, replace(parts, ranks=1)) is not None


def _rejoined(
    node: fx.Node, source: fx.Node, shards: Mapping[fx.Node, Shard], ranks: int
) -> Shard | None:
    """Return the shard of parts that are joined along another dimension."""
    pieces: Any = node.args[0]
    split = pieces[0].args[0]
    along = (split.args[2] if len(split.args) > 2 else 0) % fake(source).dim()
    given = shards.get(source)
    if given is None or given.dim != along or len(pieces) != ranks:
        return None
    to: Any = node.args[1] if len(node.args) > 1 else 0
    return replace(given, dim=to % fake(node).dim())


def _elementwise(node: fx.Node, shards: Mapping[fx.Node, Shard]) -> Shard | None:
    """Return the shard of an elementwise operator.

    Inputs are aligned at the last dimension. All that have parts must have them along the same
    dimension.
    """
    made = fake(node)
    dims: set[int] = set()
    for each in node.all_input_nodes:
        shard = shards.get(each)
        if shard is None:
            continue
        if shard.dim is not None:
            dims.add(shard.dim + made.dim() - fake(each).dim())
    if len(dims) > 1:
        return None
    dim = next(iter(dims), None)
    if dim is not None:
        for each in node.all_input_nodes:  # what all ranks have must be broadcast along the parts
            shard = shards.get(each)
            own = dim - (made.dim() - fake(each).dim())
            if shard is not None and shard.dim is None and own >= 0 and fake(each).shape[own] != 1:
                return None
    zero_sign = _zero_sign(node, shards)
    return None if zero_sign is None else Shard(dim, zero_sign)


def _zero_sign(node: fx.Node, shards: Mapping[fx.Node, Shard]) -> bool | None:
    """Return whether the sign of a zero of the result depends on the order; None if more than that
    may depend on it."""
    unknown = [each for each in node.all_input_nodes if each in shards and shards[each].zero_sign]
    made = fake(node)
    if not made.is_floating_point() and (is_cast(node) or node.target in COMPARISONS):
        return False
    if node.target in ABSOLUTE or node.target in (aten.zeros_like.default, aten.ones_like.default):
        return False
    if node.target in CLAMPS:
        bounds = arguments(node)
        low, high = bounds.get("min"), bounds.get("max")
        if any(isinstance(each, fx.Node) or each == 0 for each in (low, high)):
            return bool(made.is_floating_point())
        return bool(unknown) and not (isinstance(low, (int, float)) and low > 0)
    if node.target in (aten.maximum.default, aten.minimum.default) and made.is_floating_point():
        return not any(is_nonnegative(each) for each in node.all_input_nodes) or bool(unknown)
    if not unknown:
        return False
    if node.target in (aten.div.Tensor, aten.div.Scalar):
        return True if node.args[1] not in unknown else None
    return True if node.target in LINEAR or is_cast(node) else None


def is_nonnegative(node: fx.Node) -> bool:
    """Whether a value has no zero with a negative sign, by its operators alone."""
    for _ in range(8):
        if node.target in ABSOLUTE or not fake(node).is_floating_point():
            return True
        kept = is_cast(node) or is_copy(node) or node.target in (*EXTREMA, *WHOLE_EXTREMA)
        if not (kept or node.target in RESHAPES):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return False


def _extremum(node: fx.Node, of: Shard, parts: Parts) -> Shard | None:
    """Return the shard of a maximum or minimum."""
    source = fake(node.args[0])  # type: ignore[arg-type]
    signed = of.zero_sign or not is_nonnegative(node.args[0])  # type: ignore[arg-type]
    over: Any = node.args[1] if len(node.args) > 1 and node.target in EXTREMA else []
    gone = {each % source.dim() for each in over} or set(range(source.dim()))
    if of.dim is None:
        return Shard(None, signed)
    if of.dim in gone:
        fits = parts.even and parts.are_common(fake(node).shape)
        return Shard(None, signed) if fits else None
    keeps = fake(node).dim() == source.dim()
    return Shard(of.dim - (0 if keeps else sum(each < of.dim for each in gone)), signed)


def _is_masked_fill(node: fx.Node) -> bool:
    """Whether a node writes one number where a mask of the value's shape is true, as
    ``x[mask] = number`` does."""
    args: Any = node.args
    if node.target is not aten.index_put.default or len(args) != 3 or len(args[1]) != 1:
        return False
    values, (mask,), number = args
    if fake(mask).dtype != torch.bool or fake(number).dim():
        return False
    return meta.shape(fake(mask)) == meta.shape(fake(values))


def _is_exact_power(node: fx.Node) -> bool:
    """Whether a node is a power of two of a whole number, or the logarithm of which only the whole
    part is used.

    float32 alone: there, the whole part of a logarithm is the same for all functions that are wrong
    by two units in the last place at most, and give whole logarithms of powers of two exactly.
    """
    if node.target is aten.exp2.default:
        return fake(node).dtype == torch.float32 and _is_integral(node.args[0])
    whole = all(user.target in (aten.floor.default, aten.ceil.default) for user in node.users)
    return node.target is aten.log2.default and fake(node).dtype == torch.float32 and whole


def _is_integral(value: Any, depth: int = 8) -> bool:
    """Whether a number, or each value of a node, is a whole number by its operators alone.

    Sums of whole numbers are whole after rounding too.
    """
    if not isinstance(value, fx.Node):
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if value.target in INTEGRAL or not fake(value).is_floating_point():
        return True
    sums = value.target in WHOLE_SUMS and value.kwargs.get("alpha", 1) == 1
    kept = sums or is_cast(value) or is_copy(value) or value.target in RESHAPES
    given = value.args[: 2 if sums else 1]
    return depth > 0 and kept and all(_is_integral(each, depth - 1) for each in given)


def is_between(node: fx.Node) -> bool:
    """Whether a value is an intermediate one, whose bits only its users make the same everywhere:
    a logarithm before its whole part is taken."""
    return node.target is aten.log2.default


def dim_after(link: fx.Node, dim: int, parts: Parts) -> int | None:
    """Return the dimension of a link's result whose parts are those of dimension ``dim`` of its
    argument, or None."""
    args: Any = link.args
    if is_copy(link) or link.target in (aten.alias.default, aten.detach.default):
        return dim
    if not isinstance(args[0], fx.Node):
        return None
    given, made = fake(args[0]).shape, fake(link).shape
    if link.target is aten.permute.default:
        return [each % len(given) for each in args[1]].index(dim)
    if link.target in (aten.transpose.int, aten.t.default):
        a, b = (0, len(given) - 1)
        if link.target is aten.transpose.int:
            a, b = args[1] % len(given), args[2] % len(given)
        return {a: b, b: a}.get(dim, dim)
    if link.target is aten.unsqueeze.default:
        return dim + (dim >= args[1] % len(made))
    if link.target is aten.squeeze.dim:
        gone = args[1] % len(given)
        if len(made) == len(given):
            return dim
        return None if dim == gone else dim - (dim > gone)
    if link.target is aten.expand.default:
        new = dim + len(made) - len(given)
        return new if parts.are_common([*made[:new], *made[new + 1 :]]) else None
    if link.target is aten.constant_pad_nd.default:
        padded = {len(given) - 1 - number // 2 for number, by in enumerate(args[1]) if by}
        return None if dim in padded else dim
    if link.target is aten.slice.Tensor and not fake(link).is_floating_point():
        # Codes are packed from slices. A slice of values would be sent without the policy's codec.
        along = (args[1] if len(args) > 1 else 0) % len(given)
        return dim if along != dim or _is_every_nth(link, dim, parts) else None
    if link.target in RESHAPES:
        return _reshaped(given, made, dim, parts)
    return None


def _is_every_nth(link: fx.Node, dim: int, parts: Parts) -> bool:
    """Whether a slice takes every n-th entry of a dimension to its end, and each part has a
    multiple of n entries. Packed pairs of codes are such slices."""
    found = arguments(link)
    start, end, step = found.get("start") or 0, found.get("end"), found.get("step", 1)
    size = fake(link.args[0]).shape[dim]  # type: ignore[arg-type]
    known = isinstance(start, int) and isinstance(step, int)
    if not parts.even or not known or not 0 <= start < step:
        return False
    last = size if isinstance(size, int) else sys.maxsize
    to_end = end is None or (isinstance(end, int) and end >= last)
    return to_end and is_multiple(size, parts.ranks * step)


def _reshaped(source: torch.Size, result: torch.Size, dim: int, parts: Parts) -> int | None:
    """Return the dimension of a reshape's result with the same parts. The order of values is kept,
    so the preceding dimensions must have equal products."""
    before, length = product(source[:dim]), expression(source[dim])
    for number, size in enumerate(result):
        rest = (*result[:number], *result[number + 1 :])
        fits = parts.even and is_multiple(size, parts.ranks) and expression(size) != 0
        if (
            (fits or expression(size) == length)
            and product(result[:number]) == before
            and parts.are_common(rest)
        ):
            return number
    return None
