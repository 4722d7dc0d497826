"""The one way in which passes erase nodes, so that nobody reads an erased one.

torch lets an erased node answer: it takes None and has no users. Who reads it too late gets an
answer that is wrong, and goes on.
"""

from __future__ import annotations

import os
from typing import Any

from torch import fx

from commpass.errors import VerifyError

CHECK = "COMMPASS_CHECK"
"""Environment variable: 1 checks what passes promise each other on every graph, as ``strict``
does, and lets no erased node be read."""
READABLE = ("name", "_erased")
"""What may be read of an erased node: its name, and for torch that it is erased."""


def is_checked() -> bool:
    """Whether the environment asks for the checks."""
    return os.environ.get(CHECK) == "1"


def erase(node: fx.Node) -> None:
    """Erases a node that has no users from its graph. Where checks are on, who reads it afterwards
    gets a VerifyError."""
    node.graph.erase_node(node)
    if is_checked():
        node.__class__ = Erased


class Erased(fx.Node):
    """A node that was erased. Its name may be read, and it may be looked up and compared by
    identity. All else raises VerifyError."""

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
