"""The matmul before a collective and the operators after it, through views and casts."""

from __future__ import annotations

from torch import fx

from commpass.passes.fx.ops import MATMUL_NAMES, SEE_THROUGH, called_name


def producer(node: fx.Node) -> str | None:
    """Return the name of the matmul that produces a collective's input, through views and casts."""
    while called_name(node) in SEE_THROUGH and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.name if called_name(node) in MATMUL_NAMES else None


def consumers(values: list[fx.Node], limit: int = 4) -> list[str]:
    """Return the names of the first nodes that use a collective's result, through views and
    casts."""
    names: dict[str, None] = {}
    queue = list(values)
    while queue and len(names) < limit:
        node = queue.pop(0)
        for user in node.users:
            if called_name(user) in SEE_THROUGH:
                queue.append(user)
            else:
                names.setdefault(user.name)
    return list(names)[:limit]
