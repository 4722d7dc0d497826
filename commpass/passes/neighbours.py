"""The matmul before a collective and the operators after it, through views and casts."""

from __future__ import annotations

from torch import fx

MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "linear",
    "_scaled_mm",
    "_int_mm",
    "convolution",
)
SEE_THROUGH = (
    "view",
    "reshape",
    "_unsafe_view",
    "permute",
    "transpose",
    "t",
    "squeeze",
    "unsqueeze",
    "expand",
    "slice",
    "select",
    "clone",
    "alias",
    "detach",
    "contiguous",
    "_to_copy",
    "to",
    "convert_element_type",
    "getitem",
    "split",
    "split_with_sizes",
    "wait_tensor",
    "wait_tensors",
)
"""Operators between a collective and its producing matmul, or its consumers, that change no value
except its dtype."""


def operator_name(node: fx.Node) -> str:
    """Return the name of a node's operator, without namespace and overload."""
    if node.op != "call_function":
        return node.op
    schema = getattr(node.target, "_schema", None)
    return (
        schema.name.split("::")[-1]
        if schema is not None
        else getattr(node.target, "__name__", str(node.target))
    )


def producer(node: fx.Node) -> str | None:
    """Return the name of the matmul that produces a collective's input, through views and casts."""
    while operator_name(node) in SEE_THROUGH and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.name if operator_name(node) in MATMULS else None


def consumers(values: list[fx.Node], limit: int = 4) -> list[str]:
    """Return the names of the first nodes that use a collective's result, through views and
    casts."""
    names: dict[str, None] = {}
    queue = list(values)
    while queue and len(names) < limit:
        node = queue.pop(0)
        for user in node.users:
            if operator_name(user) in SEE_THROUGH:
                queue.append(user)
            else:
                names.setdefault(user.name)
    return list(names)[:limit]
