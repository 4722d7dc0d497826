"""Regions: what a site computes between two of its exchanges, which one kernel can do."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.codecs import operators
from commpass.lowering import Source, form_of
from commpass.passes.graph import meta
from commpass.passes.graph.fakes import is_view, storage
from commpass.passes.graph.marks import MARK
from commpass.passes.template import Decompositions, without_tensors

OUTSIDE = ("exchange", "wait", "state")
"""The roles of nodes that are part of no region."""
EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


@dataclass(frozen=True)
class Region:
    """Nodes of one site that lie between the same exchanges and depend on the same waits and on
    each other; what they take from outside; and those of them that are used there, without those
    that are views of others."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def anchor(self) -> fx.Node:
        """The first node before which all inputs are there."""
        late = [node for node in self.inputs if not node < self.nodes[0]]
        return max(late).next if late else self.nodes[0]

    @property
    def role(self) -> str:
        """What its coded operators do, in order."""
        roles = [operators.ROLES[n.target] for n in self.nodes if n.target in operators.ROLES]
        return "+".join(dict.fromkeys(roles))

    def comes_in_time(self) -> bool:
        """Whether all that take its results come after its inputs."""
        inside, anchor = {*self.nodes}, self.anchor
        return not any(
            user < anchor for node in self.nodes for user in node.users if user not in inside
        )

    def key(self) -> Any:
        """Equal for regions that compute the same of equal inputs."""
        names = {node: f"%{number}" for number, node in enumerate((*self.inputs, *self.nodes))}
        said = [
            (str(node.target), str(fx.map_arg((node.args, node.kwargs), lambda n: names[n])))
            for node in self.nodes
        ]
        facts = [form_of(node.meta["val"]) for node in self.inputs]
        return str((said, facts, [names[node] for node in self.outputs]))


def regions(nodes: Sequence[fx.Node]) -> Iterator[Region]:
    """The regions of the nodes that were inserted for a site, in graph order; those that code
    nothing are left out. Where some sizes are not fixed, a region is a coded operator whose own
    are: of a codec whose wire depends on values, the encode and the decode."""
    waits: dict[fx.Node, frozenset[fx.Node]] = {}
    groups: dict[tuple[int, frozenset[fx.Node]], list[fx.Node]] = {}
    exchanges = 0
    for node in nodes:
        waits[node] = frozenset().union(*(_after(source, waits) for source in node.all_input_nodes))
        exchanges += node.meta[MARK].role == "exchange"
        if node.meta[MARK].role not in OUTSIDE and node.target not in EMPTY:
            groups.setdefault((exchanges, waits[node]), []).append(node)
    for group in groups.values():
        for part in _connected(_without_leading_views(group)):
            coded = [node for node in part if node.target in operators.IMPLEMENTATIONS]
            if not coded:
                continue
            fixed = all(map(_is_fixed, part))
            for nodes in [part] if fixed else [[node] for node in coded if _stands_alone(node)]:
                region = _region(nodes)
                if region.comes_in_time():
                    yield region


def _after(source: fx.Node, waits: dict[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    """The waits that who takes a node depends on."""
    if source not in waits:
        return frozenset()
    return waits[source] | ({source} if source.meta[MARK].role == "wait" else frozenset())


def _without_leading_views(group: list[fx.Node]) -> list[fx.Node]:
    """Without the views of what comes from outside: they cost nothing, and a kernel must not give
    back its own input."""
    inside = set(group)
    for node in group:
        if is_view(node) and not any(source in inside for source in node.all_input_nodes):
            inside.remove(node)
    return [node for node in group if node in inside]


def _is_fixed(node: fx.Node) -> bool:
    """Whether all sizes of a node, and of what it takes, are numbers."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    tensors = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return all(
        isinstance(v, Tensor) and all(isinstance(n, int) for n in (*v.shape, *v.stride()))
        for v in tensors
    )


def _stands_alone(node: fx.Node) -> bool:
    """Whether a coded operator is worth a kernel of its own, and can be one."""
    role, value = operators.ROLES[node.target], node.meta["val"]
    return role in ("encode", "decode") and isinstance(value, Tensor) and _is_fixed(node)


def _connected(nodes: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Nodes apart by whether they depend on each other, each part in order."""
    root = {node: node for node in nodes}

    def find(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for node in nodes:
        for source in node.all_input_nodes:
            if source in root:
                root[find(node)] = find(source)
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        parts.setdefault(find(node), []).append(node)
    yield from parts.values()


def _region(nodes: list[fx.Node]) -> Region:
    inside = set(nodes)
    inputs = dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside)
    outputs: dict[fx.Node, None] = {}
    for node in nodes:
        if any(user not in inside for user in node.users):
            outputs |= dict.fromkeys(_bases(node, inside))
    return Region(tuple(nodes), tuple(inputs), tuple(outputs))


def _bases(node: fx.Node, inside: set[fx.Node]) -> Iterable[fx.Node]:
    """The nodes of a region that a view, seen through other views, is a view of."""
    if not is_view(node):
        return [node]
    sources = [source for source in node.all_input_nodes if source in inside]
    return [base for source in sources for base in _bases(source, inside)]


def trace(region: Region, decompositions: Decompositions) -> Source:
    """What a region computes, for a kernel to be compiled from."""

    def run(*given: Tensor) -> list[Tensor]:
        values: dict[fx.Node, Any] = dict(zip(region.inputs, given, strict=True))
        for node in region.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            function: Any = operators.IMPLEMENTATIONS.get(node.target, node.target)
            values[node] = function(*args, **kwargs)
        taken = {storage(value) for value in given}
        results = [values[node].contiguous() for node in region.outputs]
        return [each.clone() if storage(each) in taken else each for each in results]

    values = [node.meta["val"] for node in region.inputs]
    body = make_fx(run, decomposition_table=decompositions())(*values)
    without_tensors(body.graph, " and ".join(str(node.target) for node in region.nodes))
    made: Any = body.graph.output_node().args[0]
    outputs = (form_of(node.meta["val"]) for node in made)
    return Source(body, tuple(map(form_of, values)), tuple(outputs))


def outline(region: Region, kernel: str) -> None:
    """Puts a call of a kernel in the place of a region."""
    inside, graph = set(region.nodes), region.nodes[0].graph
    users = [(node, [u for u in node.users if u not in inside]) for node in region.nodes]
    with graph.inserting_before(region.anchor):
        call = graph.call_function(torch.ops.commpass.kernel.default, (list(region.inputs), kernel))
        first = next(n for n in region.nodes if n.target in operators.ROLES)
        call.meta = _meta(first, [node.meta["val"] for node in region.outputs])
        call.meta[MARK] = replace(first.meta[MARK], role=region.role)
        new: dict[fx.Node, fx.Node] = {}
        for number, node in enumerate(region.outputs):
            item = graph.call_function(operator.getitem, (call, number))
            item.meta = _meta(node, node.meta["val"])
            new[node] = item

        def outside(node: fx.Node) -> fx.Node:
            if node in inside and node not in new:
                new[node] = graph.node_copy(node, outside)
            return new.get(node, node)

        for node, others in users:
            for user in others:
                user.replace_input_with(node, outside(node))
    for node in reversed(region.nodes):
        graph.erase_node(node)


def _meta(source: fx.Node, value: Any) -> dict[str, Any]:
    held: dict[str, Any] = {MARK: source.meta[MARK], "val": value}
    held |= {key: source.meta[key] for key in meta.CARRIED if key in source.meta}
    return held
