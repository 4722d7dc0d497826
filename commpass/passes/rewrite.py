"""rewrite: carry out the plan by tracing each site's algorithm and splicing its nodes in.

needs: the sites found in a graph, and their plan.
gives: the same graph, in which every compressed site is replaced by the nodes of its algorithm,
metadata carried over.
changes: numerics, as the chosen codecs do. Sites that are left alone are not touched.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from commpass import groups
from commpass.codecs import accumulation_dtype, codec
from commpass.collectives import Algorithm, Request, algorithm
from commpass.collectives import run as run_steps
from commpass.collectives.data_sized import sizes_of_data
from commpass.errors import VerifyError
from commpass.passes import meta
from commpass.passes.collective import is_size, is_wait, items, parse, value_of
from commpass.passes.discover import Found
from commpass.plan import PlannedSite

MARK = "commpass"
"""Key in ``node.meta`` of every inserted node: the name of the site that it was inserted for."""
PARTS = "commpass_parts"
"""Key in ``node.meta`` of a batch, of which positions now carry bytes: each of those, to the name
of its site."""

Decompositions = Callable[[], dict[Any, Callable[..., Any]]]


@dataclass
class Templates:
    """Traced algorithms by everything that they depend on: equal sites are traced once."""

    decompositions: Decompositions
    traced: dict[tuple[Any, ...], fx.GraphModule] = field(default_factory=dict)

    def of(self, found: Found, planned: PlannedSite) -> fx.GraphModule:
        fake = _fake(found.input)
        key = (
            planned.kind,
            planned.codec,
            planned.algorithm,
            planned.reduce_op,
            planned.group,
            planned.group_size,
            str(planned.splits),
            planned.peer,
            planned.tag,
            found.now.root,
            fake.dtype,
            fake.device,
            str(tuple(fake.shape)),
            str(fake.stride()),
        )
        if key not in self.traced:
            template = _trace(planned, found, self.decompositions)
            if any("unbacked_bindings" in node.meta for node in template.graph.nodes):
                return template  # its sizes are its own
            self.traced[key] = template
        return self.traced[key]


@dataclass(frozen=True)
class Kept:
    """State that a site keeps between calls: a new last input of its graph. ``place`` names it for
    good: where in the model, which direction, kind and shape; ``number`` which of several such in
    its graph. ``reaches`` are the numbers of those outputs of the graph that depend on the site."""

    place: str
    number: int
    reaches: tuple[int, ...]
    op: str
    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    fake: Tensor


def rewrite(
    found: Sequence[Found],
    plan: Sequence[PlannedSite],
    decompositions: Decompositions | None = None,
) -> tuple[Kept, ...]:
    """Replaces every compressed site in place; returns the state that the graph now takes as its
    last inputs, in order. On an error the graph is half done: the caller holds the copy to go back
    to."""
    templates = Templates(decompositions or _inductor_decompositions)
    tops: dict[fx.Graph, Top] = {}
    kept: list[Kept] = []
    chosen = [
        (site, planned) for site, planned in zip(found, plan, strict=True) if planned.compressed
    ]
    mode = _mode(chosen[0][0].input) if chosen else contextlib.nullcontext()
    with (
        torch.no_grad(),
        torch._C._DisableAutocast(),
        enable_python_dispatcher(),
        mode,
    ):  # the dispatcher: for symbolic sizes
        for site, planned in chosen:
            graph = site.module.graph
            if graph not in tops:
                tops[graph] = Top(next(node for node in graph.nodes if node.op != "placeholder"))
            how = algorithm(planned.kind, planned.algorithm)
            if how.stateful:
                kept.append(_keep(site, planned, kept))
            results = splice(
                site, planned.name, templates.of(site, planned), _inputs(site, how), tops[graph]
            )
            if len(results) > 1:
                _update(site, results[1])
            _replace(site, results[0])
    gone: dict[fx.Node, list[Found]] = {}
    for site, planned in chosen:
        if site.call.form == "batch":
            _join(site, planned.name)
        else:
            gone.setdefault(site.call.node, []).append(site)
    for node, sites in gone.items():
        _drop(node, sites)
    for module in {site.module: None for site, _ in chosen}:
        module.recompile()
    return tuple(kept)


STATE = "commpass_state"
"""The beginning of the names of inputs that hold state."""


def _keep(found: Found, planned: PlannedSite, before: Sequence[Kept]) -> Kept:
    """Adds an input for the state of a site: of its shape, in the dtype in which sums are made."""
    fake, graph = _fake(found.input), found.module.graph
    shape = "x".join(str(size) for size in planned.shape)
    place = (
        f"{planned.module or 'root'}/{planned.direction}/{planned.kind}/{planned.dtype}[{shape}]"
    )
    number = sum(state.place == place for state in before)
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before():
        node = graph.placeholder(f"{STATE}_{len(before)}")
    value = torch.zeros(fake.shape, dtype=accumulation_dtype(fake.dtype), device=fake.device)
    node.meta["val"] = value
    reaches = reached_outputs(found.outputs)
    op = planned.reduce_op or "sum"
    return Kept(
        place,
        number,
        reaches,
        op,
        planned.group,
        tuple(fake.shape),
        value.dtype,
        fake.device,
        value,
    )


def reached_outputs(nodes: Sequence[fx.Node]) -> tuple[int, ...]:
    """The numbers of a graph's outputs that depend on one of some nodes."""
    reached, left = set(nodes), list(nodes)
    while left:
        new = [user for user in left.pop().users if user not in reached]
        reached.update(new)
        left += new
    outputs = nodes[0].graph.output_node().args[0] if nodes else ()
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return tuple(number for number, output in enumerate(outputs) if output in reached)


def _state(found: Found) -> fx.Node:
    """The input that was added last."""
    return found.module.graph.find_nodes(op="placeholder")[-1]


def _update(found: Found, new: fx.Node) -> None:
    """Writes the new state into the input that holds it, once all have read the old one."""
    graph, state = found.module.graph, _state(found)
    with graph.inserting_before(graph.output_node()):
        copied = graph.call_function(torch.ops.aten.copy_.default, (state, new))
    copied.meta = {**new.meta, "val": state.meta["val"]}


def _trace(planned: PlannedSite, found: Found, decompositions: Decompositions) -> fx.GraphModule:
    """The algorithm of a site as a graph of its inputs, traced under the fake mode of the graph."""
    chosen, coder = algorithm(planned.kind, planned.algorithm), codec(planned.codec)
    values = [_value(node, found) for node in _inputs(found, chosen)]
    sizes = dict(zip(_sizes(found), range(1, len(values)), strict=False))

    def run(*inputs: Any) -> Any:
        def split(size: Any) -> Any:
            return inputs[sizes[size]] if isinstance(size, fx.Node) else size

        sent, received = (
            (tuple(map(split, some)) for some in found.now.splits)
            if found.now.splits
            else (None, None)
        )
        request = Request(
            planned.group,
            planned.group_size,
            _rank(planned),
            planned.reduce_op or "sum",
            found.now.root,
            sent,
            received,
            peer=planned.peer or 0,
            tag=planned.tag,
        )
        return run_steps(
            chosen.run(inputs[0], request, coder, *inputs[len(values) - chosen.stateful :])
        )

    with sizes_of_data(coder, values[0], traced=True):
        traced = make_fx(run, decomposition_table=decompositions())(*values)
    if captured := [node.name for node in traced.graph.nodes if node.op == "get_attr"]:
        raise VerifyError(
            f"{planned.codec} by {planned.algorithm} captured tensors while it was traced:"
            f" {captured}"
        )
    return traced


def _inputs(found: Found, chosen: Algorithm) -> list[fx.Node]:
    """What an algorithm takes from the graph: its tensor, the symbolic lengths of an all-to-all,
    and the state that it keeps."""
    return [found.input, *_sizes(found), *([_state(found)] if chosen.stateful else [])]


def _sizes(found: Found) -> list[fx.Node]:
    return list(
        dict.fromkeys(
            size for some in found.now.splits or () for size in some if isinstance(size, fx.Node)
        )
    )


def _rank(planned: PlannedSite) -> int:
    rank = groups.rank_in(planned.group)
    if rank is None:
        raise VerifyError(
            f"{planned.name}: group {planned.group!r} is not here, so this rank's number in it is"
            " not known"
        )
    return rank


@dataclass
class Top:
    """The place behind a graph's inputs where tables go, and those that are there, by what they
    compute."""

    anchor: fx.Node
    tables: dict[Any, fx.Node] = field(default_factory=dict)
    nodes: set[fx.Node] = field(default_factory=set)


EMPTY = torch.ops.aten.empty.memory_format
"""What makes a buffer into which something is written: no two sites share one."""


def splice(
    found: Found, mark: str, template: fx.GraphModule, inputs: Sequence[fx.Node], top: Top
) -> list[fx.Node]:
    """Copies a traced algorithm into the graph of a site; returns the nodes of its result, and of
    its new state if it has one.

    What does not depend on a wait goes where the collective stands, the rest where its result is
    first waited for: what the graph computes in between still overlaps with the first exchange.
    What depends on no input at all (a table of a codec) goes to the top of the graph, once for all
    sites.
    """
    graph, collective = found.module.graph, found.call.node
    anchor = _anchor(found)
    given = iter(inputs)
    copies: dict[fx.Node, Any] = {}
    late: set[fx.Node] = set()
    own = any("unbacked_bindings" in node.meta for node in template.graph.nodes)
    for node in template.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
            continue
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]
            return [copies[result] for result in results]
        place, key = collective, None
        if node.target is not EMPTY and all(
            copies[source] in top.nodes for source in node.all_input_nodes
        ):
            place, key = top.anchor, (node.target, _frozen((node.args, node.kwargs), copies))
            if key in top.tables:
                copies[node] = top.tables[key]
                continue
        elif is_wait(node) or any(source in late for source in node.all_input_nodes):
            place = anchor
            late.add(node)
        with graph.inserting_before(place):
            copy = graph.node_copy(node, lambda old: copies[old])
        _describe(copy, found, mark, node if own else None)
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
    """The node before which the rest of an algorithm goes: the first wait, or right behind a
    collective without one."""
    if not found.outputs:
        value = value_of(found.call, found.position)
        return next(
            (user for user in (value.users if value else ()) if is_wait(user)), found.call.node.next
        )
    first = found.outputs[0]
    return first if is_wait(first) else first.all_input_nodes[0]


def _describe(copy: fx.Node, found: Found, mark: str, traced: fx.Node | None) -> None:
    """Metadata of an inserted node: from its site, and a fake value of its own, since storages tell
    aliases apart. That is the ``traced`` one where nobody else has it."""
    copy.meta = {MARK: mark}
    meta.carry(found.call.node, copy)
    if traced is not None:
        copy.meta |= {
            key: traced.meta[key] for key in ("val", "unbacked_bindings") if key in traced.meta
        }
    if isinstance(found.call.group, fx.Node):  # traced with the group's name
        copy.args = tuple(found.call.group if arg == found.site.group else arg for arg in copy.args)
    if traced is not None:
        return
    args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda node: _value(node, found))
    copy.meta["val"] = copy.target(*args, **kwargs)  # type: ignore[operator]


def _value(node: fx.Node, found: Found) -> Any:
    """The fake value, or symbolic number, of a node."""
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
    received = call.kind_at(found.position) == "recv"
    target = call.out or (found.input if "in-place" in call.form or received else None)
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
    value = value_of(call, found.position)
    if received and value is not None:
        value.replace_all_uses_with(result, delete_user_cb=lambda user: not is_wait(user))
    if target is not None and call.form in ("in-place", "out"):
        call.node.replace_all_uses_with(result, delete_user_cb=lambda user: not is_wait(user))


def _drop(node: fx.Node, gone: list[Found]) -> None:
    """Erases a collective whose results were all replaced; of a coalesced one, only the parts that
    were."""
    graph = node.graph
    positions = {found.position for found in gone}
    coalesced = "coalesced" in gone[0].call.form
    removed = {
        value for position in positions if (value := value_of(gone[0].call, position)) is not None
    }
    _drop_waits(removed)
    for value in removed:
        for size in [user for user in value.users if is_size(user)]:
            _resize(size, gone[0])
        graph.erase_node(value)
    if coalesced:
        _shrink(
            node, [index for index in range(len(gone[0].call.inputs)) if index not in positions]
        )


def _resize(size: fx.Node, found: Found) -> None:
    """Lets what asked for the size of a collective's result ask its input, or an all-to-all's
    splits."""
    dim, kind, ranks = size.args[1], found.site.kind, found.site.group_size
    asked = size.meta["val"]
    size.args = (found.input, dim)
    size.meta["val"] = _fake(found.input).shape[dim]  # type: ignore[index]
    if dim != 0 or kind not in ("all_gather", "reduce_scatter", "all_to_all"):
        return
    graph, splits = size.graph, found.now.splits
    with graph.inserting_after(size):
        if splits is not None:
            total = graph.call_function(torch.sym_sum, (tuple(splits[1]),))
        elif kind == "all_to_all":
            return
        else:
            total = graph.call_function(
                operator.mul if kind == "all_gather" else operator.floordiv, (size, ranks)
            )
    total.meta = {**size.meta, "val": asked}
    size.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    if not size.users:
        graph.erase_node(size)


def _drop_waits(values: set[fx.Node]) -> None:
    """Erases the waits for values; of a wait for several, only the parts for those."""
    for wait in {user: None for value in values for user in value.users if is_wait(user)}:
        if isinstance(wait.args[0], fx.Node):
            wait.graph.erase_node(wait)
        else:
            waited_for: Any = wait.args[0]
            _shrink(wait, [i for i, each in enumerate(waited_for) if each not in values])


def _join(found: Found, mark: str) -> None:
    """Lets a position of a batch carry the bytes of the exchange that was inserted for it before
    the batch: batches exist so that nothing deadlocks, and stay whole."""
    call, position = found.now, found.position
    value, graph = value_of(call, position), call.node.graph
    assert value is not None
    _drop_waits({value})
    held = call.node.meta.get("val")
    own = next(
        node for node in graph.nodes if node.meta.get(MARK) == mark and parse(node) is not None
    )
    tensors = [
        own.all_input_nodes[0] if index == position else each
        for index, each in enumerate(call.inputs)
    ]
    call.node.args = (*call.node.args[:3], tensors, *call.node.args[4:])
    call.node.meta[PARTS] = {**call.node.meta.get(PARTS, {}), position: mark}
    received = call.kind_at(position) == "recv"  # a buffer is its own result
    fake = (own.all_input_nodes[0] if received else own).meta["val"]
    value.meta |= {MARK: mark, "val": fake}
    if isinstance(held, (list, tuple)):
        call.node.meta["val"] = [
            fake if index == position else each for index, each in enumerate(held)
        ]
    own.replace_all_uses_with(value)
    graph.erase_node(own)


def _shrink(node: fx.Node, kept: list[int]) -> None:
    """Leaves of a node over a list of tensors only those at ``kept``, and renumbers who takes its
    results."""
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
