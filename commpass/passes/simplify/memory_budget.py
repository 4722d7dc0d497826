"""How many bytes more the rules keep at each place of a graph: so that what they keep for longer
does not fill the memory.

A rank cannot ask where its own graph has room: what lives there depends on its batch, and another
rank would decide otherwise. So the graph is taken to be at its peak everywhere, and only tensors
that collectives take or give are counted, whose sizes all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

BLOCK = 128
"""Places that are looked at together, so that a long interval costs little."""


@dataclass
class MemoryBudget:
    """The ``place`` of each node, the bytes that are kept at each place beyond what was, and the
    ``largest`` tensor that a rule has merged. ``most`` is the most that is kept in each block of
    places, ``more`` what is kept at all of its places."""

    place: dict[fx.Node, int]
    kept: list[int]
    most: list[int]
    more: list[int]
    largest: int = 0

    def may_extend(self, first: fx.Node, last: fx.Node, nbytes: int, merged: int) -> bool:
        """Whether so many bytes more may be kept from one node up to another: at no place may there
        be more of them than the largest tensor ``merged``."""
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
        """(block, from, to, whether that is all of it) of the blocks of an interval."""
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
