"""The definition of a rule: a function from a node to what was done, with a one-line proof.

A rule inspects one node and changes the graph if it matches. It must keep every value that has
other users, is an output, or is saved for backward. It must keep group and reduce op, and must not
cross non-linear operators. Scale factors may differ between ranks, so the plan records those moved
across a collective, and the ranks compare them. A rule must read the nodes before the edit that
erases them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import fx

from commpass.passes.simplify.editor import Editor


@dataclass(frozen=True)
class Applied:
    """What a rule did.

    ``site`` was removed or reduced, and ``into`` describes the result. ``saved_bytes`` is what one
    rank no longer sends. ``moved`` are the numbers moved across a collective, to ``before`` or
    ``behind`` it. ``others`` are the sites that it was merged with. The ranks must agree on these
    two. ``consumer`` names operators that take codes without a decode.
    """

    site: str
    into: str
    saved_bytes: int
    moved: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    moved_to: str = "before"
    consumer: str = ""

    @property
    def text(self) -> str:
        moved = f", {', '.join(self.moved)} {self.moved_to} it" if self.moved else ""
        takes = f"; consumer: {self.consumer} takes the codes" if self.consumer else ""
        return f"{self.into}{moved}{takes}"


class Phase(Enum):
    """When a rule is tried.

    - ``EARLY``: in a first sweep too. Equal collectives are merged before other rules make them
      differ.
    - ``MAIN``: in each sweep.
    - ``GENERAL``: when no other rule applies, since a simpler rule is to do what it can.
    - ``LATE``: in the last sweep only. Other ranks' groups may have more than one rank, so a
      removal on one rank alone must not enable further rules there.
    """

    EARLY = auto()
    MAIN = auto()
    GENERAL = auto()
    LATE = auto()


@dataclass(frozen=True)
class Rule:
    """A named rule.

    ``exact`` rules are bit-exact; others round a float sum differently. ``at`` lists the operators
    that the rule inspects; if empty, it inspects waits. If ``own``, it matches this rank's own
    part, and other ranks may not match theirs. If ``replicated``, it assumes that inputs of the
    graph that are added to sums, or scale them, are equal on all ranks.
    """

    name: str
    apply: Callable[[fx.Node, Editor], Applied | None]
    exact: bool
    at: tuple[Any, ...] = ()
    own: bool = False
    replicated: bool = False
    phase: Phase = Phase.MAIN
