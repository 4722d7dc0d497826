"""A site with its place in a graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commpass.passes.fx.parse import Call, parse
from commpass.plan import Site
from commpass.policy.rules import NOTHING, Allowed


@dataclass(frozen=True)
class GraphSite:
    """A site with its place in the graph and what the policy allows it.

    ``outputs`` hold its result after the wait; all are replaced together. ``parameters`` are the
    numbers of the parameters that an all_gather collects, if it may keep a reference. They index
    what the owner of a call has.
    """

    site: Site
    module: fx.GraphModule
    call: Call
    position: int
    outputs: tuple[fx.Node, ...]
    allowed: Allowed = NOTHING
    parameters: tuple[int, ...] = ()

    @property
    def input(self) -> fx.Node:
        """The collective's current input. It may have changed since discovery, for example if
        another site was replaced."""
        return self.current_call.inputs[self.position]

    @property
    def current_call(self) -> Call:
        call = parse(self.call.node)
        assert call is not None
        return call
