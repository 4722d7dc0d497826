"""Choose one option for each of several places: the cheapest choice whose losses add up to at most
a budget.

This is a multiple-choice knapsack. All mixes that are not dominated in both cost and loss are built
place by place, up to a limit on their number. The budget only selects one of them, so a larger
budget never costs more. Plain numbers, without codecs or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST = 2048
"""The number of mixes kept after each place, in addition to those on the convex hull."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Option:
    """An option of a place: its cost (bytes or microseconds) and its loss (a share of a squared
    error). Both are finite and at least 0."""

    cost: float
    loss: float


@dataclass(frozen=True)
class Mix:
    """The number of the option chosen at each place, and the sums."""

    chosen: tuple[int, ...]
    cost: float
    loss: float


def cheapest(places: Sequence[Sequence[Option]], budget: float, limit: int = MOST) -> Mix | None:
    """Return the mix of least cost whose losses add up to at most ``budget``; None if there is
    none. Of mixes with equal cost, one of least loss is returned.

    The result is optimal if never more than ``limit`` mixes had to be kept. It is never worse than
    the best mix on the convex hull (that of a Lagrangian relaxation). The same numbers in the same
    order give the same mix on every machine.
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
    at = int(fits[0])  # sorted by cost
    chosen, place = [], at
    for before, option in reversed(layers):
        chosen.append(int(option[place]))
        place = int(before[place])
    return Mix(tuple(reversed(chosen)), float(cost[at]), float(loss[at]))


def _worthwhile(cost: Floats, loss: Floats, limit: int) -> Ints:
    """Return the indices of the points that no other dominates, by ascending cost and descending
    loss. If there are more than ``limit``, return those on the convex hull and every n-th of the
    others."""
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
    """Return the corners of the lower convex hull of points sorted by cost (Andrew, 1979: monotone
    chain)."""
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
