"""provenance: whether what a collective carries is a field of like values, from how the graph
computes it.

needs: a graph of aten operators and functional collectives, with fake values in ``meta["val"]``.
gives: what the inputs of every collective are, and why a lossy codec is not for them.
changes: nothing. One walk over the graph, by facts that all ranks share.

A codec of blocks scales a block by what is in it. That is right for a *field*: activations,
gradients, weights. It is wrong for numbers that mean something one by one: a count beside
deviations sets the scale of their block, and they become 0; an index that is off by one is another
index. What an input of the graph is, nobody says: it is taken for a field.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.direction import gradients
from commpass.passes.fx.parse import Call, is_wait, parse
from commpass.passes.provenance.kinds import FIELD, FIELDS, LIKE, NEUTRAL, UNKNOWN, WHOLE
from commpass.passes.provenance.kinds import Kind as Kind
from commpass.passes.provenance.kinds import Provenance as Provenance
from commpass.passes.provenance.operators import (
    RULES,
    STATISTICS_OF,
    arithmetic,
    broadcast_later,
)
from commpass.passes.provenance.walk import Walk, is_float, is_number, joined, name_of
from commpass.passes.simplify.values import memory, writes


def lossy_unsupported_reason(found: Provenance) -> str | None:
    """Why a codec that loses bits is not for such values; None for a field of like values."""
    return None if found.kind in LIKE else f"its values are {found}"


def provenances(graph: fx.Graph, direction: str) -> dict[fx.Node, tuple[Provenance, ...]]:
    """What each input of every collective of a forward or backward graph is. Linear.

    A sum of gradients is a field as the gradient of a parameter, which leaves the graph; where a
    larger tensor takes it again, as in a batch norm over all ranks, it is a statistic.
    """
    backward = direction == "backward"
    targets = {node: some for node in graph.nodes if (some := _targets(node))}
    walk = Walk(
        backward,
        gradients(graph) if backward else (),
        memory(graph)[0] if targets else {},
    )
    found: dict[fx.Node, tuple[Provenance, ...]] = {}
    for node in graph.nodes:
        call = parse(node)
        if call is not None:
            found[node] = tuple(map(walk.of, call.inputs))
        walk.made[node] = (
            _of_operator(node, walk) if call is None else _of_collective(call, found[node])
        )
        if node in targets:
            _write(node, call, targets[node], walk)
    if any(each.kind is Kind.GRADIENT for some in found.values() for each in some):
        later = broadcast_later(graph)
        of_weights = [node for node in found if node not in later]
        found |= {node: tuple(map(_as_gradient, found[node])) for node in of_weights}
    return found


def _as_gradient(found: Provenance) -> Provenance:
    return FIELD if found.kind is Kind.GRADIENT else found


def _of_collective(call: Call, inputs: tuple[Provenance, ...]) -> tuple[Provenance, ...]:
    """What a collective gives: what it takes, but for what comes from another rank's graph."""
    if not call.ends:
        return inputs
    pairs = zip(inputs, call.ends, strict=True)
    return tuple(UNKNOWN if end.kind == "recv" else each for each, end in pairs)


def _of_operator(node: fx.Node, walk: Walk) -> Provenance | tuple[Provenance, ...]:
    """What any other node gives."""
    value = meta.tensor(node)
    if node.op == "placeholder":
        whole = value is not None and not is_float(value)
        return Provenance(Kind.INTEGER, node.name) if whole else UNKNOWN
    if node.op == "get_attr":
        return _of_constant(node, value)
    if node.op != "call_function":
        return UNKNOWN
    if node.target is operator.getitem:
        return _item(node, value, walk)
    if is_wait(node):
        source = node.args[0]
        if isinstance(source, (list, tuple)):
            return tuple(map(walk.of, source))
        return walk.of(source)
    known = getattr(node.target, "namespace", "") in ("aten", "prims")
    found = RULES.get(name_of(node), arithmetic)(node, walk) if known else FIELD
    return _with_dtype(found, node, value)


def _of_constant(node: fx.Node, value: torch.Tensor | None) -> Provenance:
    """What a graph holds: a number that was written in the code, or a parameter."""
    if value is None:
        return UNKNOWN
    if not is_float(value):
        return Provenance(Kind.INTEGER, node.name)
    return Provenance(Kind.CONSTANT, node.name) if is_number(value) else UNKNOWN


def _item(node: fx.Node, value: torch.Tensor | None, walk: Walk) -> Provenance:
    """One of the tensors that an operator or a collective gives."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    found = walk.made.get(source, UNKNOWN)
    if isinstance(found, tuple):
        return found[index] if index < len(found) else UNKNOWN
    name = name_of(source)
    if value is not None and not is_float(value) and found.kind not in WHOLE:
        return Provenance(Kind.MASK if value.dtype is torch.bool else Kind.INDEX, name)
    if index in STATISTICS_OF.get(name, ()) and found.kind in FIELDS:
        return Provenance(Kind.STATISTIC, name)
    return found


def _with_dtype(found: Provenance, node: fx.Node, value: torch.Tensor | None) -> Provenance:
    """What values without fractions are: comparisons give masks, and a field is one no more."""
    if value is None or is_float(value):
        return found
    if value.dtype is torch.bool:
        return found if found.kind is Kind.MASK else Provenance(Kind.MASK, name_of(node))
    return found if found.kind in WHOLE | NEUTRAL else Provenance(Kind.INTEGER, name_of(node))


def _targets(node: fx.Node) -> list[fx.Node]:
    """The nodes to whose memory an operator is known to write."""
    return writes(node) if isinstance(node.target, torch._ops.OpOverload) else []


def _write(node: fx.Node, call: Call | None, targets: list[fx.Node], walk: Walk) -> None:
    """Notes what a node writes to memory that others look at. A collective in place leaves there
    what it took."""
    if call is not None and (call.form != "out" or not call.inputs):
        return
    new = walk.of(node if call is None else call.inputs[0])
    for target in targets:
        root = walk.roots[target]
        old = walk.written.get(root)
        walk.written[root] = new if old is None else joined([old, new], [target, target])
