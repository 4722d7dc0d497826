"""The values computed from a gathered or summed one, and the cheapest set of them to gather
instead."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from torch import fx

from commpass.passes.fx import lengths, meta
from commpass.passes.fx.ops import RESHAPES, SPLITS, aten, frozen, is_copy, reached
from commpass.passes.simplify.chains import rejoined_source
from commpass.passes.simplify.editor import Editor, Exchange, fake
from commpass.passes.simplify.shards import Parts, Shard, is_between, rounds_to_16_bits, shard_of
from commpass.plan import ROWS

LARGEST = 512
"""The maximum number of values that are followed from one gather, which keeps the pass linear."""
SAME_VALUES = (*RESHAPES, aten.alias.default, aten.detach.default)


@dataclass
class Region:
    """What is computed from the result of an exchange, and can be computed on a rank's part of it.

    ``shards`` has these nodes in graph order. ``first`` maps each to the first one with the same
    values, so that what a backward pass computes again is gathered once. ``joined`` are the waits
    of other exchanges that the values are computed from too.
    """

    exchange: Exchange
    ranks: int
    shards: dict[fx.Node, Shard]
    first: dict[fx.Node, fx.Node] = field(default_factory=dict)
    joined: dict[fx.Node, Exchange] = field(default_factory=dict)

    @property
    def sources(self) -> dict[fx.Node, Exchange]:
        """The exchanges that all values are computed from, by their waits."""
        return {self.exchange.wait: self.exchange} | self.joined

    @property
    def even(self) -> bool:
        """Whether all parts are equally long."""
        return self.exchange.call.splits is None

    def members(self, first: fx.Node) -> list[fx.Node]:
        """Return the nodes with the values of the first one."""
        return [node for node in self.shards if self.first[node] is first]

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the values of the region that a node is computed from."""
        source = rejoined_source(node)
        given = node.all_input_nodes if source is None else [source]
        return [self.first[each] for each in given if each in self.first]

    def needed_for(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the values from which others are computed, in graph order, without the results of
        the exchanges."""
        inputs = [source for node in nodes for source in self.inputs(node)]
        return sorted(reached(inputs, self.inputs) - self.sources.keys())

    def number_values(self) -> None:
        """Find ``first`` of each node."""
        known: dict[Any, fx.Node] = {}
        for node in self.shards:
            self.first[node] = known.setdefault(_key(node, self), node)

    def leaves(self, node: fx.Node) -> bool:
        """Whether something outside the region uses a value."""
        return any(user not in self.shards for user in consumers(node))

    def nbytes(self, node: fx.Node) -> int:
        """Return the bytes of a value on all ranks together, as all of them know it: for unequal
        parts, and sizes that are known when the graph runs, that of an assumed number of rows."""
        value = fake(node)
        sizes = [meta.hint(size) for size in value.shape]
        dim = self.shards[node].dim
        if dim is not None and not self.even:
            sizes[dim] = None
        known = (self.ranks * ROWS if size is None else size for size in sizes)
        return math.prod(known) * value.dtype.itemsize


def consumers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what uses a value. Parts that are only joined again along another dimension are not
    seen on the way."""
    for user in node.users:
        if user.target in SPLITS:
            behind = {each for item in user.users for each in item.users}
            whole = next(iter(behind)) if len(behind) == 1 else None
            yield whole if whole is not None and rejoined_source(whole) is node else user
        else:
            yield user


def region_of(exchange: Exchange, editor: Editor, in_16_bits: bool) -> Region | None:
    """Return the region behind a gather; None if something needs the gathered value itself.

    ``in_16_bits``: nodes that round their results to 16 bits are in it.
    """
    ranks, wait = editor.size(exchange.call), exchange.wait
    shards = {wait: Shard(0)}
    common = lengths.symbols(fake(wait).shape)

    def is_common(size: Any) -> bool:
        return lengths.symbols([size]) <= common and editor.lengths.can_compute(size)

    parts = Parts(ranks, exchange.call.splits is None, is_common)

    def found(node: fx.Node) -> Shard | None:
        shard = None if node in editor.changing else shard_of(node, shards, parts)
        return None if shard and not in_16_bits and rounds_to_16_bits(node) else shard

    needed = set(consumers(wait))
    heap = sorted(needed)
    if ranks < 2:
        return None
    while heap and len(shards) < LARGEST:
        node = heapq.heappop(heap)
        if node in shards:
            continue
        if (shard := found(node)) is not None:
            shards[node] = shard
            for user in consumers(node):
                heapq.heappush(heap, user)
        elif node in needed:
            return None
    if not needed or not needed <= shards.keys():
        return None
    region = Region(exchange, ranks, shards)
    region.number_values()
    return region


def _key(node: fx.Node, region: Region) -> Any:
    """Return a key that equal values share. Copies, and views of the same shape, keep values."""
    source = node.args[0]
    if isinstance(source, fx.Node) and source in region.first and _keeps_values(node):
        return _key(region.first[source], region)
    return node.target, *(
        frozen(given, lambda each: region.first.get(each, each))
        for given in (node.args, node.kwargs)
    )


def _keeps_values(node: fx.Node) -> bool:
    """Whether a node is a copy, or a view of the same shape."""
    if node.target not in SAME_VALUES:
        return is_copy(node)
    return str(fake(node.all_input_nodes[0]).shape) == str(fake(node).shape)


def cheapest_cut(region: Region) -> list[fx.Node]:
    """Return the values to gather, of those that nothing outside needs the inputs of, with the
    fewest bytes in all. Of several such sets, the one nearest to the exchanges.

    This is a minimum cut: values are edges with their bytes as capacities. What is equal on all
    ranks costs nothing.
    """
    network, sources = nx.DiGraph(), region.sources
    network.add_node("outside")
    for node in region.shards:
        first = region.first[node]
        if node is first:
            cost = _cost(node, region)
            network.add_edge((node, 0), (node, 1), **({} if cost is None else {"capacity": cost}))
            for source in region.inputs(node) if node not in sources else []:
                network.add_edge((source, 1), (node, 0))
        if region.leaves(node):
            network.add_edge((first, 1), "outside")
    start = "exchanges"
    network.add_edges_from((start, (wait, 0)) for wait in sources)
    rest = nx.algorithms.flow.edmonds_karp(network, start, "outside")
    near: set[Any] = {start}
    left: list[Any] = [start]
    while left:
        for to, edge in rest.adj[left.pop()].items():
            if edge["flow"] < edge["capacity"] and to not in near:
                near.add(to)
                left.append(to)
    return [
        node
        for node in region.shards
        if region.first[node] is node and (node, 0) in near and (node, 1) not in near
    ]


def _cost(node: fx.Node, region: Region) -> int | None:
    """Return the bytes to gather a value; None if it cannot be gathered with the same bits, or is
    several tensors."""
    shard, value = region.shards[node], meta.tensor(node)
    if value is None or shard.zero_sign or is_between(node):
        return None
    return 0 if shard.dim is None else region.nbytes(node)
