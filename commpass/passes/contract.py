"""Contracts between passes, and their checks.

A *fact* is a property of a graph between passes. A pass declares which facts it requires, which it
provides, and whether it mutates the graph. A mutating pass invalidates the facts about the graph
that it does not provide itself. ``Contracts`` checks a graph before and after each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from commpass.codecs import operators
from commpass.errors import VerifyError
from commpass.passes.context import PassContext
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import graph_modules, parse

GRAPH, POST_GRAD = "graph", "post-grad"
"""When passes run: on AOTAutograd's graphs, or on the graphs that Inductor is about to schedule."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A named pass: a function that changes the graph of a context, and writes its results there.

    ``requires`` and ``provides`` name facts. If a ``needed`` pass is skipped, the manager stops. A
    pass that ``needs_sites`` runs only if the graph has collectives that may be changed. ``run`` is
    None for a pass that Inductor calls.
    """

    name: str
    run: Callable[[PassContext], None] | None = None
    phase: str = GRAPH
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    mutates: bool = False
    needed: bool = False
    needs_sites: bool = False


# --- facts ----------------------------------------------------------------------------------------


def _sites(context: PassContext) -> str | None:
    """The context's sites are the graph's collectives: each once, in graph order."""
    known = [(each.call.node, each.position) for each in context.found]
    in_graph = [
        (node, position)
        for _, module in graph_modules(context.gm)
        for node in module.graph.nodes
        if (call := parse(node)) is not None
        for position in range(len(call.inputs))
    ]
    return None if known == in_graph else f"{len(known)} sites are known, {len(in_graph)} are there"


def _options(context: PassContext) -> str | None:
    """Each site has options, of which the first is uncompressed."""
    if [*context.options] != [found.site.name for found in context.found]:
        return f"{len(context.found)} sites have {len(context.options)} options"
    wrong = [name for name, its in context.options.items() if its.uncompressed.compressed]
    return f"{wrong[0]}: the first option compresses" if wrong else None


def _plan(context: PassContext) -> str | None:
    """Each site has one chosen candidate that is not refused, and a reason."""
    names = [site.name for site in context.plan.sites]
    if names != [found.site.name for found in context.found]:
        return "the plan is not about these sites"
    wrong = [site.name for site in context.plan.sites if site.refused or not site.reason]
    return f"{wrong[0]} is refused, or has no reason" if wrong else None


def _coded(context: PassContext) -> str | None:
    """No compressed collective remains. Its replacement has marks that name its site, and every
    codec operator has a mark."""
    compressed = {site.name for site in context.plan.sites if site.compressed}
    nodes = [node for _, module in graph_modules(context.gm) for node in module.graph.nodes]
    marked = [node for node in nodes if MARK in node.meta]
    if unmarked := [node.name for node in _operators(nodes) if MARK not in node.meta]:
        return f"coded operator {unmarked[0]} has no mark"
    if unplanned := {node.meta[MARK].site for node in marked} - compressed:
        return f"nodes are marked for {min(unplanned)}, which is not compressed"
    if missing := compressed - {node.meta[MARK].site for node in marked}:
        return f"nothing stands for {min(missing)}"
    return None


def _plain(context: PassContext) -> str | None:
    """No codec operator remains."""
    left = [n for _, module in graph_modules(context.gm) for n in _operators(module.graph.nodes)]
    return f"coded operator {left[0].name} is left" if left else None


def _operators(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.target in operators.IMPLEMENTATIONS]


FACTS: dict[str, Callable[[PassContext], str | None]] = {
    "sites": _sites,
    "options": _options,
    "plan": _plan,
    "coded": _coded,
    "plain": _plain,
}
"""Maps a fact to a function that returns why it does not hold, or None if it holds."""


# --- one graph ------------------------------------------------------------------------------------


@dataclass
class Contracts:
    """Checks the passes of one graph, one after the other."""

    before: list[Any] = field(default_factory=list)

    def start(self, step: Pass, context: PassContext) -> None:
        """Check and record the state before a pass. Raise VerifyError if a required fact does not
        hold."""
        self._check(step, step.requires, context, "requires")
        self.before = [] if step.mutates else _nodes(context.gm)

    def end(self, step: Pass, context: PassContext) -> None:
        """Check the state after a pass. Raise VerifyError if the pass broke its contract."""
        if not step.mutates and _nodes(context.gm) != self.before:
            raise VerifyError(f"pass {step.name!r} changed the graph, but says that it does not")
        if step.mutates:
            for _, module in graph_modules(context.gm):
                module.graph.lint()
        self._check(step, step.provides, context, "provides")

    def _check(self, step: Pass, facts: Iterable[str], context: PassContext, how: str) -> None:
        for fact in facts:
            if (why := FACTS[fact](context)) is not None:
                raise VerifyError(f"pass {step.name!r} {how} {fact!r}, but {why}")


def _nodes(gm: fx.GraphModule) -> list[Any]:
    """Return all nodes of a graph with their arguments, in order."""
    return [
        (node, node.target, node.args, node.kwargs)
        for _, module in graph_modules(gm)
        for node in module.graph.nodes
    ]
