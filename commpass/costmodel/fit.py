"""Fit alpha and beta to measured times of exchanges, with as few regions of sizes as possible.

The time of a collective is modeled as ``alpha * messages + sent / beta``, for ``messages``
consecutive messages and ``sent`` bytes that leave a rank (links.py). The sum of relative errors is
minimized: small exchanges have the same weight as large ones, and a size that was measured while
the machine was busy does not draw the line to itself, as it would with squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

from commpass.costmodel.links import Region
from commpass.errors import ProfileError

CLOSE = 0.05
"""A region is not divided further if the relative error of its worst point is below this."""
BETTER = 0.7
"""The factor by which one more region must reduce the error of the worst point."""
MOST_REGIONS = 4
LEAST_POINTS = 2
"""The fewest sizes in all, since alpha and beta are two unknowns."""
REGION_POINTS = 3
"""The fewest points of one of several regions: a line through two would be that of their noise."""


@dataclass(frozen=True)
class Point:
    """One measured size: ``sent`` bytes left a rank in ``messages`` consecutive messages, and it
    took ``us`` microseconds (a median)."""

    messages: int
    sent: float
    us: float


@dataclass(frozen=True)
class Line:
    """``us = alpha * messages + ns * sent / 1000``, and the relative error of the worst point."""

    alpha_us: float
    ns_a_byte: float
    worst: float

    def time_us(self, point: Point) -> float:
        return self.alpha_us * point.messages + self.ns_a_byte * point.sent / 1e3


def regions(points: Sequence[Point]) -> tuple[Region, ...]:
    """Return regions of sizes, each with its alpha and beta, from measured points of one kind.

    There are as few regions as bring every point within ``CLOSE``, and at most ``MOST_REGIONS``.
    Raises ProfileError for fewer than two sizes, or times that are not above 0.
    """
    ordered = _growing(points)
    sizes = {point.sent for point in ordered}
    if len(sizes) < LEAST_POINTS:
        raise ProfileError(
            f"alpha and beta need times of at least {LEAST_POINTS} sizes, not {len(sizes)}"
        )
    cuts = _cuts(ordered)
    found = []
    for first, last in zip(cuts, [*cuts[1:], len(ordered)], strict=True):
        line = _line(ordered[first:last])
        begin = ordered[first].sent if first else 0.0
        rate = 1 / line.ns_a_byte if line.ns_a_byte > 0 else FASTEST
        found.append(Region(begin, line.alpha_us, rate))
    return tuple(found)


def _growing(points: Sequence[Point]) -> list[Point]:
    """Return the points by size, with times that do not decrease: a point slower than a larger one
    is averaged with it. Otherwise noise would create regions."""
    runs: list[list[Point]] = []
    for point in sorted(points, key=lambda each: each.sent):
        if not 0 < point.us < inf or not 0 <= point.sent < inf:
            raise ProfileError(f"{point.us} us for {point.sent} bytes: no time that can be")
        runs.append([point])
        while len(runs) > 1 and _mean(runs[-1]) < _mean(runs[-2]):
            last = runs.pop()
            runs[-1] += last
    return [replace(point, us=_mean(run)) for run in runs for point in run]


def _mean(points: Sequence[Point]) -> float:
    return sum(point.us for point in points) / len(points)


FASTEST = 1e6
"""GB/s of a region whose times do not grow with size."""


def _cuts(points: Sequence[Point]) -> list[int]:
    """Return where regions begin: the fewest that fit, and of these, those with the least worst
    error."""
    best: dict[tuple[int, int], tuple[float, list[int]]] = {}

    def worst(end: int, parts: int) -> tuple[float, list[int]]:
        """Return the worst error, and the starts, of the first ``end`` points in ``parts``
        regions."""
        if (end, parts) not in best:
            if parts == 1:
                best[end, parts] = (_line(points[:end]).worst, [0])
            else:
                tried = [
                    (max(worst(cut, parts - 1)[0], _line(points[cut:end]).worst), cut)
                    for cut in range(REGION_POINTS * (parts - 1), end - REGION_POINTS + 1)
                    if points[cut].sent > points[cut - 1].sent
                ]
                error, cut = min(tried, default=(float("inf"), 0))
                best[end, parts] = (error, [*worst(cut, parts - 1)[1], cut] if tried else [])
        return best[end, parts]

    last = (float("inf"), [0])
    for parts in range(1, MOST_REGIONS + 1):
        if parts > 1 and parts * REGION_POINTS > len(points):
            break
        found = worst(len(points), parts)
        if found[0] < BETTER * last[0]:
            last = found
        if last[0] <= CLOSE:
            break
    return last[1]


def _line(points: Sequence[Point]) -> Line:
    """Return the alpha and beta, not below 0, that minimize the sum of relative errors.

    The best line passes through two of the points, or through one with alpha or beta 0.
    """
    candidates = [(0.0, p.us / p.sent) for p in points if p.sent]
    candidates += [(p.us / p.messages, 0.0) for p in points if p.messages]
    for p, q in combinations(points, 2):
        if det := p.messages * q.sent - q.messages * p.sent:
            alpha = (p.us * q.sent - q.us * p.sent) / det
            beta = (p.messages * q.us - q.messages * p.us) / det
            if alpha >= 0 and beta >= 0:
                candidates.append((alpha, beta))

    def errors(line: tuple[float, float]) -> list[float]:
        return [abs(line[0] * p.messages + line[1] * p.sent - p.us) / p.us for p in points]

    alpha, beta = min(candidates, key=lambda line: sum(errors(line)))
    return Line(alpha, beta * 1e3, max(errors((alpha, beta))))
