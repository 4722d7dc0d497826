"""The functions with which passes erase nodes, so that reads of erased nodes are detected.

torch keeps an erased node readable: it has no inputs and no users. A read after the erase then
continues with wrong values.
"""

from __future__ import annotations

import os
from typing import Any

from torch import fx

from commpass.errors import VerifyError

CHECK = "COMMPASS_CHECK"
"""Environment variable. 1 checks the contracts of passes on every graph, as ``strict`` does, and
forbids reads of erased nodes."""
READABLE = ("name", "_erased")
"""The readable attributes of an erased node: its name, and torch's flag that it is erased."""


def is_checked() -> bool:
    """Whether the environment variable enables the checks."""
    return os.environ.get(CHECK) == "1"


def erase(node: fx.Node) -> None:
    """Erase a node without users from its graph. If checks are enabled, a later read raises
    VerifyError."""
    node.graph.erase_node(node)
    if is_checked():
        node.__class__ = Erased


def replace(old: fx.Node, new: fx.Node) -> None:
    """Replace all uses of a node by another, and erase it."""
    old.replace_all_uses_with(new)
    erase(old)


class Erased(fx.Node):
    """An erased node. Its name can be read, and it can be hashed and compared by identity. Any
    other access raises VerifyError."""

    def __getattribute__(self, key: str) -> Any:
        if key in READABLE or key.startswith("__"):
            return super().__getattribute__(key)
        raise _error(self, key)

    def __lt__(self, value: Any) -> bool:
        raise _error(self, "place")

    __gt__ = __le__ = __ge__ = __lt__

    def __repr__(self) -> str:
        return f"{self.name} (erased)"


def _error(node: fx.Node, key: str) -> VerifyError:
    return VerifyError(
        f"node {node.name} was erased, and then its {key} was read: read it before the edit that"
        " erases the node"
    )
