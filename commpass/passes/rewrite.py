"""rewrite: carry out the plan by tracing each site's algorithm and splicing its nodes in.

needs: the sites found in a graph, and their plan.
gives: the same graph, in which every compressed site is replaced by the nodes of its algorithm, metadata carried over.
changes: numerics, as the chosen codecs do. Sites that are left alone are not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.codecs import codec
from commpass.collectives import algorithm_named
from commpass.errors import VerifyError
from commpass.passes import meta
from commpass.passes.collective import is_wait, items, value_of
from commpass.passes.discover import Found
from commpass.plan import PlannedSite

MARK = "commpass"
"""Key in ``node.meta`` of every inserted node: the name of the site that it was inserted for."""

Decompositions = Callable[[], dict[Any, Callable[..., Any]]]


@dataclass
class Templates:
    """Traced algorithms by everything that they depend on: equal sites are traced once."""

    decompositions: Decompositions
    traced: dict[tuple[Any, ...], fx.GraphModule] = field(default_factory=dict)

    def of(self, found: Found, planned: PlannedSite) -> fx.GraphModule:
        fake = _fake(found.input)
        key = (
            planned.kind, planned.codec, planned.algorithm, planned.reduce_op, planned.group, planned.group_size,
            fake.dtype, fake.device, str(tuple(fake.shape)), str(fake.stride()),
        )  # fmt: skip
        if key not in self.traced:
            self.traced[key] = _trace(planned, fake, self.decompositions)
        return self.traced[key]


def rewrite(found: Sequence[Found], plan: Sequence[PlannedSite], decompositions: Decompositions | None = None) -> None:
    """Replaces every compressed site in place. On an error the graph is half done: the caller holds the copy to go back to."""
    templates = Templates(decompositions or _inductor_decompositions)
    tops: dict[fx.Graph, Top] = {}
    chosen = [(site, planned) for site, planned in zip(found, plan, strict=True) if planned.compressed]
    mode = _mode(chosen[0][0].input) if chosen else contextlib.nullcontext()
    with torch.no_grad(), torch._C._DisableAutocast(), mode:
        for site, planned in chosen:
            graph = site.module.graph
            if graph not in tops:
                tops[graph] = Top(next(node for node in graph.nodes if node.op != "placeholder"))
            result = splice(site, planned.name, templates.of(site, planned), tops[graph])
            _replace(site, result)
    gone: dict[fx.Node, list[Found]] = {}
    for site, _ in chosen:
        gone.setdefault(site.call.node, []).append(site)
    for node, sites in gone.items():
        _drop(node, sites)
    for module in {site.module: None for site, _ in chosen}:
        module.recompile()


def _trace(planned: PlannedSite, fake: Tensor, decompositions: Decompositions) -> fx.GraphModule:
    """The algorithm of a site as a graph of one input, traced under the fake mode of the site's input."""
    algorithm, coder = algorithm_named(planned.kind, planned.algorithm), codec(planned.codec)

    def run(x: Tensor) -> Tensor:
        return algorithm.run(x, planned.reduce_op or "sum", planned.group_size, planned.group, coder)

    traced = make_fx(run, decomposition_table=decompositions())(fake)
    if captured := [node.name for node in traced.graph.nodes if node.op == "get_attr"]:
        raise VerifyError(f"{planned.codec} by {planned.algorithm} captured tensors while it was traced: {captured}")
    return traced


@dataclass
class Top:
    """The place behind a graph's inputs where tables go, and those that are there, by what they compute."""

    anchor: fx.Node
    tables: dict[Any, fx.Node] = field(default_factory=dict)
    nodes: set[fx.Node] = field(default_factory=set)


def splice(found: Found, mark: str, template: fx.GraphModule, top: Top) -> fx.Node:
    """Copies a traced algorithm into the graph of a site; returns the node of its result.

    What does not depend on a wait goes where the collective stands, the rest where its result is first waited for: what the
    graph computes in between still overlaps with the first exchange. What depends on no input at all (a table of a codec)
    goes to the top of the graph, once for all sites.
    """
    graph, collective = found.module.graph, found.call.node
    anchor = _anchor(found)
    copies: dict[fx.Node, Any] = {}
    late: set[fx.Node] = set()
    for node in template.graph.nodes:
        if node.op == "placeholder":
            copies[node] = found.input
            continue
        if node.op == "output":
            return copies[node.args[0]]
        place, key = collective, None
        if all(copies[source] in top.nodes for source in node.all_input_nodes):
            place, key = top.anchor, (node.target, _frozen((node.args, node.kwargs), copies))
            if key in top.tables:
                copies[node] = top.tables[key]
                continue
        elif is_wait(node) or any(source in late for source in node.all_input_nodes):
            place = anchor
            late.add(node)
        with graph.inserting_before(place):
            copy = graph.node_copy(node, lambda old: copies[old])
        _describe(copy, found, mark)
        copies[node] = copy
        if key is not None:
            top.tables[key] = copy
            top.nodes.add(copy)
    raise VerifyError(f"the traced algorithm of {mark} has no output")


def _frozen(value: Any, copies: dict[fx.Node, Any]) -> Any:
    """Arguments as something to look up by, nodes by their copies in the graph."""
    if isinstance(value, fx.Node):
        return copies[value]
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, copies) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item, copies)) for key, item in value.items())
    return (type(value), str(value))


def _anchor(found: Found) -> fx.Node:
    """The node before which the rest of an algorithm goes: the first wait, or right behind a collective without one."""
    if not found.outputs:
        return found.call.node.next
    first = found.outputs[0]
    return first if is_wait(first) else first.all_input_nodes[0]


def _describe(copy: fx.Node, found: Found, mark: str) -> None:
    """Metadata of an inserted node: from its site, and a fake value of its own, since storages tell aliases apart."""
    copy.meta = {MARK: mark}
    meta.carry(found.call.node, copy)
    if isinstance(found.call.group, fx.Node):  # traced with the group's name
        copy.args = tuple(found.call.group if arg == found.site.group else arg for arg in copy.args)
    args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda node: _value(node, found))
    copy.meta["val"] = copy.target(*args, **kwargs)  # type: ignore[operator]


def _value(node: fx.Node, found: Found) -> Any:
    if node is found.call.group:
        return found.site.group
    return node.meta["val"] if "val" in node.meta else node.meta["example_value"]


def _mode(node: fx.Node) -> Any:
    """The fake mode under which a graph was traced."""
    return getattr(_fake(node), "fake_mode", None) or contextlib.nullcontext()


def _fake(node: fx.Node) -> Tensor:
    value = meta.tensor(node)
    if value is None:
        raise VerifyError(f"node {node.name} has no fake value")
    return value


def _replace(found: Found, result: fx.Node) -> None:
    """Lets everything that took the collective's waited result take the new one."""
    call, graph = found.now, found.module.graph
    target = call.out or (found.input if "in-place" in call.form else None)
    if target is not None:  # an in-place form: what others see of that tensor must change as well
        with graph.inserting_after(result):
            copied = graph.call_function(torch.ops.aten.copy_.default, (target, result))
        copied.meta = {**result.meta, "val": _fake(target)}
        result = copied
    for held in found.outputs:
        for chained in [user for user in held.users if is_wait(user) and user.args[0] is held]:
            chained.replace_all_uses_with(result)
            graph.erase_node(chained)
        held.replace_all_uses_with(result)
    if target is not None and call.form in ("in-place", "out"):
        call.node.replace_all_uses_with(result, delete_user_cb=lambda user: not is_wait(user))


def _drop(node: fx.Node, gone: list[Found]) -> None:
    """Erases a collective whose results were all replaced; of a coalesced one, only the parts that were."""
    graph = node.graph
    positions = {found.position for found in gone}
    coalesced = "coalesced" in gone[0].call.form
    removed = {value for position in positions if (value := value_of(gone[0].call, position)) is not None}
    for wait in {user: None for value in removed for user in value.users if is_wait(user)}:
        if isinstance(wait.args[0], fx.Node):
            graph.erase_node(wait)
        else:
            _shrink(wait, [index for index, value in enumerate(wait.args[0]) if value not in removed])  # type: ignore[arg-type]
    for value in removed:
        graph.erase_node(value)
    if coalesced:
        _shrink(node, [index for index in range(len(gone[0].call.inputs)) if index not in positions])


def _shrink(node: fx.Node, kept: list[int]) -> None:
    """Leaves of a node over a list of tensors only those at ``kept``, and renumbers who takes its results."""
    for index, item in list(items(node)):
        if index in kept:
            item.args = (node, kept.index(index))
        else:
            node.graph.erase_node(item)
    if not kept:
        node.graph.erase_node(node)
        return
    node.args = ([node.args[0][index] for index in kept], *node.args[1:])  # type: ignore[index]
    if isinstance(node.meta.get("val"), (list, tuple)):
        node.meta["val"] = [node.meta["val"][index] for index in kept]


def _inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()
