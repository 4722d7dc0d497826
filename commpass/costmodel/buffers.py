"""Fusion buffers of gradients that are selected from (SSFusion, section IV): where they end, what
is left dense in them, how much is sent of the others, and where buffers are separated. One function
each, on plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from commpass.costmodel.links import Link

BOUND = 0.001
"""The least density to which a gradient is thinned, as published."""
FINEST = 10**6
"""Densities are whole numbers of so many parts: what codecs can say exactly."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter: ``entries`` of ``itemsize`` bytes. ``backward_us`` is how long
    backward takes from the one before to this one, ``select_us`` how long what runs backward then
    selects from it, ``offload_us`` how long a thread of the CPU does, copies there and back
    included; ``around_us`` is what else it takes to send it sparse: to add it to what was not sent,
    and to add up what comes back."""

    name: str
    entries: int
    itemsize: int = 4
    backward_us: float = 0.0
    select_us: float = 0.0
    offload_us: float = 0.0
    around_us: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.entries * self.itemsize


class Part(Protocol):
    """What is asked of what is sent of a gradient: see ``plan.Sent``."""

    @property
    def number(self) -> int: ...
    @property
    def dense(self) -> bool: ...
    @property
    def offloaded(self) -> bool: ...


class Exchanges(Protocol):
    """What is asked of a buffer: see ``plan.Buffer``."""

    @property
    def sent(self) -> Sequence[Part]: ...
    @property
    def reduced(self) -> int: ...


def idle(kind: str, nbytes: float) -> float:
    """That an exchange keeps nobody from anything."""
    return 0.0


Runs = Sequence[Sequence[int]]
"""Buffers as the numbers of their gradients."""


@dataclass(frozen=True)
class Problem:
    """The gradients in the order of backward, and what their exchange costs: ``ranks`` ranks on a
    link; a row of a gradient that is not sent whole has ``row_bytes(entries, density)``.
    ``interleaved``: what is sent whole goes by an all_reduce of its own, in front of the all_gather
    of a buffer. While a message is handled, backward loses ``busy_us(kind, nbytes)``: where ranks
    share processors the thread that exchanges has none of its own."""

    gradients: Sequence[Gradient]
    ranks: int
    link: Link
    row_bytes: Callable[[int, float], int]
    density: float = 1.0
    interleaved: bool = False
    busy_us: Callable[[str, float], float] = idle

    def nbytes(self, numbers: Iterable[int], dense: Collection[int]) -> int:
        """What one rank hands over of some gradients, those in ``dense`` whole."""
        return sum(
            self.gradients[number].nbytes
            if number in dense
            else self.row_bytes(self.gradients[number].entries, self.density)
            for number in numbers
        )

    def sent_us(self, kind: str, nbytes: float) -> float:
        """One collective (SSFusion, equations 3 and 4); nothing for no bytes."""
        return self.link.us(kind, nbytes, self.ranks) if nbytes else 0.0

    def gather_us(self, numbers: Iterable[int], dense: Collection[int]) -> float:
        return self.sent_us("all_gather", self.nbytes(numbers, dense))

    def exchange_us(self, numbers: Sequence[int], dense: Collection[int]) -> float:
        """A whole buffer: the left side of equation 2."""
        if not self.interleaved:
            return self.gather_us(numbers, dense)
        whole = [number for number in numbers if number in dense]
        rest = [number for number in numbers if number not in dense]
        return self.sent_us("all_reduce", self.nbytes(whole, dense)) + self.gather_us(rest, dense)

    def compute_us(self, numbers: Iterable[int], dense: Collection[int]) -> float:
        """Backward and selection: the right side of equation 2."""
        return sum(
            self.gradients[number].backward_us
            + (0.0 if number in dense else self.gradients[number].select_us)
            for number in numbers
        )

    def end_us(self, buffers: Iterable[Exchanges]) -> float:
        """When the last exchange ends: backward, selection and what is done around it one after the
        other, the CPU's selections beside them, exchanges in order, none before all it sends is
        there."""
        clock = aside = link = lost = 0.0
        for buffer in buffers:
            clock += lost
            lost = 0.0
            early = {p.number for p in buffer.sent[: buffer.reduced] if p.dense}
            late = [p.number for p in buffer.sent if p.number not in early]
            dense = {p.number for p in buffer.sent if p.dense}
            there: dict[int, float] = {}
            for part in buffer.sent:
                each = self.gradients[part.number]
                clock += each.backward_us + (0.0 if part.dense else each.around_us)
                if part.offloaded:
                    aside = max(aside, clock) + each.offload_us
                elif not part.dense:
                    clock += each.select_us
                there[part.number] = aside if part.offloaded else clock
            for kind, some in (("all_reduce", early), ("all_gather", late)):
                if some:
                    begin = max(link, *(there[number] for number in some))
                    nbytes = self.nbytes(some, dense)
                    link = begin + self.sent_us(kind, nbytes)
                    lost += self.busy_us(kind, nbytes)
        return max(link, clock)


def fused(problem: Problem, dense: Collection[int], kind: str) -> list[range]:
    """Runs of gradients such that their exchanges, one ``kind`` for each run, end as early as they
    can; among equals, fewer runs.

    An exchange begins when its last gradient is there and the one before has ended, and when they
    are there does not depend on the runs: so the best way to end a prefix is part of the best way
    to end all, and the recursion over where the last run begins is exact; but that where messages
    keep the processors from backward, they count as so much longer.
    """
    count = len(problem.gradients)
    there = list(accumulate((problem.compute_us([n], dense) for n in range(count)), initial=0.0))
    held = list(accumulate((problem.nbytes([n], dense) for n in range(count)), initial=0))
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # end, runs, where the last one begins
    for end in range(1, count + 1):
        best.append(
            min(
                (
                    max(best[begin][0], there[end])
                    + problem.sent_us(kind, held[end] - held[begin])
                    + problem.busy_us(kind, held[end] - held[begin]),
                    best[begin][1] + 1,
                    begin,
                )
                for begin in range(end)
            )
        )
    runs, end = [], count
    while end:
        runs.append(range(best[end][2], end))
        end = best[end][2]
    return runs[::-1]


@dataclass(frozen=True)
class _Part:
    number: int
    dense: bool
    offloaded: bool = False


@dataclass(frozen=True)
class _Run:
    """A buffer whose first ``reduced`` go by all_reduce where they are sent whole."""

    sent: Sequence[_Part]
    reduced: int = 0


def excluded(
    problem: Problem, runs: Runs, dense: Collection[int], capacity: float = math.inf
) -> list[int]:
    """Which gradients are left dense beside those that are: in each buffer, from the last to the
    second, the smallest ones, until the exchange of the buffer before takes as long as backward and
    selection of this one (equation 2). It stops earlier where sending one more whole would end the
    step later than selecting from it, or would be more than ``capacity`` entries in all."""
    held, found = set(dense), []

    def end_us(dense: Collection[int]) -> float:
        return problem.end_us(
            _Run([_Part(n, n in dense) for n in run], len(run) if problem.interleaved else 0)
            for run in runs
        )

    end = end_us(held)
    for before, run in zip(reversed(runs[:-1]), reversed(runs[1:]), strict=True):
        exchange = problem.exchange_us(before, held)
        for number in sorted(run, key=lambda n: (problem.gradients[n].entries, n)):
            if exchange >= problem.compute_us(run, held):
                break
            if number in held:
                continue
            entries = problem.gradients[number].entries
            later = end_us(held | {number})
            if entries > capacity or later > end:
                break
            capacity -= entries
            held.add(number)
            found.append(number)
            end = later
    return found


def offloaded(problem: Problem, run: Sequence[int], dense: Collection[int]) -> frozenset[int]:
    """Which gradients of a buffer a thread of the CPU selects from, one after the other: those
    whose selection ends before backward of the buffer does (section IV.C, step 1)."""
    end = sum(problem.gradients[number].backward_us for number in run)
    clock = busy = 0.0
    found = set()
    for number in run:
        each = problem.gradients[number]
        clock += each.backward_us
        done = max(busy, clock) + each.offload_us
        if number not in dense and done <= end:
            found.add(number)
            busy = done
    return frozenset(found)


def cut_off(problem: Problem, sent: Sequence[Part]) -> int:
    """After how many of a buffer's gradients its all_reduce starts, where T1 + T2 is least (section
    IV.D): T1 is backward and selection up to there, T2 the longer of the all_reduce and the rest of
    backward and selection, and then the all_gather. Gradients sent whole that come later are part
    of the all_gather. Among equals, the latest."""
    dense = {part.number for part in sent if part.dense}
    aside = {part.number for part in sent if part.offloaded}
    busy = [problem.compute_us([part.number], dense | aside) for part in sent]

    def whole_us(cut: int) -> float:
        reduced = {part.number for part in sent[:cut] if part.dense}
        gathered = [part.number for part in sent if part.number not in reduced]
        reduce = problem.sent_us("all_reduce", problem.nbytes(reduced, dense))
        gather = problem.gather_us(gathered, dense)
        return sum(busy[:cut]) + max(reduce, sum(busy[cut:])) + gather

    return min(range(len(sent), -1, -1), key=whole_us)


def slack(
    gradients: Sequence[Gradient], sent_dense: Collection[int], density: float, bound: float
) -> float:
    """How many entries more than those of ``dense`` can be sent whole, so that the entries sent
    are still ``density`` of all if all others are thinned to ``bound``, each gradient's rounded
    up."""
    dense = sum(gradients[number].entries for number in sent_dense)
    total = sum(each.entries for each in gradients)
    room = (density - bound) * total - (len(gradients) - len(sent_dense))
    return room / max(1 - bound, 1 / FINEST) - dense


def sparsified(
    gradients: Sequence[Gradient], sent_dense: Collection[int], density: float, bound: float
) -> float:
    """Density-aware sparsification: the density of all that are not sent ``dense`` (a set of
    numbers) at which the entries sent are ``density`` of all entries at most, each gradient's
    rounded up; not below ``bound``."""
    numbers = range(len(gradients))
    dense = sum(gradients[n].entries for n in numbers if n in sent_dense)
    total = sum(each.entries for each in gradients)
    sparse = [n for n in numbers if n not in sent_dense]
    room = density * total - dense - len(sparse)
    share = room / (total - dense) if total > dense else 1.0
    found = math.floor(max(share, 0.0) * FINEST) / FINEST
    return min(max(found, bound), density)
