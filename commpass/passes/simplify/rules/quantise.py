"""The rule that sends what the consumers of a gathered value compute from it, if that is less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.ops import RESHAPES, aten, called_name, is_copy, moves_values
from commpass.passes.simplify.chains import rejoined_source
from commpass.passes.simplify.cut import Region, cheapest_cut, region_of
from commpass.passes.simplify.editor import Editor, Exchange, common_nbytes, fake, nbytes
from commpass.passes.simplify.rules.gathers import SENT_EVERYWHERE
from commpass.passes.simplify.rules.rule import Applied
from commpass.passes.simplify.shards import BITS, FILLS, is_extremum_of_parts
from commpass.plan.kinds import GATHERS

RULE = "quantised before gather"
CARRIERS = {1: torch.uint8, 2: torch.uint8, 4: torch.int32, 8: torch.int64}
"""The integers that carry the bits of other dtypes, by their bytes. gloo refuses 16-bit integers,
so two bytes carry one value."""
SMALLEST = {aten.amin.default: aten.amin.default, aten.min.default: aten.amin.default}
"""The operators that reduce the gathered results of a minimum. All others are maxima."""


def quantise_before_gather(node: fx.Node, editor: Editor) -> Applied | None:
    """f(gather(x)) = gather(f(x)), if f keeps the parts of the ranks: codes and scales are sent
    instead of the values that they are computed from.

    A maximum over all parts is that of the ranks' maxima. These are gathered, since an all_reduce
    with "max" loses NaN in some libraries.
    """
    exchange = editor.exchange(node, GATHERS)
    if exchange is None or not _may_change(exchange, editor):
        return None
    region = region_of(exchange, editor)
    cut = cheapest_cut(region) if region is not None else []
    if region is None or not cut or node in cut:
        return None
    computed = _inputs_of(cut, region)
    parts = [each for each in cut if region.shards[each].dim is not None]
    extrema = [each for each in computed if is_extremum_of_parts(each, region.shards)]
    if not _ends_earlier(parts, extrema, region, editor):
        return None
    before = nbytes(exchange.input)
    move = _Move(region, editor)
    for each in computed:
        move.local(each)
    moved = tuple(text for each in computed if (text := _text(each)))
    saved = before - sum(nbytes(started.all_input_nodes[0]) for started in move.starts(parts))
    name = exchange.call.node.name
    for each in parts:
        move.replace(each, move.gathered(each))
    for each in computed:
        if region.shards[each].dim is None:
            move.replace(each, move.made[each])
    return Applied(name, move.text, saved, moved)


def _may_change(exchange: Exchange, editor: Editor) -> bool:
    """Whether the policy leaves it to the passes how values are sent. A forced codec was asked for
    by the user."""
    allowed = editor.allowed.get(exchange.call.node)
    return allowed is None or not allowed.force


def _inputs_of(cut: Sequence[fx.Node], region: Region) -> list[fx.Node]:
    """Return the values that must be computed before the gather for those of a cut, in graph
    order."""
    needed = set(cut)
    left = list(cut)
    while left:
        for source in region.inputs(left.pop()):
            if source not in needed and source is not region.exchange.wait:
                needed.add(source)
                left.append(source)
    return [node for node in region.shards if node in needed]


def _ends_earlier(
    parts: Sequence[fx.Node], extrema: Sequence[fx.Node], region: Region, editor: Editor
) -> bool:
    """Whether the new exchanges take less time by the cost model. The operators take no longer: they
    compute a part instead of the whole."""
    call, ranks = region.exchange.call, region.ranks
    less = sum(editor.us(call.kind, region.nbytes(each) / ranks, call) for each in parts)
    less += sum(editor.us("all_gather", meta.total_nbytes(fake(each)), call) for each in extrema)
    return less < editor.us(call.kind, common_nbytes(call, ranks), call)


def _text(node: fx.Node) -> str | None:
    """Return an operator with its numbers, which the ranks compare; None if it has none. The sizes
    of views may differ between ranks."""
    if node.target in RESHAPES or node.target is aten.expand.default or is_copy(node):
        return None
    given = [*node.args, *node.kwargs.values()]
    for each in node.all_input_nodes:
        given += each.args[-1:] if each.target in FILLS else []
    numbers = [
        str(each).removeprefix("torch.")
        for each in given
        if isinstance(each, (int, float, torch.dtype))
        or (isinstance(each, list) and all(isinstance(one, int) for one in each))
    ]
    if not numbers or moves_values(node) or rejoined_source(node) is not None:
        return None
    return " ".join([called_name(node), *numbers])


@dataclass
class _Move:
    """Computes values of a region before the gather, and gathers some of them.

    ``made`` has the new node of each value: a rank's part, or what is equal on all ranks.
    """

    region: Region
    editor: Editor
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    fills: dict[tuple[fx.Node, int | None], fx.Node] = field(default_factory=dict)
    sent: dict[fx.Node, _Sent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = self.region.exchange.call.node
        self.made[self.region.exchange.wait] = self._rounded(self.region.exchange.input)

    @property
    def text(self) -> str:
        kinds = (fake(sent.start.all_input_nodes[0]).dtype for sent in self.sent.values())
        names = ", ".join(
            f"{sent.start.name} of {meta.dtype_name(kind)}"
            for sent, kind in zip(self.sent.values(), kinds, strict=True)
        )
        return names or "the maxima of each rank"

    def emit(self, source: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.editor.emit(self.place, RULE, source, target, *args, **kwargs)

    def _rounded(self, value: fx.Node) -> fx.Node:
        """Return 16-bit values as they are in memory, and were sent. A compiler may otherwise join
        their producer with the operators, and skip the rounding."""
        dtype = fake(value).dtype
        if dtype not in (torch.bfloat16, torch.float16) or value.op != "call_function":
            return value
        return self.emit(value, BITS, self.emit(value, BITS, value, torch.int16), dtype)

    # --- computing ---

    def local(self, node: fx.Node) -> None:
        """Compute one value of the region on this rank's part."""
        shard = self.region.shards[node]
        source = rejoined_source(node)
        if source is not None:
            self.made[node] = self._made(source)
            return
        dim = shard.dim

        def given(each: fx.Node) -> fx.Node:
            return self._made(each) if each in self.region.first else self._fill(each, node, dim)

        args, kwargs = fx.map_arg((node.args, node.kwargs), given)
        target = node.target
        if dim is not None and (target in RESHAPES or target is aten.expand.default):
            sizes = list(fake(node).shape)
            whole = sizes[dim]
            fixed = self.region.even and isinstance(whole, int)
            sizes[dim] = whole // self.region.ranks if fixed else -1
            target = aten.reshape.default if target in RESHAPES else target
            args = (args[0], sizes)
        made = self.emit(node, target, *args, **kwargs)
        if is_extremum_of_parts(node, self.region.shards):
            made = self._extremum_of_all(node, made)
        self.made[node] = made

    def _made(self, node: fx.Node) -> fx.Node:
        return self.made[self.region.first[node]]

    def _fill(self, fill: fx.Node, user: fx.Node, dim: int | None) -> fx.Node:
        """Return a constant of a shape that fits one rank's part."""
        own = None if dim is None else dim - (fake(user).dim() - fake(fill).dim())
        own = own if own is not None and own >= 0 else None
        if (fill, own) not in self.fills:
            args = fill.args
            if own is not None:
                sizes = list(fake(fill).shape)
                sizes[own] = 1
                args = (sizes, *fill.args[1:])
            self.fills[fill, own] = self.emit(fill, fill.target, *args, **fill.kwargs)
        return self.fills[fill, own]

    def _extremum_of_all(self, node: fx.Node, local: fx.Node) -> fx.Node:
        """Return the maximum or minimum of the ranks' own ones. NaN on any rank gives NaN."""
        row = self.emit(node, aten.reshape.default, local, [1, *fake(local).shape])
        sent = _Sent.of(row, node, 0, self)
        rows = sent.received(self.place, self.editor)
        reduce = SMALLEST.get(node.target, aten.amax.default)
        return self.emit(node, reduce, rows, [0])

    # --- gathering ---

    def starts(self, parts: Sequence[fx.Node]) -> list[fx.Node]:
        """Start the gathers of some values."""
        for each in parts:
            dim = self.region.shards[each].dim
            assert dim is not None
            exact = self.region.nbytes(each) != self._values(each)
            self.sent[each] = _Sent.of(self.made[each], each, dim, self, floats=not exact)
        return [sent.start for sent in self.sent.values()]

    def _values(self, node: fx.Node) -> int:
        """Return the bytes of as many values of a node's dtype as were gathered."""
        wait = self.region.exchange.wait
        per_value = fake(node).dtype.itemsize
        return self.region.nbytes(wait) // fake(wait).dtype.itemsize * per_value

    def gathered(self, node: fx.Node) -> fx.Node:
        return self.sent[node].received(self.region.exchange.wait, self.editor)

    def replace(self, first: fx.Node, new: fx.Node) -> None:
        for node in self.region.members(first):
            if self.editor.lives(node):
                self.editor.replace(node, new)


@dataclass(frozen=True)
class _Sent:
    """A started gather of one value.

    ``source`` is the node that it replaces. ``dtype`` is that of the value, ``order`` are its
    dimensions as they are sent, and ``flat`` says that a last dimension of two bytes was added.
    """

    start: fx.Node
    source: fx.Node
    dtype: torch.dtype
    order: tuple[int, ...]
    flat: bool
    like: fx.Node

    @staticmethod
    def of(value: fx.Node, source: fx.Node, dim: int, move: _Move, *, floats: bool = False) -> _Sent:
        """Start the gather of a value, with the ranks' parts along ``dim``.

        Bits travel as integers, so that no codec of the policy changes scales and codes. ``floats``
        are sent as they are: they are as many as the values that the policy is for.
        """
        editor, given = move.editor, fake(value)
        order = (dim, *(each for each in range(given.dim()) if each != dim))
        if dim != 0:
            value = move.emit(source, aten.permute.default, value, list(order))
        value = (
            editor.contiguous(move.place, RULE, value)
            if meta.is_fixed(given)
            else editor.copy(move.place, RULE, source, value)
        )
        dtype, flat = given.dtype, False
        if dtype not in SENT_EVERYWHERE or (dtype.is_floating_point and not floats):
            flat = dtype.itemsize == 2 and given.dim() == 1
            if flat:
                value = move.emit(source, aten.unsqueeze.default, value, 1)
            value = move.emit(source, BITS, value, CARRIERS[dtype.itemsize])
        call = move.region.exchange.call
        start = editor.start(move.place, RULE, call, value)
        return _Sent(start, source, dtype, order, flat, call.node)

    def received(self, before: fx.Node, editor: Editor) -> fx.Node:
        """Wait for the gather, and return the gathered values."""

        def emit(source: fx.Node, target: Any, *args: Any) -> fx.Node:
            return editor.emit(before, RULE, source, target, *args)

        value = emit(self.like, torch.ops._c10d_functional.wait_tensor.default, self.start)
        if fake(value).dtype != self.dtype:
            value = emit(self.source, BITS, value, self.dtype)
        if self.flat:
            value = emit(self.source, aten.squeeze.dim, value, 1)
        if self.order != tuple(range(len(self.order))):
            back = [self.order.index(dim) for dim in range(len(self.order))]
            value = emit(self.source, aten.permute.default, value, back)
        return value
