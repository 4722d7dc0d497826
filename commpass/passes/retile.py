"""Find the kernel calls of a lowered graph whose tile sizes can be timed, and set their tile sizes.

changes: the launch arguments of kernels, and their text if it depends on tile sizes. No computed
value. The reasons of sites name the times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from commpass.errors import VerifyError
from commpass.passes.fx.fakes import mode_of
from commpass.passes.fx.marks import MARK, TUNABLE, Mark
from commpass.passes.fx.ops import triton_calls
from commpass.passes.fx.parse import graph_modules
from commpass.passes.fx.tracing import Decompositions, inductor_decompositions, traced
from commpass.plan import Plan
from commpass.utils.ambient import rewriting

ARGUMENTS, WRITTEN = "kwargs", "tensors_to_clone"
"""torch's names in a kernel call: the kernel's own arguments, and the tensors that it writes."""


@dataclass(frozen=True)
class TunableNode:
    """A kernel call in a graph: ``call`` is what it calls (``lowering.gpu.tunable.Tunable``)."""

    node: fx.Node
    call: Any

    @property
    def mark(self) -> Mark:
        mark: Mark = self.node.meta[MARK]
        return mark


def tunable_nodes(gm: fx.GraphModule) -> list[TunableNode]:
    """Return the calls of a graph whose tile sizes can be timed, in graph order."""
    return [
        TunableNode(node, node.meta[TUNABLE])
        for _, module in graph_modules(gm)
        for node in module.graph.nodes
        if TUNABLE in node.meta and MARK in node.meta
    ]


def retile(
    gm: fx.GraphModule,
    choices: Mapping[fx.Node, Any],
    decompositions: Decompositions | None = None,
) -> None:
    """Set the tile sizes of kernel calls, in place: ``choices`` are choices of their ``call``. If
    it raises an error, nothing is changed."""
    traces: dict[Any, fx.Node] = {}
    changed: dict[fx.Node, dict[str, Any]] = {}
    for each in tunable_nodes(gm):
        if (choice := choices.get(each.node)) is None:
            continue
        key = each.call, choice
        if key not in traces:
            with mode_of(each.node.graph):
                traces[key] = _traced_call(each.call, choice, decompositions)
        changed[each.node] = _with_numbers(each.node, traces[key])
    for node, arguments in changed.items():
        node.kwargs = arguments
    for _, module in graph_modules(gm):
        module.recompile()


def _traced_call(call: Any, choice: Any, decompositions: Decompositions | None) -> fx.Node:
    """Return the call of a kernel with other tile sizes, in a graph of its own. Runs under a fake
    mode."""
    table = decompositions or inductor_decompositions
    with rewriting(), enable_python_dispatcher():
        values = [form.empty() for form in call.inputs]
        body = traced(call.caller(choice), values, table, "a kernel with timed tile sizes").graph
    (found,) = (node for node in body.nodes if node.target in triton_calls())
    return found


def _with_numbers(node: fx.Node, like: fx.Node) -> dict[str, Any]:
    """Return the arguments of a kernel call with the kernel, the grid and all numbers of another
    call, and its own tensors."""
    own, others = (_arguments(each) for each in (node, like))
    tensors = {name: value for name, value in own.items() if isinstance(value, fx.Node)}
    if tensors.keys() != {name for name, each in others.items() if isinstance(each, fx.Node)}:
        raise VerifyError(f"{node.name}: other tile sizes change the tensors of its kernel")
    settings = {name: value for name, value in like.kwargs.items() if name != WRITTEN}
    return {**node.kwargs, **settings, ARGUMENTS: {**others, **tensors}}


def _arguments(node: fx.Node) -> dict[str, Any]:
    found: Any = node.kwargs[ARGUMENTS]
    return dict(found)


def with_reasons(plan: Plan, texts: Mapping[str, Sequence[str]]) -> Plan:
    """Return the plan with what was timed added to the reasons of sites, by their names."""
    reasons = {name: f"; tile sizes: {'; '.join(some)}" for name, some in texts.items() if some}
    sites = [
        dataclasses.replace(site, reason=site.reason + reasons.get(site.name, ""))
        for site in plan.sites
    ]
    return dataclasses.replace(plan, sites=tuple(sites))
