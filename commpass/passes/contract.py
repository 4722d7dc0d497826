"""What passes promise each other, and the checks of it.

A *fact* is something that holds of a graph on its road. A pass says which facts it requires, which
it provides, and whether it mutates the graph: one that mutates makes an end of the facts about the
graph that it does not provide itself. ``check_order`` shows that a list of passes fits together
without any graph; ``Contracts`` looks at a real one after each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from commpass.codecs import operators
from commpass.errors import VerifyError, nearest
from commpass.passes.context import PassContext
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import graph_modules, parse

PHASES = ("graph", "post-grad")
"""When passes run: on the graphs of AOTAutograd; on those that Inductor is about to schedule."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass by name: a function from one stage of the road to the next. ``requires`` and
    ``provides`` name facts; the road ends where a ``needed`` pass is left out."""

    name: str
    run: Callable[[PassContext], PassContext]
    phase: str = "graph"
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    mutates: bool = False
    needed: bool = False


def check_order(passes: Iterable[Pass]) -> None:
    """Raises VerifyError where a pass requires a fact that does not hold when it runs, names one
    that does not exist, or comes in a later phase than the next."""
    held: set[str] = set()
    phase = 0
    for step in passes:
        for fact in (*step.requires, *step.provides):
            if fact not in FACTS:
                raise VerifyError(f"pass {step.name!r}: no fact {fact!r}{nearest(fact, FACTS)}")
        if step.phase not in PHASES:
            raise VerifyError(f"pass {step.name!r}: no phase {step.phase!r}")
        if PHASES.index(step.phase) < phase:
            raise VerifyError(f"pass {step.name!r} of phase {step.phase!r} comes after a later one")
        phase = PHASES.index(step.phase)
        if lacking := [fact for fact in step.requires if fact not in held]:
            raise VerifyError(
                f"pass {step.name!r} requires {', '.join(map(repr, lacking))}, which no pass before"
                " it provides, or a pass in between has made an end of"
            )
        held = (held - OF_GRAPH if step.mutates else held) | set(step.provides)


# --- facts ----------------------------------------------------------------------------------------


def _sites(context: PassContext) -> str | None:
    """The road's sites are the graph's collectives: each once, in graph order."""
    known = [(each.call.node, each.position) for each in context.found]
    there = [
        (node, position)
        for _, module in graph_modules(context.gm)
        for node in module.graph.nodes
        if (call := parse(node)) is not None
        for position in range(len(call.inputs))
    ]
    return None if known == there else f"{len(known)} sites are known, {len(there)} are there"


def _options(context: PassContext) -> str | None:
    """Each site has options, of which the first leaves it alone."""
    if len(context.options) != len(context.found):
        return f"{len(context.found)} sites have {len(context.options)} options"
    wrong = [
        f
        for f, its in zip(context.found, context.options, strict=True)
        if its.uncompressed.compressed
    ]
    return f"{wrong[0].site.name}: the first option compresses" if wrong else None


def _plan(context: PassContext) -> str | None:
    """Each site has one chosen candidate, which nobody refuses, and a reason."""
    names = [site.name for site in context.sites or ()]
    if names != [found.site.name for found in context.found]:
        return "the plan is not about these sites"
    wrong = [site.name for site in context.sites or () if site.refused or not site.reason]
    return f"{wrong[0]} is refused, or has no reason" if wrong else None


def _coded(context: PassContext) -> str | None:
    """Compressed collectives are gone; what stands for them has marks that name their sites, and
    every coded operator has one."""
    compressed = {site.name for site in context.sites or () if site.compressed}
    nodes = [node for _, module in graph_modules(context.gm) for node in module.graph.nodes]
    marked = [node for node in nodes if MARK in node.meta]
    if lost := [node.name for node in _operators(nodes) if MARK not in node.meta]:
        return f"coded operator {lost[0]} has no mark"
    if strange := {node.meta[MARK].site for node in marked} - compressed:
        return f"nodes are marked for {min(strange)}, which is not compressed"
    if missing := compressed - {node.meta[MARK].site for node in marked}:
        return f"nothing stands for {min(missing)}"
    return None


def _plain(context: PassContext) -> str | None:
    """No coded operator is left."""
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
"""Fact to what says why it does not hold, or None where it does."""
OF_GRAPH = {"sites", "coded", "plain"}
"""The facts that are about the nodes of the graph."""


# --- one graph ------------------------------------------------------------------------------------


@dataclass
class Contracts:
    """Checks the passes of one graph, one after the other."""

    before: list[Any] = field(default_factory=list)

    def start(self, step: Pass, context: PassContext) -> None:
        """What there is before a pass. Raises VerifyError where a fact does not hold that it
        requires."""
        self._check(step, step.requires, context, "requires")
        self.before = [] if step.mutates else _nodes(context.gm)

    def end(self, step: Pass, context: PassContext) -> None:
        """What there is after it. Raises VerifyError where the pass did not do what it says."""
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
    """All nodes of a graph with what they take, in order."""
    return [
        (node, node.target, node.args, node.kwargs)
        for _, module in graph_modules(gm)
        for node in module.graph.nodes
    ]
