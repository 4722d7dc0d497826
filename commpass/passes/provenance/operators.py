"""The provenance rule of each operator that needs more than the arithmetic rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.ops import MATMUL_NAMES, arguments, name_of
from commpass.passes.fx.parse import is_collective
from commpass.passes.provenance.kinds import FIELD, FIELDS, NEUTRAL, SUMS, WHOLE, Kind, Provenance
from commpass.passes.provenance.walk import (
    Walk,
    inputs,
    is_number,
    joined,
    merged,
    numel,
    origin,
    tensors,
)

FEW = 1 << 14
"""The maximum number of values that a reduction leaves for them to be statistics: 64 KiB of
float32."""
LONG = 16
"""The minimum length of a reduced last dimension for its results to be statistics of rows, for any
number of rows.

Shorter sums combine values such as the outputs of a token's experts.
"""


def arithmetic(node: fx.Node, walk: Walk) -> Provenance:
    """The rule of arithmetic, views, casts, copies and all operators without a rule of their
    own."""
    return merged(node, inputs(node), walk)


def _always(kind: Kind) -> Rule:
    def rule(node: fx.Node, walk: Walk) -> Provenance:
        return Provenance(kind, name_of(node))

    return rule


def _matmul(node: fx.Node, walk: Walk) -> Provenance:
    """A matmul or convolution: a field, unless all inputs are integers. A batched dot product gives
    one statistic per row."""
    kinds = {walk.of(source).kind for source in inputs(node)}
    if kinds <= WHOLE | NEUTRAL:
        return Provenance(Kind.COUNT, name_of(node))
    return Provenance(Kind.STATISTIC, name_of(node)) if _is_dot(node) else FIELD


def _is_dot(node: fx.Node) -> bool:
    made = meta.tensor(node) if name_of(node) == "bmm" else None
    rows = meta.tensor(inputs(node)[0])
    if made is None or rows is None or meta.shape(made)[1:] != (1, 1):
        return False
    return (meta.hint(rows.shape[-1]) or 0) >= LONG


def _concatenated(node: fx.Node, walk: Walk) -> Provenance:
    """cat, stack, and operators that insert slices into a tensor."""
    sources = inputs(node)
    return joined([walk.of(source) for source in sources], sources)


def _filled(node: fx.Node, walk: Walk) -> Provenance:
    """Values of one tensor mixed with those of another or a number. Padding leaves a field a
    field."""
    given = arguments(node)
    keys = ("self", "other", "src", "values", "source")
    found = [walk.of(source) for source in tensors(given[key] for key in keys if key in given)]
    parts = [each for each in found if each.kind not in NEUTRAL]
    if not parts:
        return Provenance(Kind.MASK, name_of(node))
    return joined(parts, [node] * len(parts))


def _added_at(node: fx.Node, walk: Walk) -> Provenance:
    """Values added at indices. Of ones, this is a count."""
    given = arguments(node)
    keys = ("self", "src", "values", "source")
    found = merged(node, list(tensors(given[key] for key in keys if key in given)), walk)
    return Provenance(Kind.COUNT, name_of(node)) if found.kind in NEUTRAL | WHOLE else found


def _put(node: fx.Node, walk: Walk) -> Provenance:
    return (_added_at if arguments(node).get("accumulate", False) else _filled)(node, walk)


def _first(node: fx.Node, walk: Walk) -> Provenance:
    """A lookup or masking of the first tensor."""
    return walk.of(next(tensors(node.args), None))


def _picked(node: fx.Node, walk: Walk) -> Provenance:
    """Values selected by an index.

    One value per row (the log-probability of its label), or values of a sorted tensor (quantiles),
    are statistics.
    """
    found, value = _first(node, walk), meta.tensor(next(tensors(node.args)))
    if found.kind not in FIELDS:
        return found
    if found.how == SORTED or _one_of_each_row(node, value, walk):
        return Provenance(Kind.STATISTIC, name_of(node))
    return found


def _one_of_each_row(node: fx.Node, value: torch.Tensor | None, walk: Walk) -> bool:
    if value is None or not value.dim() or (meta.hint(value.shape[-1]) or 0) < LONG:
        return False
    if name_of(node) == "gather":
        given, index = arguments(node), meta.tensor(arguments(node)["index"])
        last = int(given["dim"]) % value.dim() == value.dim() - 1
        return last and index is not None and meta.shape(index)[-1:] == (1,)
    indices = arguments(node).get("indices", ())
    whole = len(indices) == value.dim() and all(isinstance(each, fx.Node) for each in indices)
    return whole and len(indices) > 1 and walk.of(indices[0]).how in ("arange", "iota")


def _sorted(node: fx.Node, walk: Walk) -> Provenance:
    found = arithmetic(node, walk)
    return Provenance(Kind.FIELD, SORTED) if found.kind in FIELDS else found


def _rounded(node: fx.Node, walk: Walk) -> Provenance:
    found = arithmetic(node, walk)
    return Provenance(Kind.INTEGER, name_of(node)) if found.kind in FIELDS else found


def _between(node: fx.Node, walk: Walk) -> Provenance:
    """An interpolation between two tensors. The weights do not count."""
    return merged(node, inputs(node)[:2], walk)


def _copied(node: fx.Node, walk: Walk) -> Provenance:
    return walk.of(arguments(node)["src"])


def _full(node: fx.Node, walk: Walk) -> Provenance:
    """A constant, or zeros if the called operator's name says so.

    A number in the graph may be local to a rank and differ on others. Uninitialized memory is
    neutral, like zeros.
    """
    given, name = arguments(node), name_of(node)
    called = node.meta.get("original_aten")
    by_name = str(getattr(called, "_opname", name)).rstrip("_")
    value = given.get("fill_value", given.get("value", given.get("s", 1)))
    plain = not isinstance(value, fx.Node) and value == 0
    zero = "zero" in by_name or "empty" in by_name
    zero = zero or (plain and (called is None or by_name not in NUMBERED))
    return Provenance(Kind.ZERO if zero else Kind.CONSTANT, name)


def _squared(node: fx.Node, walk: Walk) -> Provenance:
    found = arithmetic(node, walk)
    even = name_of(node) != "pow" or node.args[1] == 2
    return Provenance(Kind.SQUARE, name_of(node)) if even and found.kind in FIELDS else found


def _multiplied(node: fx.Node, walk: Walk) -> Provenance:
    sources = inputs(node)
    if _is_scaled(sources, walk):
        return FIELD
    fields = [source for source in sources if walk.of(source).kind in FIELDS]
    if len(fields) < 2 or any(is_number(meta.tensor(source)) for source in fields):
        return arithmetic(node, walk)
    origins = [origin(source) for source in fields]
    if origins[0] is origins[1]:
        return Provenance(Kind.SQUARE, name_of(node))
    alike = len({numel(each) for each in (node, *origins)}) == 1
    return Provenance(Kind.ALIGNED if alike else Kind.PRODUCT, name_of(node))


def _is_scaled(sources: list[fx.Node], walk: Walk) -> bool:
    """Whether integers are multiplied by measured scales, one in total or one per row, as in
    dequantization."""
    if len(sources) < 2 or walk.of(sources[0]).kind is not Kind.INTEGER:
        sources = sources[::-1]
    size, scales = numel(sources[0]), sources[1:]
    if walk.of(sources[0]).kind is not Kind.INTEGER or size is None:
        return False
    known = [(walk.of(each).kind, numel(each)) for each in scales]
    return bool(known) and all(
        kind not in WHOLE | NEUTRAL and each is not None and each < size for kind, each in known
    )


def broadcast_later(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that a larger tensor is computed from elementwise. They are reused by a
    layer, and are no parameter gradients. Linear."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        size = numel(node)
        for user in node.users:
            if name_of(user) in SHRINKING or RULES.get(name_of(user)) is _concatenated:
                continue
            larger = size is not None and (numel(user) or 0) > size
            if (larger and not is_collective(user)) or user in found:
                found.add(node)
                break
    return found


# --- reductions -----------------------------------------------------------------------------------


def _reduced(node: fx.Node, walk: Walk) -> Provenance:
    """A sum, mean, variance or maximum: statistics if it leaves few values.

    A sum in a backward pass is a gradient, for example of a bias. A sum of products is a matmul's
    result, and a sum of squares is a norm.
    """
    if getattr(node.target, "_overloadname", "") == "other":  # max(x, y), elementwise
        return arithmetic(node, walk)
    name, source = name_of(node), next(tensors(node.args), None)
    found = walk.of(source)
    how = f"{name} of {found.how}" if found.how else name
    if found.kind in WHOLE:
        return Provenance(Kind.COUNT, how) if name in ADDING else found
    value = meta.tensor(source) if source is not None else None
    if value is None or found.kind not in FIELDS | SUMS:
        return found
    dims = _dims(node, value.dim())
    adds, every = name == "sum" and found.kind is not Kind.SQUARE, len(dims) == value.dim()
    if not _is_statistic(value, dims, name == "sum"):
        return FIELD
    if adds and walk.is_gradient(node):
        return Provenance(Kind.GRADIENT, how)
    rows = found.kind is Kind.ALIGNED and _last(value) in dims
    if adds and found.kind in (Kind.PRODUCT, Kind.ALIGNED) and not every and not rows:
        return FIELD
    of_columns = adds and not every and 0 in dims
    return Provenance(Kind.COLUMN_SUM if of_columns else Kind.STATISTIC, how)


def _dims(node: fx.Node, rank: int) -> frozenset[int]:
    """Return the dimensions that a reduction removes."""
    given = arguments(node)
    named = given.get("dim", given.get("dims"))
    some = [named] if isinstance(named, int) else list(named or range(rank))
    return frozenset(dim % max(rank, 1) for dim in some if rank)


def _is_statistic(value: torch.Tensor, dims: frozenset[int], adds: bool) -> bool:
    """Whether a reduction leaves numbers that are no field.

    The size of a dimension that may be the batch does not count. Batch sizes differ between ranks,
    and ranks must decide alike.
    """
    last = _last(value)
    length = meta.hint(value.shape[last]) if value.dim() else None
    if len(dims) == value.dim() or (dims == {last} and (length or 0) >= LONG):
        return True
    sizes = [meta.hint(size) for dim, size in enumerate(value.shape) if dim not in dims]
    left = [size for size in sizes if size is not None]
    if len(left) < len(sizes) or math.prod(left) > FEW:
        return False
    return not adds or bool(dims & {0, last})  # otherwise the parts of each token are added


def _last(value: torch.Tensor) -> int:
    """Return the last dimension with more than one entry."""
    sizes = meta.shape(value)
    return max((dim for dim, size in enumerate(sizes) if size != 1), default=len(sizes) - 1)


SORTED = "sort"
NUMBERED = ("full", "full_like", "new_full", "fill", "scalar_tensor")
ADDING = ("sum", "nansum", "mean")
REDUCTIONS = (
    *("sum", "nansum", "mean", "var", "var_mean", "std", "std_mean", "amax", "amin", "aminmax"),
    *("max", "min", "kthvalue", "median", "nanmedian", "mode", "prod", "logsumexp", "dot", "vdot"),
)
NORMS = ("linalg_vector_norm", "norm", "_foreach_norm")
SHRINKING = frozenset({*REDUCTIONS, *NORMS})
STATISTICS_OF: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm"), (1, 2)),
    **dict.fromkeys(("cudnn_batch_norm", "miopen_batch_norm", "_fused_rms_norm"), (1, 2)),
    **dict.fromkeys(("_native_batch_norm_legit", "_batch_norm_with_update"), (1, 2)),
    "_native_batch_norm_legit_functional": (1, 2, 3, 4),
    "_native_batch_norm_legit_no_training": (1, 2),
    "_batch_norm_with_update_functional": (1, 2, 4, 5),
    **dict.fromkeys(("batch_norm_stats", "batch_norm_gather_stats"), (0, 1)),
    **dict.fromkeys(("batch_norm_gather_stats_with_counts", "batch_norm_backward_reduce"), (0, 1)),
    "_scaled_dot_product_flash_attention": (1,),
    "_scaled_dot_product_flash_attention_for_cpu": (1,),
    "_scaled_dot_product_efficient_attention": (1,),
    "_scaled_dot_product_cudnn_attention": (1,),
    "_flash_attention_forward": (1,),
    "_efficient_attention_forward": (1,),
}
"""Which results of an operator are statistics of its input: means, deviations, log-sum-exps."""
Rule = Callable[[fx.Node, Walk], Provenance]
ROWS: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (_reduced, REDUCTIONS),
    (_matmul, MATMUL_NAMES),
    (_always(Kind.NORM), NORMS),
    (_always(Kind.COUNT), ("bincount", "histc", "count_nonzero")),
    (_always(Kind.INDEX), ("arange", "iota", "argmax", "argmin", "argsort", "nonzero")),
    (_always(Kind.INDEX), ("searchsorted", "bucketize", "randperm")),
    (_always(Kind.MASK), ("bernoulli", "one_hot")),
    (_always(Kind.FIELD), ("sin", "cos")),  # of positions, for example
    (_always(Kind.FIELD), ("rand_like", "randn_like", "uniform", "normal", "inductor_random")),
    (_always(Kind.LOSS), ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
    (_always(Kind.LOSS), ("nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy")),
    (_concatenated, ("cat", "stack", "hstack", "vstack")),
    (_concatenated, ("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")),
    (_filled, ("where", "scatter", "index_copy", "masked_scatter")),
    (_put, ("index_put", "_unsafe_index_put", "_index_put_impl")),
    (_added_at, ("scatter_add", "scatter_reduce", "index_add")),
    (_picked, ("gather", "index", "_unsafe_index", "index_select", "take")),
    (_first, ("embedding",)),
    (_sorted, ("sort",)),
    (_rounded, ("round", "floor", "ceil", "trunc", "randint", "randint_like", "poisson")),
    (_first, ("masked_fill", "masked_select", "index_fill")),
    (_between, ("lerp",)),
    (_copied, ("copy",)),
    (_full, ("full", "full_like", "new_full", "fill", "ones", "ones_like", "new_ones")),
    (_full, ("scalar_tensor", "zeros", "zeros_like", "new_zeros", "zero", "_efficientzerotensor")),
    (_full, ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")),
    (_squared, ("pow", "abs", "square")),
    (_multiplied, ("mul",)),
)
RULES = {name: rule for rule, names in ROWS for name in names}
"""The rules, by operator name."""
