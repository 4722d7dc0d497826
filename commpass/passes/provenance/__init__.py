"""provenance: derives from the graph whether a collective carries a field of similar values.

needs: a graph of aten operators and functional collectives, with fake values in ``meta["val"]``.
gives: the provenance of every collective's inputs, and why a lossy codec is not allowed for them.
changes: nothing. Walks the graph once, using only facts that all ranks share.

A block codec scales a block by its values. That suits a *field*: activations, gradients, weights.
It does not suit numbers with individual meanings. A count beside deviations sets the scale of their
block and turns them into 0, and an index that is off by one is another index. The meaning of graph
inputs is unknown; they count as fields.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import may_write, roots
from commpass.passes.fx.direction import gradients
from commpass.passes.fx.ops import PLAIN, name_of
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
from commpass.passes.provenance.walk import Walk, is_float, is_number, joined


def lossy_unsupported_reason(found: Provenance) -> str | None:
    """Return why a lossy codec is not allowed for such values, or None for a field of similar
    values."""
    return None if found.kind in LIKE else f"its values are {found}"


def provenances(graph: fx.Graph, direction: str) -> dict[fx.Node, tuple[Provenance, ...]]:
    """Return the provenance of each input of every collective of a forward or backward graph.
    Linear.

    A sum of gradients is a field if it is the gradient of a parameter, which leaves the graph. If a
    larger tensor is computed from it, as in a batch norm over all ranks, it is a statistic.
    """
    backward = direction == "backward"
    targets = {node: some for node in graph.nodes if (some := _targets(node))}
    walk = Walk(
        backward,
        gradients(graph) if backward else (),
        roots(graph).of if targets else {},
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
    """Return the results of a collective: its inputs, except for values received from another
    rank's graph."""
    if not call.ends:
        return inputs
    return tuple(UNKNOWN if call.receives(at) else each for at, each in enumerate(inputs))


def _of_operator(node: fx.Node, walk: Walk) -> Provenance | tuple[Provenance, ...]:
    """Return the results of any other node."""
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
    known = getattr(node.target, "namespace", "") in PLAIN
    found = RULES.get(name_of(node), arithmetic)(node, walk) if known else FIELD
    return _with_dtype(found, node, value)


def _of_constant(node: fx.Node, value: torch.Tensor | None) -> Provenance:
    """Return the provenance of a graph attribute: a number from the code, or a parameter."""
    if value is None:
        return UNKNOWN
    if not is_float(value):
        return Provenance(Kind.INTEGER, node.name)
    return Provenance(Kind.CONSTANT, node.name) if is_number(value) else UNKNOWN


def _item(node: fx.Node, value: torch.Tensor | None, walk: Walk) -> Provenance:
    """Return one of the results of an operator or a collective."""
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
    """Return the provenance of values without fractions: comparisons give masks, and integers are
    no field."""
    if value is None or is_float(value):
        return found
    if value.dtype is torch.bool:
        return found if found.kind is Kind.MASK else Provenance(Kind.MASK, name_of(node))
    return found if found.kind in WHOLE | NEUTRAL else Provenance(Kind.INTEGER, name_of(node))


def _targets(node: fx.Node) -> list[fx.Node]:
    """Return the nodes to whose memory an operator is known to write."""
    return may_write(node) if isinstance(node.target, torch._ops.OpOverload) else []


def _write(node: fx.Node, call: Call | None, targets: list[fx.Node], walk: Walk) -> None:
    """Record a node's writes to memory that others read. An in-place collective keeps its input's
    provenance."""
    if call is not None and (call.form != "out" or not call.inputs):
        return
    new = walk.of(node if call is None else call.inputs[0])
    for target in targets:
        root = walk.roots[target]
        old = walk.written.get(root)
        walk.written[root] = new if old is None else joined([old, new], [target, target])
