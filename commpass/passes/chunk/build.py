"""Chunks of rows in the graph: each node of a region once for each chunk, joined where others take
the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from commpass.passes.allowed import ALLOWED
from commpass.passes.chunk.region import Region
from commpass.passes.graph import meta
from commpass.passes.graph.fakes import mode_of
from commpass.passes.graph.rowwise import VIEWS

aten = torch.ops.aten


@dataclass(frozen=True)
class Join:
    """What a ``cat`` of ours joins: the chunks of a node, which have the rows between ``bounds``
    and were cut along ``dim`` at ``ends``."""

    chunks: tuple[fx.Node, ...]
    bounds: tuple[int, ...]
    dim: int
    ends: tuple[int, ...]


@dataclass
class Built:
    """The chunks of a region, beside what they stand for. Either ``undo`` or ``finish`` comes next.

    ``starts`` are the exchanges, ``joins`` the nodes that join chunks. ``old`` are the nodes that
    nobody takes any more.
    """

    starts: tuple[fx.Node, ...] = ()
    joins: dict[fx.Node, Join] = field(default_factory=dict)
    new: list[fx.Node] = field(default_factory=list)
    old: list[fx.Node] = field(default_factory=list)
    taken: list[tuple[fx.Node, fx.Node, fx.Node]] = field(default_factory=list)
    moved: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    def undo(self) -> None:
        """The graph as it was."""
        for user, node, joined in self.taken:
            user.replace_input_with(joined, node)
        for node, following in reversed(self.moved):
            following.prepend(node)
        for node in reversed(self.new):
            node.graph.erase_node(node)

    def finish(self) -> None:
        """Erases what the chunks stand for."""
        for node in reversed(self.old):
            node.graph.erase_node(node)


def joined_of(region: Region) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """The nodes whose chunks are joined, since others take the whole, and the views that stay as
    they are, of what is joined."""
    members = {region.wait, *region.consumers}
    joined: list[fx.Node] = []
    views: list[fx.Node] = []
    for node in reversed((region.wait, *region.consumers)):
        if any(user not in members or user in views for user in node.users):
            (views if node.target in VIEWS else joined).append(node)
    return tuple(reversed(joined)), tuple(reversed(views))


def build(graph: fx.Graph, region: Region, joins: Mapping[fx.Node, Join]) -> Built:
    """Puts the chunks of a region into a graph, each where the node is that it is a part of; the
    product where the exchange starts. ``joins`` are those of the regions before."""
    work = _Work(graph, region, joins, mode_of(graph))
    joined, views = joined_of(region)
    place = {node: number for number, node in enumerate(graph.nodes)}
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
        user.prepend(node)
        place[node] = place[user]
    for node in joined:
        work.join(node, inside, place)
    old = {*region.product.nodes, region.start, *inside}
    old |= {node for node in joins if all(user in old for user in node.users)}
    work.built.old = [node for node in graph.nodes if node in old]
    return work.built


@dataclass
class _Work:
    graph: fx.Graph
    region: Region
    joins: Mapping[fx.Node, Join]
    mode: Any
    built: Built = field(default_factory=Built)
    chunks: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    slices: dict[tuple[fx.Node, int, int], fx.Node] = field(default_factory=dict)

    def chunk(self, node: fx.Node, number: int, before: fx.Node) -> None:
        """One chunk of a node of the region."""
        made = self.chunks.setdefault(node, [])
        if node in self.joins:  # a matmul that is cut already
            made.append(self.joins[node].chunks[number])
            return
        rows = self.region.rows[node]
        args = [
            self.part(each, dim, number, before) if isinstance(each, fx.Node) else each
            for each, dim in zip(node.args, (*rows.takes, *[None] * len(node.args)), strict=False)
        ]
        if node.target in VIEWS:
            args = [args[0], self.shape(node, rows.dim, number)]
        target = aten.reshape.default if node.target in VIEWS else node.target
        made.append(self.emit(before, node, target, *args, **node.kwargs))
        if node is self.region.start:
            made[-1].meta[ALLOWED] = dict(node.meta.get(ALLOWED, {}))

    def shape(self, node: fx.Node, dim: int, number: int) -> list[int]:
        """The shape of a chunk of a node."""
        ends = self.region.cut(node, dim)
        sizes = list(node.meta["val"].shape)
        sizes[dim] = ends[number + 1] - ends[number]
        return sizes

    def part(self, node: fx.Node, dim: int | None, number: int, before: fx.Node) -> fx.Node:
        """What a chunk takes of a node."""
        if node in self.chunks:
            return self.chunks[node][number]
        if dim is None:
            return node
        ends = self.region.cut(node, dim)
        join = self.joins.get(node)
        if join is not None and (join.dim, join.ends) == (dim, ends):
            return join.chunks[number]
        key = (node, dim, number)
        if key not in self.slices:
            begin, end = ends[number], ends[number + 1]
            self.slices[key] = self.emit(before, node, aten.slice.Tensor, node, dim, begin, end)
        return self.slices[key]

    def join(self, node: fx.Node, inside: set[fx.Node], place: Mapping[fx.Node, int]) -> None:
        """Lets those that are not in chunks take the chunks of a node as one. They are joined when
        no chunk takes them any more, or somebody needs the whole: so they are there twice for as
        short as can be."""
        users = [user for user in node.users if user not in inside]
        first = min(users, key=place.__getitem__)
        last = max([node, *(user for user in node.users if user in inside)], key=place.__getitem__)
        before = first if place[first] <= place[last] else last.next
        dim, parts = self.region.rows[node].dim, self.chunks[node]
        joined = self.emit(before, node, aten.cat.default, parts, dim)
        ends = self.region.cut(node, dim)
        self.built.joins[joined] = Join(tuple(parts), self.region.bounds, dim, ends)
        for user in users:
            user.replace_input_with(node, joined)
            self.built.taken.append((user, node, joined))

    def emit(
        self, before: fx.Node, source: fx.Node, target: Any, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """A new node with its fake value."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        self.built.new.append(node)
        meta.carry(source, node)
        values, named = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        with torch.no_grad(), self.mode:
            node.meta["val"] = target(*values, **named)
        return node
