"""What the metadata of a node says: sizes and their hints, module path, the user's word."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import fx


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that a node computes, if it is one tensor."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return value if isinstance(value, torch.Tensor) else None


def hint(size: Any) -> int | None:
    """The number that a size is, or for a symbolic one the number it had when the graph was traced; None if unknown."""
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
    """Values of one entry of the first dimension, by hints where sizes are symbolic; 1 where there is no hint."""
    return math.prod(hint(size) or 1 for size in value.shape[1:])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def module_path(node: fx.Node) -> str:
    """The path of the module that a node comes from, in forward and in backward; "" for the root module.

    Forward nodes have ``nn_module_stack``; backward nodes that autograd's formulas made have ``fwd_nn_module_stack``, and
    those of an autograd.Function or of a recomputation ``nn_module_stack``.
    """
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = node.meta.get(key)
        if stack:
            return _clean(next(reversed(stack.values()))[0])
    return ""


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_modules")


def _clean(path: str) -> str:
    """``L['self'].layers.0.mlp`` and its relatives to ``layers.0.mlp``."""
    path = re.sub(r"getattr\((.*?), '?\"?(\w+)'?\"?\)", r"\1.\2", path)
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
    if parts and parts[0] in ("L", "G"):
        parts = parts[2:]
    elif parts and parts[0] in ("self", "L__self__"):
        parts = parts[1:]
    return ".".join(parts)


def word(node: fx.Node, key: str) -> str | None:
    """The annotation under ``key`` that the node carries."""
    custom = node.meta.get("custom")
    found = custom.get(key) if isinstance(custom, dict) else None
    return found if isinstance(found, str) else None


CARRIED = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom", "seq_nr", "source_fn_stack")
"""The metadata that a node inserted for a site takes over from the site's collective."""


def carry(source: fx.Node, target: fx.Node) -> None:
    for key in CARRIED:
        if key in source.meta:
            target.meta[key] = source.meta[key]
