"""How many bytes live at each place of a graph: so that a rule that keeps a tensor for longer does not raise the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from commpass.passes import meta
from commpass.passes.simplify.values import Memory

BLOCK = 128
"""Places that are looked at together, so that a long interval costs little."""


@dataclass
class Liveness:
    """``live`` bytes after each node in order, the ``place`` of each node, the peak, and the largest tensor that a rule has
    merged. ``most`` is the most that lives in each block of places, ``more`` what came to all places of a block."""

    place: dict[fx.Node, int]
    live: list[int]
    most: list[int]
    more: list[int]
    peak: int
    largest: int = 0

    def hold(self, first: fx.Node, last: fx.Node, nbytes: int, merged: int) -> bool:
        """Whether so many bytes more may live from one node to another: the peak must not rise by more than the largest tensor
        ``merged``. Nodes made since the graph was looked at have no place: then not."""
        if nbytes <= 0:
            return True
        start, end = self.place.get(first), self.place.get(last)
        if start is None or end is None:
            return False
        start, end, largest = min(start, end), max(start, end) + 1, max(self.largest, merged)
        if self._most(start, end) + nbytes > self.peak + largest:
            return False
        self._add(start, end, nbytes)
        self.largest = largest
        return True

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int, bool]]:
        """(block, from, to, whether that is all of it) of the blocks of an interval."""
        for block in range(start // BLOCK, (end - 1) // BLOCK + 1):
            low, high = max(start, block * BLOCK), min(end, (block + 1) * BLOCK)
            yield block, low, high, high - low == BLOCK

    def _most(self, start: int, end: int) -> int:
        return max(
            self.most[block] if whole else max(self.live[low:high]) + self.more[block]
            for block, low, high, whole in self._pieces(start, end)
        )

    def _add(self, start: int, end: int, nbytes: int) -> None:
        for block, low, high, whole in self._pieces(start, end):
            if whole:
                self.more[block] += nbytes
                self.most[block] += nbytes
            else:
                self.live[low:high] = [n + nbytes for n in self.live[low:high]]
                self.most[block] = max(self.most[block], max(self.live[low:high]) + self.more[block])


def liveness(graph: fx.Graph, memory: Memory) -> Liveness:
    """Every tensor lives from the node that makes it to the last one that takes it, or a view of it. Linear."""
    roots, _ = memory
    place = {node: number for number, node in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node, number in place.items():
        for taken in (node, *node.all_input_nodes):
            last[roots[taken]] = number
    change = [0] * (len(place) + 1)
    for root, end in last.items():
        value = meta.tensor(root)
        size = max(meta.nbytes(value), 0) if value is not None else 0
        change[place[root]] += size
        change[end + 1] -= size
    live = list(accumulate(change[:-1]))
    most = [max(live[start : start + BLOCK]) for start in range(0, len(live), BLOCK)]
    return Liveness(place, live, most, [0] * len(most), max(live, default=0))
