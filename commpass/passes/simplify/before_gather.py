"""Computes values on a rank's part, and gathers the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.ops import RESHAPES, aten, functional
from commpass.passes.simplify.carriers import CARRIERS, SENT_EVERYWHERE
from commpass.passes.simplify.chains import rejoined_source
from commpass.passes.simplify.cut import Region
from commpass.passes.simplify.editor import Editor, fake, nbytes
from commpass.passes.simplify.shards import BITS, FILLS, SIZED, is_extremum_of_parts
from commpass.plan.kinds import KINDS

MINIMA = (aten.amin.default, aten.min.default)


@dataclass
class LocalValues:
    """Computes values of a region on a rank's part, and gathers some of them.

    ``rule`` names what it is done for. Nodes are inserted before ``place``. ``made`` has the new
    node of each value: a rank's part, or what is equal on all ranks. ``parts`` are the rank's parts
    of other values. ``sent`` are the started gathers.
    """

    region: Region
    editor: Editor
    rule: str
    place: fx.Node
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    fills: dict[tuple[fx.Node, int | None], fx.Node] = field(default_factory=dict)
    parts: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)

    def emit(self, source: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.editor.emit(self.place, self.rule, source, target, *args, **kwargs)

    def rounded(self, value: fx.Node) -> fx.Node:
        """Return 16-bit values as they are in memory, and were sent.

        Inductor would otherwise compute the operators from the producer's float32 values, before
        rounding. An integer operator needs the real bits, while two casts of bits cancel out.
        """
        dtype = fake(value).dtype
        if dtype not in (torch.bfloat16, torch.float16) or value.op != "call_function":
            return value
        bits = self.emit(value, BITS, value, torch.int16)
        bits = self.emit(value, aten.bitwise_or.Scalar, bits, 0)
        return self.emit(value, BITS, bits, dtype)

    # --- computing ---

    def compute(self, nodes: Sequence[fx.Node]) -> None:
        """Compute values of the region on this rank's part, in graph order.

        Exchanges of maxima start as soon as the input is known, and are waited for before the
        gather. Those of several gathers may then be fused.
        """
        first = [node for node in nodes if is_extremum_of_parts(node, self.region.shards)]
        early = self.region.needed_for(first)
        if any(self.region.shards[each].dim is None for each in early):
            early, first = [], []  # one of them needs another one
        for node in early:
            self._compute(node)
        started = {node: self._start_extremum(node) for node in first}
        self.place = self.region.exchange.call.node
        for node, sent in started.items():
            self.made[node] = self._extremum_of_all(node, sent)
        for node in nodes:
            if node not in self.made:
                self.compute_one(node)

    def compute_one(self, node: fx.Node) -> None:
        """Compute one value, whose inputs are computed. A maximum over all parts is exchanged."""
        self._compute(node)
        if is_extremum_of_parts(node, self.region.shards):
            self.made[node] = self._extremum_of_all(node, self._start_extremum(node))

    def _compute(self, node: fx.Node) -> None:
        source, dim = rejoined_source(node), self.region.shards[node].dim
        if source is not None:  # the rank's part is the same, whatever it is joined along
            self.made[node] = self._of(source)
            return

        def local_input(each: fx.Node) -> fx.Node:
            if each in self.region.first:
                return self._of(each)
            return self._fill(each, node, dim) if each.target in FILLS else self._rows(each, node)

        if node.target in SIZED:
            value: Any = node.args[0]
            target = aten.reshape.default if node.target in RESHAPES else node.target
            self.made[node] = self.emit(
                node, target, local_input(value), self._local_sizes(node, dim)
            )
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), local_input)
            self.made[node] = self.emit(node, node.target, *args, **kwargs)

    def _of(self, node: fx.Node) -> fx.Node:
        return self.made[self.region.first[node]]

    def _local_sizes(self, node: fx.Node, dim: int | None) -> list[Any]:
        """Return the sizes of a view of one rank's part, or of what is equal on all ranks."""
        sizes = self._lengths(fake(node).shape, node, dim)
        if dim is not None:
            fixed = self.region.even and isinstance(sizes[dim], int)
            sizes[dim] = sizes[dim] // self.region.ranks if fixed else -1
        return sizes

    def _lengths(self, sizes: Sequence[Any], node: fx.Node, dim: int | None) -> list[Any]:
        """Return sizes for a node's arguments, except that of dimension ``dim``, which may be
        unknown before the graph runs."""
        return [
            size if number == dim else self.editor.length(size, self.rule, node)
            for number, size in enumerate(sizes)
        ]

    def _fill(self, fill: fx.Node, user: fx.Node, dim: int | None) -> fx.Node:
        """Return a constant of a shape that fits one rank's part."""
        own = -1 if dim is None else dim - (fake(user).dim() - fake(fill).dim())
        key = (fill, own if own >= 0 else None)
        if key not in self.fills:
            args = fill.args
            if fill.target is aten.full.default:
                sizes = self._lengths(fake(fill).shape, fill, own)
                if own >= 0:
                    sizes[own] = 1
                args = (sizes, *fill.args[1:])
            self.fills[key] = self.emit(fill, fill.target, *args, **fill.kwargs)
        return self.fills[key]

    def _rows(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """Return the rank's rows of a value from outside the region, or the value if all of them
        are used with each row."""
        dim = self.region.shards[user].dim
        own = -1 if dim is None else dim - (fake(user).dim() - fake(value).dim())
        whole = own < 0 or fake(value).shape[own] == 1
        return value if whole else self.part_of(value, own)

    def part_of(self, value: fx.Node, dim: int) -> fx.Node:
        """Return the rank's part of a value, along a dimension."""
        if (value, dim) not in self.parts:
            rank = self.editor.rank(self.region.exchange.call)
            assert rank is not None
            rows = fake(value).shape[dim] // self.region.ranks
            bounds = (rank * rows, (rank + 1) * rows)
            part = self.emit(value, aten.slice.Tensor, value, dim, *bounds)
            self.parts[value, dim] = part
        return self.parts[value, dim]

    def _start_extremum(self, node: fx.Node) -> Sent:
        """Compute this rank's maximum or minimum, and start a gather of it."""
        if node not in self.made:
            self._compute(node)
        local = self.made[node]
        row = self.emit(node, aten.unsqueeze.default, local, 0)
        return self._start(row, node, 0)

    def _extremum_of_all(self, node: fx.Node, sent: Sent) -> fx.Node:
        """Return the maximum or minimum of the ranks' own ones. NaN on any rank gives NaN."""
        rows = sent.received(self.place, self.editor, self.rule)
        target = aten.amin.default if node.target in MINIMA else aten.amax.default
        return self.emit(node, target, rows, [0])

    # --- gathering ---

    def start(self, parts: Sequence[fx.Node]) -> dict[fx.Node, Sent]:
        """Start the gathers of some values."""
        wait = fake(self.region.exchange.wait)
        values = self.region.nbytes(self.region.exchange.wait) // wait.dtype.itemsize
        found = {}
        for each in parts:
            dim = self.region.shards[each].dim
            assert dim is not None, each
            as_many = self.region.nbytes(each) == values * fake(each).dtype.itemsize
            found[each] = self._start(self.made[each], each, dim, floats=as_many)
        return found

    def _start(self, value: fx.Node, source: fx.Node, dim: int, *, floats: bool = False) -> Sent:
        """Start the gather of a value, with the ranks' parts along ``dim``.

        Bits travel as integers, so that no codec of the policy changes scales and codes. ``floats``
        are sent as they are: they are as many as the values that the policy is for.
        """
        given = fake(value)
        order = (dim, *(each for each in range(given.dim()) if each != dim))
        if dim != 0:
            value = self.emit(source, aten.permute.default, value, list(order))
        if all(isinstance(size, int) for size in given.shape):
            value = self.editor.contiguous(self.place, self.rule, value)
        else:
            value = self.editor.copy(self.place, self.rule, source, value)
        dtype, flat = given.dtype, False
        if dtype not in SENT_EVERYWHERE or (dtype.is_floating_point and not floats):
            flat = dtype.itemsize == 2 and given.dim() == 1
            if flat:  # the two bytes of a value are one entry
                value = self.emit(source, aten.unsqueeze.default, value, 1)
            value = self.emit(source, BITS, value, CARRIERS[dtype.itemsize])
        like = self.region.exchange.call
        if KINDS[like.kind].gathers:
            start = self.editor.start(self.place, self.rule, like, value)
        else:
            gather = functional.all_gather_into_tensor.default
            start = self.emit(like.node, gather, value, self.region.ranks, like.group)
        self.sent.append(Sent(start, source, dtype, order, flat, like.node, nbytes(value)))
        return self.sent[-1]


def before_gather(region: Region, editor: Editor, rule: str) -> LocalValues:
    """Return the values of a region behind a gather, of which this rank's part of the gathered one
    is computed. Nodes are inserted as soon as it is."""
    source = region.exchange.input
    place = source.next
    while place.op == "placeholder":
        place = place.next
    local = LocalValues(region, editor, rule, place)
    local.made[region.exchange.wait] = local.rounded(source)
    return local


@dataclass(frozen=True)
class Sent:
    """A started gather of one value.

    ``source`` is the node that it replaces, and ``dtype`` its dtype. ``order`` are its dimensions
    as they are sent. ``flat`` says that a dimension for the two bytes of a value was added.
    ``like`` is the collective that it replaces, and ``nbytes`` are the bytes that a rank sends.
    """

    start: fx.Node
    source: fx.Node
    dtype: torch.dtype
    order: tuple[int, ...]
    flat: bool
    like: fx.Node
    nbytes: int

    @property
    def text(self) -> str:
        return f"{self.start.name} of {meta.dtype_name(self.dtype)}"

    def received(self, before: fx.Node, editor: Editor, rule: str) -> fx.Node:
        """Wait for the gather, and return the gathered values."""

        def emit(target: Any, *args: Any) -> fx.Node:
            return editor.emit(before, rule, self.source, target, *args)

        wait = functional.wait_tensor.default
        value = editor.emit(before, rule, self.like, wait, self.start)
        if fake(value).dtype != self.dtype:
            value = emit(BITS, value, self.dtype)
        if self.flat:
            value = emit(aten.squeeze.dim, value, 1)
        if self.order != tuple(range(len(self.order))):
            back = [self.order.index(dim) for dim in range(len(self.order))]
            value = emit(aten.permute.default, value, back)
        return value
