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
from commpass.lowering.matmul import HELD
from commpass.passes.fx import create
from commpass.passes.fx.erase import erase
from commpass.passes.fx.fakes import mode_of
from commpass.passes.fx.marks import MARK, STRIDES, TUNABLE, Mark
from commpass.passes.fx.ops import EMPTY, triton_calls
from commpass.passes.fx.parse import graph_modules
from commpass.passes.fx.tracing import Decompositions, inductor_decompositions, traced
from commpass.plan import Plan
from commpass.utils.ambient import rewriting

ARGUMENTS = "kwargs"
"""torch's name, in a kernel call, of the kernel's own arguments."""


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
    changed: dict[fx.Node, fx.Node] = {}
    for each in tunable_nodes(gm):
        if (choice := choices.get(each.node)) is None:
            continue
        key = each.call, choice
        if key not in traces:
            with mode_of(each.node.graph):
                traces[key] = _traced_call(each.call, choice, decompositions)
        changed[each.node] = traces[key]
        _check_tensors(each.node, traces[key])
    for node, like in changed.items():
        _set(node, like)
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


def _check_tensors(node: fx.Node, like: fx.Node) -> None:
    """Raise VerifyError if two calls differ in the tensors that a kernel reads or returns."""
    own, others = (
        {name for name, value in _arguments(each).items() if isinstance(value, fx.Node)}
        for each in (node, like)
    )
    if own - {HELD} != others - {HELD}:
        raise VerifyError(f"{node.name}: other tile sizes change the tensors of its kernel")


def _set(node: fx.Node, like: fx.Node) -> None:
    """Give a kernel call the kernel, the grid and all numbers of another call. It keeps its own
    tensors, but memory for its tiles is created anew: its size depends on theirs."""
    own, others = (_arguments(each) for each in (node, like))
    tensors = {
        name: value for name, value in own.items() if isinstance(value, fx.Node) and name != HELD
    }
    if HELD in others:
        value = others[HELD].meta["val"]
        with node.graph.inserting_before(node):
            how = {"dtype": value.dtype, "device": value.device}
            tensors[HELD] = create.call(node.graph, EMPTY, (list(value.shape),), how)
        tensors[HELD].meta.update({"val": value, MARK: node.meta[MARK]})
    node.kwargs = {**node.kwargs, **like.kwargs, ARGUMENTS: {**others, **tensors}}
    if isinstance(results := node.meta.get("val"), dict):
        node.meta["val"] = {**like.meta["val"], **{k: v for k, v in results.items() if k != HELD}}
    if STRIDES in node.meta:
        node.meta[STRIDES] = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    for user in [user for user in node.users if user.args[1:] == (HELD,) and not user.users]:
        erase(user)
    if HELD in own and not own[HELD].users:
        erase(own[HELD])


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
