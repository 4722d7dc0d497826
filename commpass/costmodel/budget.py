"""One choice for each of several places: the cheapest whose losses add up to no more than a budget.

A multiple-choice knapsack. All mixes that no other beats in both cost and loss are made place by
place, as far as there are not too many, and whatever the budget is; it only says which of them is
taken. So a larger budget never costs more. Plain numbers: no codecs, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST = 2048
"""Mixes of some places that are remembered beside those on the convex hull."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Option:
    """What may be chosen at a place: what it costs (bytes or microseconds) and what it loses (a
    share of a squared error). Both are finite and at least 0."""

    cost: float
    loss: float


@dataclass(frozen=True)
class Mix:
    """The number of the option that is chosen at each place, and the sums."""

    chosen: tuple[int, ...]
    cost: float
    loss: float


def cheapest(places: Sequence[Sequence[Option]], budget: float, limit: int = MOST) -> Mix | None:
    """The mix of least cost whose losses add up to at most ``budget``; None if there is none. Of
    those that cost the same, one of least loss.

    It is the best one if no more than ``limit`` mixes were worth remembering anywhere, and never
    worse than the best mix on the convex hull (that of a Lagrangian relaxation). The same numbers
    in the same order give the same mix, everywhere.
    """
    layers: list[tuple[Ints, Ints]] = []
    cost, loss = np.zeros(1), np.zeros(1)
    for options in places:
        costs = np.array([each.cost for each in options], dtype=np.float64)
        losses = np.array([each.loss for each in options], dtype=np.float64)
        all_costs, all_losses = cost[:, None] + costs, loss[:, None] + losses
        kept = _worthwhile(all_costs.ravel(), all_losses.ravel(), limit)
        layers.append((kept // len(options), kept % len(options)))
        cost, loss = all_costs.ravel()[kept], all_losses.ravel()[kept]
    fits = np.flatnonzero(loss <= budget)
    if not fits.size:
        return None
    at = int(fits[0])  # by ascending cost
    chosen, place = [], at
    for before, option in reversed(layers):
        chosen.append(int(option[place]))
        place = int(before[place])
    return Mix(tuple(reversed(chosen)), float(cost[at]), float(loss[at]))


def _worthwhile(cost: Floats, loss: Floats, limit: int) -> Ints:
    """The numbers of the points that no other beats, by ascending cost and descending loss; if
    there are more than ``limit``, those on the convex hull and every so many of the others."""
    order = np.lexsort((loss, cost))
    least = np.minimum.accumulate(loss[order])
    better = np.concatenate(([True], loss[order][1:] < least[:-1]))
    front: Ints = order[better]
    if len(front) <= limit:
        return front
    every = -(-len(front) // limit)
    keep = set(range(0, len(front), every)) | {len(front) - 1}
    keep |= set(_hull(cost[front].tolist(), loss[front].tolist()))
    return front[np.array(sorted(keep), dtype=np.int64)]


def _hull(cost: Sequence[float], loss: Sequence[float]) -> list[int]:
    """The corners of the lower convex hull of points by ascending cost
    (Andrew, 1979: monotone chain)."""
    found: list[int] = []
    for point in range(len(cost)):
        while len(found) > 1:
            a, b = found[-2:]
            left = (cost[b] - cost[a]) * (loss[point] - loss[a])
            if left > (loss[b] - loss[a]) * (cost[point] - cost[a]):
                break
            found.pop()
        found.append(point)
    return found
