"""Builds the chunks of a region in the graph: one copy of each node per chunk, joined where the
whole is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from commpass.passes.chunk.region import Join, Region
from commpass.passes.fx import meta
from commpass.passes.fx.erase import erase
from commpass.passes.fx.marks import ALLOWED
from commpass.passes.fx.ops import RESHAPES, aten
from commpass.passes.fx.rowwise import Axis
from commpass.passes.fx.splice import insert


@dataclass
class Built:
    """The chunks of a region, beside the nodes that they replace. The caller must then call either
    ``undo`` or ``finish``.

    ``starts`` are the exchanges, and ``joins`` the nodes that join chunks. ``old`` are the nodes
    that lose all users.
    """

    starts: tuple[fx.Node, ...] = ()
    joins: dict[fx.Node, Join] = field(default_factory=dict)
    new: list[fx.Node] = field(default_factory=list)
    old: list[fx.Node] = field(default_factory=list)
    taken: list[tuple[fx.Node, fx.Node, fx.Node]] = field(default_factory=list)
    moved: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    def undo(self) -> None:
        """Restore the graph."""
        for user, node, joined in self.taken:
            user.replace_input_with(joined, node)
        for node, following in reversed(self.moved):
            following.prepend(node)
        for node in reversed(self.new):
            erase(node)

    def finish(self) -> None:
        """Erase the replaced nodes."""
        for node in reversed(self.old):
            erase(node)


def joined_of(region: Region) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Return the nodes whose chunks are joined because others need the whole, and the views of
    joined nodes that stay unchanged."""
    members = {region.wait, *region.consumers}
    joined: list[fx.Node] = []
    views: list[fx.Node] = []
    for node in reversed((region.wait, *region.consumers)):
        if any(user not in members or user in views for user in node.users):
            (views if node.target in RESHAPES else joined).append(node)
    return tuple(reversed(joined)), tuple(reversed(views))


def build(graph: fx.Graph, region: Region, joins: Mapping[fx.Node, Join]) -> Built:
    """Insert the chunks of a region, each at the place of its node, and the product at the start of
    the exchange.

    ``joins`` are those of earlier regions.
    """
    work = _Work(region, joins)
    joined, views = joined_of(region)
    place: dict[fx.Node, float] = {node: number for number, node in enumerate(graph.nodes)}
    chunks = range(region.chunks)
    for number in chunks:
        for node in (*region.product.nodes, region.start):
            work.chunk(node, number, before=region.start)
    work.built.starts = tuple(work.chunks[region.start])
    for node in (region.wait, *region.consumers):
        for number in chunks:
            work.chunk(node, number, before=node)
    members = {region.wait, *region.consumers}
    inside = members.difference(views)
    for node in views:
        user = min((user for user in node.users if user not in inside), key=place.__getitem__)
        work.built.moved.append((node, node.next))
        if user.op == "output":  # as early as possible, to save memory
            last = work.last(node.all_input_nodes[0], inside, place)
            last.append(node)
            place[node] = place[last] + 0.5
        else:
            user.prepend(node)
            place[node] = place[user]
    for node in joined:
        work.join(node, inside, place)
    old = {*region.product.nodes, region.start, *inside}
    for node, join in joins.items():
        if all(user in old for user in node.users):
            old.update(join.nodes)
    work.built.old = [node for node in graph.nodes if node in old]
    return work.built


@dataclass
class _Work:
    region: Region
    joins: Mapping[fx.Node, Join]
    built: Built = field(default_factory=Built)
    chunks: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    slices: dict[tuple[fx.Node, Axis, int], fx.Node] = field(default_factory=dict)

    def chunk(self, node: fx.Node, number: int, before: fx.Node) -> None:
        """Insert one chunk of a node of the region."""
        made = self.chunks.setdefault(node, [])
        if node in self.joins:  # a matmul that is already cut
            made.append(self.joins[node].chunks[number])
            return
        rows = self.region.rows[node]
        args = [
            fx.map_arg(each, partial(self.part, axis=axis, number=number, before=before))
            for each, axis in zip(node.args, (*rows.takes, *[None] * len(node.args)), strict=False)
        ]
        target = node.target
        if target in RESHAPES:
            target, args = aten.reshape.default, [args[0], self.shape(node, rows.axis, number)]
        elif target == aten.split.Tensor and rows.takes[0] != rows.axis:  # into the blocks
            args[1] = self.shape(node, rows.axis, number)[rows.axis.dim]
        made.append(self.emit(before, node, target, *args, **node.kwargs))
        if node is self.region.start:
            made[-1].meta[ALLOWED] = dict(node.meta.get(ALLOWED, {}))

    def shape(self, node: fx.Node, axis: Axis, number: int) -> list[int]:
        """Return the shape of a chunk of a node, or of its first result."""
        ends = self.region.cut(node, axis)
        sizes = list(next(iter(meta.tensors(node.meta["val"]))).shape)
        sizes[axis.dim] = axis.blocks * (ends[number + 1] - ends[number])
        return sizes

    def part(self, node: fx.Node, axis: Axis | None, number: int, before: fx.Node) -> fx.Node:
        """Return the part of a node that a chunk uses."""
        if node in self.chunks:
            return self.chunks[node][number]
        if axis is None:
            return node
        ends = self.region.cut(node, axis)
        join = self.joins.get(node)
        if join is not None and (join.axis, join.ends) == (axis, ends):
            return join.chunks[number]
        key = (node, axis, number)
        if key not in self.slices:
            begin, end = ends[number], ends[number + 1]
            (blocks,) = self.split_blocks([node], axis, before, node)
            dim = axis.dim + (axis.blocks > 1)
            part = self.emit(before, node, aten.slice.Tensor, blocks, dim, begin, end)
            self.slices[key] = self.merge_blocks(part, axis, before, node)
        return self.slices[key]

    def split_blocks(
        self, nodes: Sequence[fx.Node], axis: Axis, before: fx.Node, source: fx.Node
    ) -> list[fx.Node]:
        """Reshape tensors so that their blocks have a dimension, if there are several."""
        if axis.blocks == 1:
            return list(nodes)
        made = []
        for node in nodes:
            sizes = list(node.meta["val"].shape)
            sizes[axis.dim : axis.dim + 1] = [axis.blocks, sizes[axis.dim] // axis.blocks]
            made.append(self.emit(before, source, aten.reshape.default, node, sizes))
        return made

    def merge_blocks(self, node: fx.Node, axis: Axis, before: fx.Node, source: fx.Node) -> fx.Node:
        """Remove the dimension of blocks from a tensor."""
        if axis.blocks == 1:
            return node
        sizes = list(node.meta["val"].shape)
        sizes[axis.dim : axis.dim + 2] = [axis.blocks * sizes[axis.dim + 1]]
        return self.emit(before, source, aten.reshape.default, node, sizes)

    def last(self, node: fx.Node, inside: set[fx.Node], place: Mapping[fx.Node, float]) -> fx.Node:
        """Return the last user of a node in chunks, or the node itself."""
        return max([node, *(user for user in node.users if user in inside)], key=place.__getitem__)

    def join(self, node: fx.Node, inside: set[fx.Node], place: Mapping[fx.Node, float]) -> None:
        """Join the chunks of a node for users that are not in chunks.

        They are joined after their last use by a chunk, or earlier if a user needs the whole. The
        data thus exists twice for the shortest time.
        """
        users = [user for user in node.users if user not in inside]
        first = min(users, key=place.__getitem__)
        last = self.last(node, inside, place)
        before = first if place[first] <= place[last] else last.next
        axis, parts = self.region.rows[node].axis, self.chunks[node]
        earlier = len(self.built.new)
        blocks = self.split_blocks(parts, axis, before, node)
        dim = axis.dim + (axis.blocks > 1)
        joined = self.emit(before, node, aten.cat.default, blocks, dim)
        joined = self.merge_blocks(joined, axis, before, node)
        nodes = tuple(self.built.new[earlier:])
        ends = self.region.cut(node, axis)
        self.built.joins[joined] = Join(tuple(parts), self.region.bounds, axis, ends, nodes)
        for user in users:
            user.replace_input_with(node, joined)
            self.built.taken.append((user, node, joined))

    def emit(
        self, before: fx.Node, source: fx.Node, target: Any, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Insert a node with its fake value."""
        node = insert(before, source, target, *args, **kwargs)
        self.built.new.append(node)
        return node
