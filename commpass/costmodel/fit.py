"""Fit alpha and beta to measured times of exchanges, with as few regions of sizes as possible.

The time of a collective is modeled as ``alpha * messages + sent / beta``, for ``messages``
consecutive messages and ``sent`` bytes that leave a rank (links.py). The sum of relative errors is
minimized: small exchanges have the same weight as large ones, and a size that was measured while
the machine was busy does not draw the line to itself, as it would with squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import inf
from statistics import median_low

from commpass.costmodel.links import Region
from commpass.errors import ProfileError

CLOSE = 0.05
"""There are no further regions if the largest relative error, but for one, is at most this."""
BETTER = 0.7
"""The factor by which one more region must reduce that error."""
ALIKE = 1.5
"""Divisions whose errors differ by less than this factor count as equally good."""
SEVERAL = 5
"""From so many sizes on, one of them may be off."""
MOST_REGIONS = 4
LEAST_POINTS = 2
"""The fewest sizes in all, since alpha and beta are two unknowns."""
REGION_POINTS = 3
"""The fewest points of one of several regions: a line through two would be that of their noise."""
CLIFF = 2.0
"""The largest size is a region of its own if it takes this many times longer than the others tell:
it exceeds a buffer or a cache. No larger size tells whether the machine was busy instead."""


@dataclass(frozen=True)
class Point:
    """One measured size: ``sent`` bytes left a rank in ``messages`` consecutive messages, and it
    took ``us`` microseconds (a median)."""

    messages: int
    sent: float
    us: float


@dataclass(frozen=True)
class Line:
    """``us = alpha * messages + ns * sent / 1000``, and the relative error of each point."""

    alpha_us: float
    ns_a_byte: float
    errors: tuple[float, ...]

    def time_us(self, point: Point) -> float:
        return self.alpha_us * point.messages + self.ns_a_byte * point.sent / 1e3


def regions(points: Sequence[Point]) -> tuple[Region, ...]:
    """Return regions of sizes, each with its alpha and beta, from measured points of one kind.

    There are as few regions as bring all points but one within ``CLOSE``, at most
    ``MOST_REGIONS``. More bytes never take less time. Raises ProfileError for fewer than two sizes,
    or times that are not above 0.
    """
    ordered = _growing(points)
    sizes = {point.sent for point in ordered}
    if len(sizes) < LEAST_POINTS:
        raise ProfileError(
            f"alpha and beta need times of at least {LEAST_POINTS} sizes, not {len(sizes)}"
        )
    found = []
    for line, begin in _divided(ordered):
        rate = 1 / line.ns_a_byte if line.ns_a_byte > 0 else FASTEST
        found.append(Region(begin, line.alpha_us, rate))
    return tuple(found)


def _growing(points: Sequence[Point]) -> list[Point]:
    """Return the points by size, with times that do not decrease. Otherwise noise would create
    regions.

    A point slower than a larger one gets the median of both, and of those between, which is the
    lower time of two: other programs make exchanges slower, never faster.
    """
    runs: list[list[Point]] = []
    for point in sorted(points, key=lambda each: each.sent):
        if not 0 < point.us < inf or not 0 <= point.sent < inf:
            raise ProfileError(f"{point.us} us for {point.sent} bytes: no time that can be")
        runs.append([point])
        while len(runs) > 1 and _median(runs[-1]) < _median(runs[-2]):
            last = runs.pop()
            runs[-1] += last
    return [replace(point, us=_median(run)) for run in runs for point in run]


def _median(points: Sequence[Point]) -> float:
    return median_low(point.us for point in points)


FASTEST = 1e6
"""GB/s of a region whose times do not grow with size."""


Divided = list[tuple[Line, float]]
"""Lines, each with the bytes from which on it holds."""


def _divided(points: Sequence[Point]) -> Divided:
    """Return the fewest lines that fit, and of these, those with the least error."""
    lines: dict[tuple[int, int], Line] = {}

    def line(first: int, last: int) -> Line:
        if (first, last) not in lines:
            lines[first, last] = _line(points[first:last])
        return lines[first, last]

    worst, best = inf, Divided()
    for parts in range(1, MOST_REGIONS + 1):
        tried = []
        for cuts in _cuts(points, parts):
            errors = [error for ends in pairwise(cuts) for error in line(*ends).errors]
            tried.append((_misfit(errors), sum(errors), cuts))
        for error, cuts in _in_order(tried):
            if error >= BETTER * worst:
                continue
            if (found := _joined(points, cuts, [line(*ends) for ends in pairwise(cuts)])) is None:
                continue
            worst, best = error, found
            break
        if worst <= CLOSE:
            break
    last = points[-1]
    beyond = last.us > CLIFF * best[-1][0].time_us(last) and last.sent > points[-2].sent
    if beyond and len(best) < MOST_REGIONS:
        best.append((_line([last]), last.sent))
    return best


Cuts = tuple[int, ...]


def _in_order(tried: Sequence[tuple[float, float, Cuts]]) -> list[tuple[float, Cuts]]:
    """Return divisions with their errors, given those and the sums of all errors, the best first.

    If several have about the least error, the least sum counts. The error leaves out one point: a
    division at the wrong side of a point would seem as good.
    """
    least = min((error for error, _, _ in tried), default=0.0)

    def key(division: tuple[float, float, Cuts]) -> tuple[bool, float]:
        error, total, _ = division
        far = error > max(CLOSE, ALIKE * least)
        return far, error if far else total

    return [(error, cuts) for error, _, cuts in sorted(tried, key=key)]


def _misfit(errors: Sequence[float]) -> float:
    """Return the largest error, or of ``SEVERAL`` or more the second: one size that was measured
    while the machine was busy is no reason for a region."""
    return sorted(errors)[-2] if len(errors) >= SEVERAL else max(errors)


def _cuts(points: Sequence[Point], parts: int) -> Iterator[Cuts]:
    """Yield all divisions of the points into regions: the first point of each, and their number."""
    least = REGION_POINTS if parts > 1 else 1
    for inner in combinations(range(least, len(points) - least + 1), parts - 1):
        cuts = (0, *inner, len(points))
        differ = all(points[cut].sent > points[cut - 1].sent for cut in inner)
        if differ and all(last - first >= least for first, last in pairwise(cuts)):
            yield cuts


def _joined(points: Sequence[Point], cuts: Cuts, lines: Sequence[Line]) -> Divided | None:
    """Return lines with the bytes from which on each holds, or None if times would fall there.

    Between the last point of a line and the first of the next one, the slower of both holds. Only a
    line that ends above the next one's first point holds up to where the two are equal. So a
    region whose times do not grow is not extended: a link may pass small exchanges at once.
    """
    found = [(lines[0], 0.0)]
    for cut, (before, after) in zip(cuts[1:], pairwise(lines), strict=False):
        low, high = points[cut - 1], points[cut]
        above_low = before.time_us(low) - after.time_us(low)
        above_high = before.time_us(high) - after.time_us(high)
        if above_low > 0 and above_high > 0:
            return None
        if above_low <= 0 and above_high <= 0:
            begin = low.sent + 1
        else:
            share = above_low / (above_low - above_high)
            begin = low.sent + share * (high.sent - low.sent)
        found.append((after, begin))
    return found


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
    return Line(alpha, beta * 1e3, tuple(errors((alpha, beta))))
