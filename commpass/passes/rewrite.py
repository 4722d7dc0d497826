"""rewrite: carries out the plan. It traces each site's algorithm and inserts its nodes.

needs: the sites found in a graph, and their plan.
gives: the same graph, in which the nodes of its algorithm replace every compressed site, with
metadata carried over.
changes: values, as the chosen codecs do. Uncompressed sites are not touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from commpass.codecs import Codec, codec
from commpass.passes.constants import lift_constants
from commpass.passes.context import PassContext
from commpass.passes.failures import site_errors
from commpass.passes.fx.erase import erase, replace
from commpass.passes.fx.fakes import fake_of, mode_of
from commpass.passes.fx.marks import MARK, PARTS, SEGMENTS, US
from commpass.passes.fx.ops import reached
from commpass.passes.fx.outputs import outputs_apart
from commpass.passes.fx.parse import is_collective, is_size, is_wait, items, value_of
from commpass.passes.fx.splice import add_input, set_value
from commpass.passes.fx.tracing import Decompositions, inductor_decompositions
from commpass.passes.graph_site import GraphSite
from commpass.passes.references import source_of
from commpass.passes.results import EncodedValue, StateInput
from commpass.passes.single_kernel import PeerMemoryOf, no_peer_memory
from commpass.passes.template import Templates, sizes_of, splice_site
from commpass.plan import SINGLE_KERNEL, PlannedSite
from commpass.plan.kinds import KINDS
from commpass.utils.ambient import without_ambient_state


def run(context: PassContext) -> None:
    """Insert the chosen algorithms, and the inputs that they need."""
    given = context.input
    state, values = rewrite(
        context.found, context.plan.sites, given.decompositions, given.peer_memory
    )
    context.state = state
    context.encoded = {name: EncodedValue((value,)) for name, value in values.items()}
    context.constants = lift_constants(given.gm, as_inputs=given.adds_inputs)


def rewrite(
    found: Sequence[GraphSite],
    plan: Sequence[PlannedSite],
    decompositions: Decompositions | None = None,
    peer_memory: PeerMemoryOf = no_peer_memory,
) -> tuple[tuple[StateInput, ...], dict[str, Tensor]]:
    """Replace every compressed site in place.

    Return the state that the graph now takes as its last inputs, in order, and the fake value of
    each site's input, by site name. Raises SiteFailure. After an error the graph is incomplete, and
    the caller must restore its copy.
    """
    templates = Templates(decompositions or inductor_decompositions, peer_memory)
    states: list[StateInput] = []
    encoded: dict[str, Tensor] = {}
    chosen = [
        (site, planned) for site, planned in zip(found, plan, strict=True) if planned.compressed
    ]
    mode = mode_of(chosen[0][0].module.graph) if chosen else contextlib.nullcontext()
    with (
        without_ambient_state(),
        enable_python_dispatcher(),  # for symbolic sizes
        mode,
        outputs_apart(*{site.module.graph: None for site, _ in chosen}),
        site_errors() as errors,
    ):
        for site, planned in chosen:
            with errors.of(planned.name):
                coder = codec(planned.codec)
                state_nodes = [] if coder.state is None else _keep(site, planned, coder, states)
                inputs = [site.input, *sizes_of(site), *_joined(site, state_nodes)]
                encoded[planned.name] = fake_of(inputs[0])
                template = templates.of(site, planned, inputs)
                results = splice_site(site, planned.name, template, inputs, templates.results)
                if planned.lowering == SINGLE_KERNEL:
                    results[0].meta[US] = planned.predicted_us
                if state_nodes:
                    _update(state_nodes, results[1])
                _replace(site, results[0])
    replaced: dict[fx.Node, list[GraphSite]] = {}
    for site, planned in chosen:
        if site.call.form == "batch":
            _join(site, planned.name)
        else:
            replaced.setdefault(site.call.node, []).append(site)
    for node, sites in replaced.items():
        _drop(node, sites)
    for module in {site.module: None for site, _ in chosen}:
        module.recompile()
    return tuple(states), encoded


STATE = "commpass_state"
"""The name prefix of inputs that hold state."""


@dataclass(frozen=True)
class Part:
    """The part of a fused site that belongs to one original tensor, or the whole of any other
    site."""

    module: str
    shape: tuple[int, ...]
    outputs: tuple[fx.Node, ...]


def _parts(found: GraphSite, planned: PlannedSite) -> list[Part]:
    """Return the tensors that one site carries. Each has a state of its own, which can be found
    again in any fusion."""
    known = found.call.node.meta.get(SEGMENTS)
    if known is None:
        return [Part(planned.module, planned.shape, found.outputs)]  # type: ignore[arg-type]
    slices: dict[int, list[fx.Node]] = defaultdict(list)
    for row in (user for node in found.outputs for user in node.users):
        for part in row.users:
            if part.target is torch.ops.aten.slice.Tensor:
                slices[int(part.args[2])].append(part)  # type: ignore[arg-type]
    starts = accumulate((math.prod(shape) for _, shape in known), initial=0)
    return [
        Part(module, shape, tuple(slices[start]))
        for start, (module, shape) in zip(starts, known, strict=False)
    ]


def _keep(
    found: GraphSite, planned: PlannedSite, codec: Codec, states: list[StateInput]
) -> list[fx.Node]:
    """Add an input for the codec's state of each part of a site."""
    fake, graph = fake_of(found.input), found.module.graph
    parts, added = _parts(found, planned), []
    for part in parts:
        shape = "x".join(str(size) for size in part.shape)
        place = (
            f"{part.module or 'root'}/{planned.direction}/{planned.kind}/{planned.dtype}[{shape}]"
        )
        node = add_input(graph, f"{STATE}_{len(states)}")
        like = fake if len(parts) == 1 else fake.new_empty(part.shape)
        value = codec.initial_state(like, planned.group_size)
        node.meta["val"] = value
        added.append(node)
        states.append(
            StateInput(
                place,
                sum(state.place == place for state in states),
                reached_outputs(part.outputs),
                planned.reduce_op or "sum",
                planned.group,
                tuple(value.shape),
                value.dtype,
                fake.device,
                value,
                source_of(found.input) if found.parameters else None,
                found.parameters,
            )
        )
    return added


def _joined(found: GraphSite, states: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the state of a site as its algorithm expects it: the states of all parts,
    concatenated."""
    if len(states) < 2:
        return list(states)
    graph, aten = found.module.graph, torch.ops.aten
    with graph.inserting_before(found.call.node):
        flat = [graph.call_function(aten.reshape.default, (node, [-1])) for node in states]
        made = graph.call_function(aten.cat.default, (flat,))
    for node in (*flat, made):
        set_value(node)
    return [made]


def reached_outputs(nodes: Sequence[fx.Node]) -> tuple[int, ...]:
    """Return the numbers of the graph outputs that depend on any of some nodes."""
    found = reached(nodes, lambda node: node.users)
    outputs = nodes[0].graph.output_node().args[0] if nodes else ()
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return tuple(number for number, output in enumerate(outputs) if output in found)


def _update(states: Sequence[fx.Node], new: fx.Node) -> None:
    """Write the new state into the inputs that hold it, at the end of the graph, after all reads of
    the old state."""
    graph, aten, start = new.graph, torch.ops.aten, 0
    mark = dataclasses.replace(new.meta[MARK], role="state")
    for state in states:
        value, held = new, fake_of(state)
        with graph.inserting_before(graph.output_node()):
            if len(states) > 1:
                end = start + held.numel()
                part = graph.call_function(aten.slice.Tensor, (new, 0, start, end))
                value = graph.call_function(aten.reshape.default, (part, list(held.shape)))
                for node in (part, value):
                    node.meta = {**new.meta, MARK: mark}
                    set_value(node)
                start = end
            copied = graph.call_function(aten.copy_.default, (state, value))
        copied.meta = {**new.meta, MARK: mark, "val": held}


def _replace(found: GraphSite, result: fx.Node) -> None:
    """Replace all uses of the collective's waited result by the new one."""
    call, graph = found.current_call, found.module.graph
    received = call.receives(found.position)
    target = call.out or (found.input if "in-place" in call.form or received else None)
    if target is not None:  # in-place: other readers of this tensor must see the result
        with graph.inserting_after(result):
            copied = graph.call_function(torch.ops.aten.copy_.default, (target, result))
        copied.meta = {**result.meta, "val": fake_of(target)}
        result = copied
    for held in found.outputs:
        for chained in [user for user in held.users if is_wait(user) and user.args[0] is held]:
            replace(chained, result)
        held.replace_all_uses_with(result)
    value = value_of(call, found.position)
    if received and value is not None:
        value.replace_all_uses_with(result, delete_user_cb=lambda user: not is_wait(user))
    if target is not None and call.form in ("in-place", "out"):
        call.node.replace_all_uses_with(result, delete_user_cb=lambda user: not is_wait(user))


def _drop(node: fx.Node, dropped: list[GraphSite]) -> None:
    """Erase a collective whose results were all replaced. Of a coalesced one, erase only the
    replaced parts."""
    positions = {found.position for found in dropped}
    coalesced = "coalesced" in dropped[0].call.form
    removed = {
        value
        for position in positions
        if (value := value_of(dropped[0].call, position)) is not None
    }
    _drop_waits(removed)
    for value in removed:
        for size in [user for user in value.users if is_size(user)]:
            _resize(size, dropped[0])
        erase(value)
    if coalesced:
        _shrink(
            node, [index for index in range(len(dropped[0].call.inputs)) if index not in positions]
        )


def _resize(size: fx.Node, found: GraphSite) -> None:
    """Redirect size queries on a collective's result to its input or to an all_to_all's splits."""
    dim, kind, ranks = size.args[1], KINDS[found.site.kind], found.site.group_size
    asked = size.meta["val"]
    size.args = (found.input, dim)
    size.meta["val"] = fake_of(found.input).shape[dim]  # type: ignore[index]
    graph, splits = size.graph, found.current_call.splits
    if dim != 0 or (splits is None and kind.gathers == kind.scatters):
        return
    with graph.inserting_after(size):
        if splits is not None:
            total = graph.call_function(torch.sym_sum, (tuple(splits[1]),))
        else:
            total = graph.call_function(
                operator.mul if kind.gathers else operator.floordiv, (size, ranks)
            )
    total.meta = {**size.meta, "val": asked}
    size.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    if not size.users:
        erase(size)


def _drop_waits(values: set[fx.Node]) -> None:
    """Erase the waits for values. Of a wait for several values, erase only the parts for these."""
    for wait in {user: None for value in values for user in value.users if is_wait(user)}:
        if isinstance(wait.args[0], fx.Node):
            erase(wait)
        else:
            waited_for: Any = wait.args[0]
            _shrink(wait, [i for i, each in enumerate(waited_for) if each not in values])


def _join(found: GraphSite, mark: str) -> None:
    """Let a position of a batch carry the bytes of the exchange that was inserted before it.

    Batches exist to avoid deadlocks, so they stay whole.
    """
    call, position = found.current_call, found.position
    value, graph = value_of(call, position), call.node.graph
    assert value is not None
    _drop_waits({value})
    held = call.node.meta.get("val")
    own = next(
        node
        for node in graph.nodes
        if MARK in node.meta and node.meta[MARK].site == mark and is_collective(node)
    )
    tensors = [
        own.all_input_nodes[0] if index == position else each
        for index, each in enumerate(call.inputs)
    ]
    call.node.args = (*call.node.args[:3], tensors, *call.node.args[4:])
    call.node.meta[PARTS] = {**call.node.meta.get(PARTS, {}), position: mark}
    received = call.receives(position)  # a receive buffer is its own result
    fake = (own.all_input_nodes[0] if received else own).meta["val"]
    value.meta |= {MARK: own.meta[MARK], "val": fake}
    if isinstance(held, (list, tuple)):
        call.node.meta["val"] = [
            fake if index == position else each for index, each in enumerate(held)
        ]
    replace(own, value)


def _shrink(node: fx.Node, states: list[int]) -> None:
    """Reduce a node over a list of tensors to the positions ``states``, and renumber the users of
    its results."""
    for index, item in list(items(node)):
        if index in states:
            item.args = (node, states.index(index))
        else:
            erase(item)
    if not states:
        erase(node)
        return
    node.args = ([node.args[0][index] for index in states], *node.args[1:])  # type: ignore[index]
    if isinstance(node.meta.get("val"), (list, tuple)):
        node.meta["val"] = [node.meta["val"][index] for index in states]
