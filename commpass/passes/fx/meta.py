"""What the metadata of a node says: sizes and their hints, module path, the user's word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from commpass.policy.paths import Places, clean, is_parallel


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that a node computes, if it is one tensor."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return value if isinstance(value, torch.Tensor) else None


def hint(size: Any) -> int | None:
    """The number that a size is, or for a symbolic one the number it had when the graph was traced;
    None if unknown."""
    if isinstance(size, int):
        return size
    if isinstance(size, torch.SymInt):
        node = size.node
        return int(node.hint) if node.has_hint() and node.hint is not None else None
    return None


def shape(value: torch.Tensor) -> tuple[int | str, ...]:
    """The shape with symbolic sizes as text."""
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)


def nbytes(value: torch.Tensor) -> int:
    """Bytes of a tensor, by hints where sizes are symbolic; -1 if there is no hint."""
    total = value.dtype.itemsize
    for size in value.shape:
        known = hint(size)
        if known is None:
            return -1
        total *= known
    return total


def width(value: torch.Tensor) -> int:
    """Values of one entry of the first dimension, by hints where sizes are symbolic; 1 where there
    is no hint."""
    known = (hint(size) for size in value.shape[1:])
    return math.prod(1 if size is None else size for size in known)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PLACE = "commpass_module"
"""The key in ``node.meta["custom"]`` of a module path that the node's own module stack does not
tell."""
STACKS = ("nn_module_stack", "fwd_nn_module_stack")
"""Forward nodes have the first; backward nodes that autograd's formulas made have the second, and
those of an autograd.Function or of a recomputation the first."""


def module_path(node: fx.Node) -> str:
    """The path in the root model of the module that a node comes from, in forward and in backward;
    "" for the root itself, or where it is not known."""
    placed = annotation(node, PLACE)
    return _own_path(node) if placed is None else placed


def place(gm: fx.GraphModule, places: Places) -> None:
    """Writes the module's path on each node of a graph of Dynamo's whose own module stack would
    tell another one. From there it comes into the graphs that AOTAutograd makes."""
    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            path = places.path(_stack(node))
            if path is not None and path != _own_path(node):
                node.meta["custom"] = {**(node.meta.get("custom") or {}), PLACE: path}


def _stack(node: fx.Node) -> Mapping[str, tuple[str, Any]]:
    return next((node.meta[key] for key in STACKS if node.meta.get(key)), {})


def _own_path(node: fx.Node) -> str:
    """The path as the node's own module stack has it: from where the compiled code starts."""
    rows = list(_stack(node).values())
    return clean(rows[-1][0], [path for path, kind in rows if is_parallel(kind)]) if rows else ""


def annotation(node: fx.Node, key: str) -> str | None:
    """The annotation under ``key`` that the node carries."""
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
"""The metadata that a node inserted for a site takes over from the site's collective."""


def carry(source: fx.Node, target: fx.Node) -> None:
    for key in CARRIED:
        if key in source.meta:
            target.meta[key] = source.meta[key]


def device_of(gm: fx.GraphModule) -> str:
    """The device type that a graph computes on."""
    types = {value.device.type for node in gm.graph.nodes if (value := tensor(node)) is not None}
    return next(iter(sorted(types - {"cpu", "meta"})), "cpu")
