"""What a rule is: a small function from a node to what was done, with a proof in one line.

A rule looks at one node, changes the graph if it fits, and says so. It must hold: no value that
somebody else uses, that is an output or that is saved for backward is lost; group and reduce op are
the same; nothing non-linear is crossed. A number by which a graph scales may be the rank's own:
where it is moved across a collective, the plan names it, and the ranks compare that. What a rule
says of nodes is found out before the edit that erases them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from commpass.passes.simplify.editor import Editor

GATHERS = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class Applied:
    """What a rule did: the site that it took away or made smaller, what became of it, bytes that
    one rank need not send, the numbers that were moved across a collective, to ``before`` or
    ``behind`` it, and the ``others`` sites that it was merged with. On these the ranks must
    agree."""

    site: str
    into: str
    saved_bytes: int
    moved: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    moved_to: str = "before"

    @property
    def text(self) -> str:
        moved = f", {', '.join(self.moved)} {self.moved_to} it" if self.moved else ""
        return f"{self.into}{moved}"


@dataclass(frozen=True)
class Rule:
    """A rule by name. ``exact``: bit-exact; the others round a float sum differently. It looks
    ``at`` nodes of these operators, or at waits. ``own``: what it finds is this rank's own part,
    and other ranks need not find theirs."""

    name: str
    apply: Callable[[fx.Node, Editor], Applied | None]
    exact: bool
    at: tuple[Any, ...] = ()
    own: bool = False
