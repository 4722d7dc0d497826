"""Bounds the extra memory that simplify rules hold at each place of a graph.

A rank cannot use the free memory of its own graph as a criterion: it depends on the batch, so ranks
would decide differently. Every place therefore counts as the peak, and only inputs and outputs of
collectives are counted, whose sizes all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

BLOCK = 128
"""Places that are summarized together, so that long intervals are cheap."""


@dataclass
class MemoryBudget:
    """The extra bytes that rules hold at each place.

    ``place`` numbers the nodes, and ``kept`` has the extra bytes at each place. ``largest`` is the
    largest tensor that a rule has merged. ``most`` is the maximum in each block of places, and
    ``more`` the bytes that all of a block's places share.
    """

    place: dict[fx.Node, int]
    kept: list[int]
    most: list[int]
    more: list[int]
    largest: int = 0

    def may_extend(self, first: fx.Node, last: fx.Node, nbytes: int, merged: int) -> bool:
        """Reserve ``nbytes`` between two nodes and return True, if no place then exceeds the
        largest tensor ``merged`` so far."""
        if nbytes <= 0:
            return True
        start, end = sorted((self.place[first], self.place[last]))
        largest = max(self.largest, merged)
        if start < end:
            if self._peak(start, end) + nbytes > largest:
                return False
            self._add(start, end, nbytes)
        self.largest = largest
        return nbytes <= largest

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (block, from, to, whether it is the whole block) for the blocks of an interval."""
        for block in range(start // BLOCK, (end - 1) // BLOCK + 1):
            low, high = max(start, block * BLOCK), min(end, (block + 1) * BLOCK)
            yield block, low, high, high - low == BLOCK

    def _peak(self, start: int, end: int) -> int:
        return max(
            self.most[block] if whole else max(self.kept[low:high]) + self.more[block]
            for block, low, high, whole in self._pieces(start, end)
        )

    def _add(self, start: int, end: int, nbytes: int) -> None:
        for block, low, high, whole in self._pieces(start, end):
            if whole:
                self.more[block] += nbytes
                self.most[block] += nbytes
            else:
                self.kept[low:high] = [n + nbytes for n in self.kept[low:high]]
                most = max(self.kept[low:high]) + self.more[block]
                self.most[block] = max(self.most[block], most)


def initial_budget(graph: fx.Graph) -> MemoryBudget:
    place = {node: number for number, node in enumerate(graph.nodes)}
    blocks = len(place) // BLOCK + 1
    return MemoryBudget(place, [0] * (blocks * BLOCK), [0] * blocks, [0] * blocks)
