"""Eager selection from one row in CPU memory, with as few passes over it as its values allow.

``select`` uses plain aten operations that do the same passes for all values, so that it can be
compiled, and it needs dozens of counts. Here counts can be read, and most of them are not needed:
if few entries reach a threshold, they are extracted and further counts use only these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from commpass.codecs.sparse.measure import AtenStatistics, infinity, magnitude_bits
from commpass.codecs.sparse.select import (
    Bounds,
    Density,
    RandomK,
    Selection,
    Selector,
    TopK,
    bounds,
    select,
)

FEW = 8
"""Entries are extracted from a row if at most one in this many reaches the threshold."""


def select_eagerly(selector: Selector, row: Tensor, density: Density) -> Selection:
    """Return the result of ``select`` for one row ``[1, n]`` on a CPU. It reads values, so it
    cannot be traced."""
    if isinstance(selector, (TopK, RandomK)):
        return select(selector, row, density)
    statistics = _Row(row, magnitude_bits(row))
    return statistics.between(bounds(selector, statistics, density), density.slots(row.shape[1]))


@dataclass(frozen=True)
class _Entries:
    """All entries of a row that reach the threshold ``least``: their positions, ascending, and
    their bit patterns."""

    least: int
    places: Tensor
    bits: Tensor


@dataclass(frozen=True)
class _Row(AtenStatistics):
    """Statistics of one row. ``few`` holds at most one element: the entries extracted last."""

    few: list[_Entries] = field(default_factory=list)

    @cached_property
    def _largest(self) -> Tensor:
        return self.bits.amax(-1, keepdim=True)

    @property
    def _finite(self) -> bool:
        return int(self._largest) < infinity(self.bits)

    def peak(self) -> Tensor:
        return self._largest if self._finite else super().peak()

    def nonfinite(self) -> Tensor:
        return torch.tensor([[0 if self._finite else self._count(infinity(self.bits))]])

    def counts(
        self, thresholds: Tensor, unless: Tensor | None = None, enough: int | None = None
    ) -> Tensor:
        if unless is not None and bool(unless):
            return torch.zeros_like(thresholds, dtype=torch.int64)
        given = thresholds.flatten().tolist()
        if enough is None and (few := self._extract(min(given))) is not None:
            below = torch.searchsorted(few.bits.sort().values, thresholds.flatten())
            return (len(few.bits) - below).unsqueeze(0)
        found: list[int] = []
        for one in given:
            known = bool(found) and enough is not None and found[-1] >= enough
            found.append(found[-1] if known else self._count(one))
        return torch.tensor([found])

    def between(self, bounds: Bounds, k: int) -> Selection:
        """Return the entries within bounds as ascending indices."""
        low, high, room = int(bounds.low), int(bounds.high), int(bounds.room)
        few = self._entries_from(low)
        sure = few.places[few.bits >= high]
        maybe = few.places[(few.bits >= low) & (few.bits < high)]
        found = torch.cat([sure[:k], maybe[:room]]).sort().values[:k]
        rest = found.new_full((k - len(found),), self.entries)
        indices = torch.cat([found, rest]).unsqueeze(0)
        return Selection(indices, torch.tensor([len(found)]), bounds.lost)

    def _count(self, threshold: int) -> int:
        return int(torch.count_nonzero(self.bits >= threshold))

    def _extract(self, threshold: int) -> _Entries | None:
        """Return the entries that reach a threshold if they are a small part of the row, else
        None."""
        if self.few and self.few[0].least <= threshold:
            return self.few[0]
        return (
            self._entries_from(threshold) if self._count(threshold) * FEW <= self.entries else None
        )

    def _entries_from(self, threshold: int) -> _Entries:
        """Return the entries that reach a threshold."""
        if self.few and self.few[0].least <= threshold:
            few = self.few[0]
            reached = few.bits >= threshold
            return (
                few
                if few.least == threshold
                else _Entries(threshold, few.places[reached], few.bits[reached])
            )
        places = torch.nonzero(self.bits[0] >= threshold).squeeze(1)
        few = _Entries(threshold, places, self.bits[0][places])
        self.few[:] = [few]
        return few
