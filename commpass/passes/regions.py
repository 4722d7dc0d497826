"""Regions: what a site computes between two of its exchanges, so that one kernel can compute it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import make_contiguous_strides_for

from commpass.codecs import operators
from commpass.errors import VerifyError
from commpass.lowering import (
    Form,
    Generated,
    KernelInput,
    Piece,
    Source,
    form_of,
    fused,
    unsupported_reason,
)
from commpass.lowering.chain import further_results
from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import is_view
from commpass.passes.fx.create import call, copy_of
from commpass.passes.fx.erase import erase, replace
from commpass.passes.fx.fakes import mode_of
from commpass.passes.fx.marks import CODED, MARK, inherit
from commpass.passes.fx.ops import ALLOCATORS, EMPTY
from commpass.passes.fx.splice import add_input
from commpass.passes.fx.tracing import Decompositions, traced

OUTSIDE = ("exchange", "wait", "state", "join")
"""The roles of nodes that belong to no region."""
PAD = torch.ops.aten.constant_pad_nd.default
JOIN = operators.ops.join.default
ENCODE = operators.ops.encode.default


@dataclass(frozen=True)
class JoinColumns:
    """Where a region writes its part of a ``join``: the columns from ``first`` on."""

    join: fx.Node
    first: int

    @property
    def width(self) -> int:
        """The number of columns of all parts together."""
        return int(self.join.meta["val"].shape[1])


@dataclass(frozen=True)
class Region:
    """Connected nodes of one site between the same exchanges, which depend on the same waits.

    ``inputs`` come from outside, and ``outputs`` are used outside, except views of others.
    ``places`` holds the outputs that are parts of a join.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    places: dict[fx.Node, JoinColumns]

    @property
    def anchor(self) -> fx.Node:
        """The first node before which all inputs exist."""
        late = [node for node in self.inputs if not node < self.nodes[0]]
        return max(late).next if late else self.nodes[0]

    @property
    def role(self) -> str:
        """The roles of its codec operators, in order."""
        roles = [n.meta[MARK].role for n in self.nodes if n.target in operators.ROLES]
        return "+".join(dict.fromkeys(roles))

    def comes_in_time(self) -> bool:
        """Whether all users of its results come after its inputs."""
        inside, anchor = {*self.nodes}, self.anchor
        return not any(
            user < anchor for node in self.nodes for user in node.users if user not in inside
        )

    def key(self) -> Any:
        """Return a key that is equal for regions that compute the same from equal inputs."""
        names = {node: f"%{number}" for number, node in enumerate((*self.inputs, *self.nodes))}
        steps = [
            (str(node.target), str(fx.map_arg((node.args, node.kwargs), lambda n: names[n])))
            for node in self.nodes
        ]
        facts = list(map(input_of, self.inputs))
        widths = [self.places[node].width if node in self.places else 0 for node in self.outputs]
        return str((steps, facts, [names[node] for node in self.outputs], widths))


def places(nodes: Sequence[fx.Node]) -> dict[fx.Node, JoinColumns]:
    """Return the places of the parts of each ``join`` whose parts are all made by regions."""
    found: dict[fx.Node, JoinColumns] = {}
    joins = [node for node in nodes if node.target is JOIN and _is_fixed(node)]
    if not joins:
        return found
    made = {node for region in regions(nodes) for node in region.nodes}
    for join in joins:
        parts: Any = join.args[0]
        if not made.issuperset(parts) or any(len(part.users) > 1 for part in parts):
            continue
        first = 0
        for part in parts:
            found[part] = JoinColumns(join, first)
            first += part.meta["val"].shape[1]
    return found


def regions(
    nodes: Sequence[fx.Node], places: dict[fx.Node, JoinColumns] | None = None
) -> Iterator[Region]:
    """Yield the regions of the nodes inserted for a site, in graph order. Regions without a codec
    operator are omitted.

    If some sizes are symbolic, each codec operator of fixed size forms a region. For a codec of
    value-dependent wire size these are the encode and the decode.
    """
    waits: dict[fx.Node, frozenset[fx.Node]] = {}
    groups: dict[tuple[int, frozenset[fx.Node]], list[fx.Node]] = {}
    exchanges = 0
    for node in nodes:
        waits[node] = frozenset().union(*(_after(source, waits) for source in node.all_input_nodes))
        exchanges += node.meta[MARK].role == "exchange"
        if node.meta[MARK].role not in OUTSIDE and node.target not in ALLOCATORS:
            groups.setdefault((exchanges, waits[node]), []).append(node)
    for members in groups.values():
        group = [node for node in members if not node._erased]  # see _erase_unused_views
        for part in _connected(_without_leading_pads(_without_leading_views(group))):
            coded = [node for node in part if node.target in operators.IMPLEMENTATIONS]
            if not coded:
                continue
            fixed = all(map(_is_fixed, part))
            for nodes in [part] if fixed else [[node] for node in coded if _stands_alone(node)]:
                region = _region(nodes, places or {})
                if region.comes_in_time():
                    yield region


def _after(source: fx.Node, waits: dict[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    """Return the waits that a user of a node depends on."""
    if source not in waits:
        return frozenset()
    return waits[source] | ({source} if source.meta[MARK].role == "wait" else frozenset())


def _without_leading_views(group: list[fx.Node]) -> list[fx.Node]:
    """Remove views of values from outside. They cost nothing, and a kernel must not return its own
    input."""
    inside = set(group)
    for node in group:
        if is_view(node) and not any(source in inside for source in node.all_input_nodes):
            inside.remove(node)
    return [node for node in group if node in inside]


def _without_leading_pads(group: list[fx.Node]) -> list[fx.Node]:
    """Remove a leading pad that later regions read as well, as in a ring, which adds its own values
    at each hop.

    The padded row is in memory in any case, and the producer of the values can write it there
    directly. The rest of the region is then one codec operator.
    """
    if not group:
        return group
    first, inside = group[0], set(group)
    if first.target is not PAD or inside.issuperset(_readers(first)):
        return group
    return _without_leading_views(group[1:])


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node, through views."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_fixed(node: fx.Node) -> bool:
    """Whether all sizes of a node and its inputs are numbers."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    several = (v if isinstance(v, (list, tuple)) else [v] for v in values)
    return all(map(meta.is_fixed, itertools.chain(*several)))


def _stands_alone(node: fx.Node) -> bool:
    """Whether a codec operator can form a kernel of its own and is worth it."""
    role, value = operators.ROLES[node.target], node.meta["val"]
    return role in ("encode", "decode") and isinstance(value, Tensor) and _is_fixed(node)


def _connected(nodes: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Split nodes into connected components, each in order."""
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


def _region(nodes: list[fx.Node], places: dict[fx.Node, JoinColumns]) -> Region:
    inside = set(nodes)
    inputs = dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside)
    outputs: dict[fx.Node, None] = {}
    for node in nodes:
        if node in places:
            outputs[node] = None
        elif any(user not in inside for user in node.users):
            outputs |= dict.fromkeys(_bases(node, inside))
    own = {node: places[node] for node in outputs if node in places}
    return Region(tuple(nodes), tuple(inputs), tuple(outputs), own)


def _bases(node: fx.Node, inside: set[fx.Node]) -> Iterable[fx.Node]:
    """Return the nodes of a region that a view refers to, through other views."""
    if not is_view(node):
        return [node]
    sources = [source for source in node.all_input_nodes if source in inside]
    return [base for source in sources for base in _bases(source, inside)]


def trace(region: Region, decompositions: Decompositions) -> Source:
    """Trace what a region computes and writes, as the source of a kernel."""
    inside = {*region.nodes}
    encodes = {
        node for node in region.outputs if node.target is ENCODE and not inside & {*node.users}
    }

    def run(*inputs: Tensor) -> list[Tensor]:
        values: dict[fx.Node, Any] = dict(zip(region.inputs, inputs, strict=True))
        for node in region.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            function: Any = operators.IMPLEMENTATIONS.get(node.target, node.target)
            if node in encodes:
                function = operators.encode_pieces
            values[node] = function(*args, **kwargs)
        made = (values[node] for node in region.outputs)
        return [piece for value in made for piece in _several(value)]

    values = [node.meta["val"] for node in region.inputs]
    subject = " and ".join(str(node.target) for node in region.nodes)
    body = traced(run, values, decompositions, subject)
    made: Any = body.graph.output_node().args[0]
    pieces = tuple(_pieces(region, [node.meta["val"] for node in made]))
    write(body, made, pieces)
    return Source(body, tuple(map(input_of, region.inputs)), pieces)


def generated(region: Region) -> Generated | None:
    """Return the source of a region's generated kernel, or None unless the region is one fused
    operator with such a kernel, and views of its results."""
    node, *others = region.nodes
    if node.target not in fused.CHAINS or not all(map(_is_result, others)):
        return None
    chain, numel = fused.lookup(str(node.args[1])), node.args[2]
    operands: Any = node.args[0]
    if not isinstance(numel, int) or list(region.inputs) != list(operands):
        return None
    if unsupported_reason(chain, numel, operands[0].meta["val"].device):
        return None
    order = [_number(each) for each in region.outputs]
    if any(map(is_view, region.outputs)) or sorted(order) != list(
        range(1 + len(further_results(chain)))
    ):
        return None
    pieces = list(_pieces(region, [each.meta["val"] for each in region.outputs]))
    by_result = dict(zip(order, pieces, strict=True))
    inputs = tuple(map(input_of, region.inputs))
    return Generated(chain, numel, inputs, tuple(by_result[i] for i in range(len(pieces))))


def _number(output: fx.Node) -> int:
    """Return the number of the result that an output of a fused operator takes."""
    return int(output.args[1]) if output.target is getitem else 0  # type: ignore[arg-type]


def _is_result(node: fx.Node) -> bool:
    """Whether a node only takes or views a result of another."""
    return node.target is getitem or is_view(node)


def base_of(node: fx.Node) -> fx.Node:
    """Return the tensor that a region's input is a view of. The kernel's caller passes this
    tensor."""
    source = node.all_input_nodes[0] if MARK in node.meta and is_view(node) else node
    if source is node or source.meta["val"].dtype != node.meta["val"].dtype:
        return node
    return base_of(source)


def input_of(node: fx.Node) -> KernelInput:
    """Return the layout of an input within its base tensor."""
    return KernelInput(form_of(base_of(node).meta["val"]), form_of(node.meta["val"]))


def _place(node: fx.Node) -> int:
    own, source = node.meta["val"], base_of(node).meta["val"]
    return int(own.storage_offset() - source.storage_offset())


def _several(value: Any) -> Sequence[Tensor]:
    return value if isinstance(value, tuple) else [value]


def _pieces(region: Region, values: Sequence[Tensor]) -> Iterator[Piece]:
    """Yield where each value that a region computes is written."""
    left = iter(values)
    for number, node in enumerate(region.outputs):
        like: Tensor = node.meta["val"]
        width = region.places[node].width if node in region.places else like.shape[-1]
        place, end = 0, like.shape[-1] * like.itemsize
        while place < end or like.numel() == 0:
            value = next(left)
            size = value.itemsize
            stride: tuple[int, ...] = tuple(make_contiguous_strides_for(value.shape))
            if value.dim() == 2:
                stride = (width * like.itemsize // size, 1)
            form = Form(value.dtype, value.device, tuple(value.shape), stride)
            yield Piece(number, place // size, form)
            place += value.shape[-1] * size
            if like.numel() == 0:
                break


def write(body: fx.GraphModule, outputs: Sequence[fx.Node], pieces: Sequence[Piece]) -> None:
    """Make a body write its results into additional inputs."""
    graph = body.graph
    output = graph.output_node()
    for number, (value, piece) in enumerate(zip(outputs, pieces, strict=True)):
        last = add_input(graph, f"written_{number}")
        with mode_of(graph):
            shape, stride = piece.form.shape, piece.form.stride
            last.meta["val"] = value.meta["val"].new_empty_strided(shape, stride)
        with graph.inserting_before(output):
            copied = graph.call_function(torch.ops.aten.copy_.default, (last, value))
        copied.meta["val"] = last.meta["val"]
    output.args = ((),)
    body.recompile()


def outline(region: Region, kernel: str, site: int, buffers: dict[fx.Node, fx.Node]) -> None:
    """Replace a region of site number ``site`` by a kernel call and the buffers that it writes.
    ``buffers`` holds those of joins."""
    inside, graph = set(region.nodes), region.nodes[0].graph
    users = [(node, [u for u in node.users if u not in inside]) for node in region.nodes]
    new: dict[fx.Node, fx.Node] = {}
    written, firsts = [], []
    with graph.inserting_before(region.anchor):
        for node in region.outputs:
            place = region.places.get(node)
            if place is None:
                new[node] = buffer = _buffer(node)
            elif place.join in buffers:
                buffer = buffers[place.join]
            else:
                buffers[place.join] = buffer = _buffer(place.join)
            written.append(buffer)
            firsts.append(place.first if place is not None else 0)
        kernel_call = call(
            graph,
            torch.ops.commpass.kernel_.default,
            (list(map(base_of, region.inputs)),),
            {  # by name: in a branch or a loop, torch refuses a list that is written otherwise
                "outputs": written,
                "places": [*map(_place, region.inputs), *firsts],
                "name": kernel,
                "site": site,
                "role": region.role,
            },
        )
        first = next(n for n in region.nodes if n.target in operators.ROLES)
        inherit(kernel_call, first, role=region.role)
        kernel_call.meta["val"] = None
        kernel_call.meta[CODED] = tuple(
            work for n in region.nodes for work in n.meta.get(CODED, ())
        )

        def outside(node: fx.Node) -> fx.Node:
            if node in inside and node not in new:
                new[node] = copy_of(graph, node, outside)
                new[node].meta.update(node.meta)
            return new.get(node, node)

        for node, others in users:
            if node not in region.places:
                for user in others:
                    user.replace_input_with(node, outside(node))
    for node, place in region.places.items():
        place.join.args = ([part for part in _parts(place.join) if part is not node],)
    for node in reversed(region.nodes):
        erase(node)
    for node in region.inputs:
        _erase_unused_views(node, kernel_call.meta[MARK].site)


def _erase_unused_views(node: fx.Node, site: str) -> None:
    """Erase a view without users that was inserted for a site, and those that it is a view of. A
    kernel's caller passes their base instead. Views of other sites may be what this one encodes,
    which ``sample`` looks for."""
    while MARK in node.meta and node.meta[MARK].site == site and not node.users and is_view(node):
        source = node.all_input_nodes[0]
        erase(node)
        node = source


def _parts(join: fx.Node) -> list[fx.Node]:
    return list(join.args[0])  # type: ignore[arg-type]


def _buffer(like: fx.Node) -> fx.Node:
    """Create a buffer for a value."""
    value: Tensor = like.meta["val"]
    how = {"dtype": value.dtype, "device": value.device}
    empty = call(like.graph, EMPTY, (list(value.shape),), how)
    inherit(empty, like, role="layout")
    empty.meta["val"] = value
    return empty


def place_buffers(buffers: dict[fx.Node, fx.Node]) -> None:
    """Replace joins by their buffers, each placed before its first write. Raise VerifyError if no
    kernel writes a part of one."""
    for join, buffer in buffers.items():
        if left := _parts(join):
            raise VerifyError(f"no kernel writes {left[0].name}, a part of {join.name}")
        min(buffer.users).prepend(buffer)
        replace(join, buffer)
