"""The metadata of nodes: sizes and their hints, module paths, and annotations of users."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from commpass.policy.paths import ModulePaths, clean, is_parallel


def tensor(node: fx.Node) -> torch.Tensor | None:
    """Return the fake tensor that a node computes, or None unless it is a single tensor."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return value if isinstance(value, torch.Tensor) else None


def value(node: fx.Node) -> Any:
    """Return the fake value, or symbolic number, of a node."""
    return node.meta["val"] if "val" in node.meta else node.meta["example_value"]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a fake value: one, or several in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def is_fixed(value: Any) -> bool:
    """Whether a value is a tensor whose sizes and strides are numbers."""
    if not isinstance(value, torch.Tensor):
        return False
    return not value._has_symbolic_sizes_strides or all(
        isinstance(number, int) for number in (*value.shape, *value.stride())
    )


def layout(value: Any) -> tuple[Any, ...]:
    """Return the dtype, device, sizes and strides of a tensor as a key; other values as text."""
    if not isinstance(value, torch.Tensor):
        return (str(value),)
    return value.dtype, value.device, str(tuple(value.shape)), str(value.stride())


_assumed: ContextVar[dict[Any, Any] | None] = ContextVar("_assumed", default=None)


@contextmanager
def assuming(sizes: Mapping[Any, int]) -> Iterator[None]:
    """Decide in this context as if these symbols of a graph had these values, instead of those at
    trace time."""
    token = _assumed.set({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    try:
        yield
    finally:
        _assumed.reset(token)


def hint(size: Any) -> int | None:
    """Return a size as a number. For a symbolic size, return its assumed value or that at trace
    time, or None if unknown."""
    if isinstance(size, int):
        return size
    if isinstance(size, torch.SymInt):
        node = size.node
        if (assumed := _assumed.get()) and node.expr.free_symbols & assumed.keys():
            value = node.expr.xreplace(_traced(node.shape_env) | assumed)
            if value.is_number:
                return int(value)
        return int(node.hint) if node.has_hint() and node.hint is not None else None
    return None


def _traced(env: ShapeEnv) -> dict[Any, Any]:
    """Return the values that symbols had at trace time."""
    known: Any = getattr(env, "backed_var_to_val", None)  # its name since torch 2.13
    return dict(env.var_to_val if known is None else known)


def shape(value: torch.Tensor) -> tuple[int | str, ...]:
    """Return the shape, with symbolic sizes as text."""
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)


def nbytes(value: torch.Tensor) -> int:
    """Return the bytes of a tensor, with hints for symbolic sizes; -1 if a hint is missing."""
    total = value.dtype.itemsize
    for size in value.shape:
        known = hint(size)
        if known is None:
            return -1
        total *= known
    return total


def total_nbytes(value: Any) -> int:
    """Return the bytes of the tensors of a fake value. Those of unknown size count as 0."""
    return sum(max(nbytes(each), 0) for each in tensors(value))


def input_nbytes(node: fx.Node) -> int:
    """Return the bytes of a node's input tensors, each counted once. Those of unknown size count as
    0."""
    return sum(total_nbytes(each.meta.get("val")) for each in node.all_input_nodes)


def width(value: torch.Tensor) -> int:
    """Return the number of values per entry of the first dimension. Use hints for symbolic sizes,
    and 1 if a hint is missing."""
    known = (hint(size) for size in value.shape[1:])
    return math.prod(1 if size is None else size for size in known)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PLACE = "commpass_module"
"""The key in ``node.meta["custom"]`` of a module path that differs from the node's module stack."""
LABEL = "commpass_label"
"""The key of what reports call a site, if the path says too little."""
STACKS = ("nn_module_stack", "fwd_nn_module_stack")
"""Forward nodes have the first key. Backward nodes have the second if autograd's formulas made
them, and the first if an autograd.Function or a recomputation did."""


def module_path(node: fx.Node) -> str:
    """Return the path of a node's module in the root model, in forward and backward; "" for the
    root itself, or if unknown."""
    placed = annotation(node, PLACE)
    return _own_path(node) if placed is None else placed


def record_module_paths(gm: fx.GraphModule, paths: ModulePaths) -> None:
    """Record the module path on each node of a Dynamo graph whose module stack gives another path.
    AOTAutograd copies it to its graphs."""
    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            path = paths.path(_stack(node))
            if path is not None and path != _own_path(node):
                node.meta["custom"] = {**(node.meta.get("custom") or {}), PLACE: path}


def _stack(node: fx.Node) -> Mapping[str, tuple[str, Any]]:
    return next((node.meta[key] for key in STACKS if node.meta.get(key)), {})


def _own_path(node: fx.Node) -> str:
    """Return the path in the node's module stack, which is relative to the compiled code."""
    rows = list(_stack(node).values())
    return clean(rows[-1][0], [path for path, kind in rows if is_parallel(kind)]) if rows else ""


def annotation(node: fx.Node, key: str) -> str | None:
    """Return the node's annotation under ``key``, or None."""
    custom = node.meta.get("custom")
    found = custom.get(key) if isinstance(custom, dict) else None
    return found if isinstance(found, str) else None


CARRIED = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "custom",
    "seq_nr",
    "source_fn_stack",
    "recompute",
    "partitioner_tag",
)
"""The metadata that an inserted node takes over from its site's collective."""


def carry(source: fx.Node, target: fx.Node) -> None:
    target.meta.update(carried(source))


def carried(source: fx.Node) -> dict[str, Any]:
    """Return the metadata of a node that an inserted node takes over."""
    return {key: source.meta[key] for key in CARRIED if key in source.meta}


def device_of(gm: fx.GraphModule) -> str:
    """Return the device type that a graph computes on."""
    types = {value.device.type for node in gm.graph.nodes if (value := tensor(node)) is not None}
    return next(iter(sorted(types - {"cpu", "meta"})), "cpu")
