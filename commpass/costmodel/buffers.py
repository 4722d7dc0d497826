"""Fusion buffers of gradients with sparse selection (SSFusion, section IV).

The functions determine where buffers end, which gradients stay dense, the density of the others,
and where buffers are split. Each works on plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from commpass.costmodel.links import Link

BOUND = 0.001
"""The least density of a gradient, as published."""
FINEST = 10**6
"""Densities are multiples of one over this number, which codecs represent exactly."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter: ``entries`` of ``itemsize`` bytes, and times in microseconds.

    - ``backward_us``: backward from the previous gradient to this one.
    - ``select_us``: selection from it by the processor that runs backward.
    - ``offload_us``: selection by a CPU thread, including copies in both directions.
    - ``around_us``: other costs of sending it sparse, which are adding the residual and summing the
      results.
    """

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
    """The properties needed of a gradient that is sent: see ``plan.Sent``."""

    @property
    def number(self) -> int: ...
    @property
    def dense(self) -> bool: ...
    @property
    def offloaded(self) -> bool: ...


class Exchanges(Protocol):
    """The properties needed of a buffer: see ``plan.Buffer``."""

    @property
    def sent(self) -> Sequence[Part]: ...
    @property
    def reduced(self) -> int: ...


def idle(kind: str, nbytes: float) -> float:
    """Return 0: an exchange does not delay backward."""
    return 0.0


Runs = Sequence[Sequence[int]]
"""Buffers as the indices of their gradients."""


@dataclass(frozen=True)
class Problem:
    """The gradients in the order of backward, and the cost of their exchanges between ``ranks``
    ranks on a link.

    A row of a gradient that is not sent dense has ``row_bytes(entries, density)`` bytes. With
    ``interleaved``, dense gradients use a separate all_reduce, before the all_gather of a buffer.
    While a message is handled, backward loses ``overhead_us(kind, nbytes)``: if ranks share
    processors, the thread that exchanges does not have its own.
    """

    gradients: Sequence[Gradient]
    ranks: int
    link: Link
    row_bytes: Callable[[int, float], int]
    density: float = 1.0
    interleaved: bool = False
    overhead_us: Callable[[str, float], float] = idle

    def nbytes(self, numbers: Iterable[int], dense: Collection[int]) -> int:
        """Return the bytes that one rank passes for some gradients; those in ``dense`` are sent
        whole."""
        return sum(
            self.gradients[number].nbytes
            if number in dense
            else self.row_bytes(self.gradients[number].entries, self.density)
            for number in numbers
        )

    def sent_us(self, kind: str, nbytes: float) -> float:
        """Return the time of one collective (SSFusion, equations 3 and 4); 0 for no bytes."""
        return self.link.time_us(kind, nbytes, self.ranks) if nbytes else 0.0

    def gather_us(self, numbers: Iterable[int], dense: Collection[int]) -> float:
        return self.sent_us("all_gather", self.nbytes(numbers, dense))

    def exchange_us(self, numbers: Sequence[int], dense: Collection[int]) -> float:
        """Return the time of the exchanges of a buffer: the left side of equation 2."""
        if not self.interleaved:
            return self.gather_us(numbers, dense)
        whole = [number for number in numbers if number in dense]
        rest = [number for number in numbers if number not in dense]
        return self.sent_us("all_reduce", self.nbytes(whole, dense)) + self.gather_us(rest, dense)

    def compute_us(self, numbers: Iterable[int], dense: Collection[int]) -> float:
        """Return the time of backward and selection: the right side of equation 2."""
        return sum(
            self.gradients[number].backward_us
            + (0.0 if number in dense else self.gradients[number].select_us)
            for number in numbers
        )

    def end_us(self, buffers: Iterable[Exchanges]) -> float:
        """Return when the last exchange ends.

        Backward, selection and related operations run one after another; selections on the CPU run
        in parallel. Exchanges run in order, each after all its data is ready.
        """
        clock = cpu = link = lost = 0.0
        for buffer in buffers:
            clock += lost
            lost = 0.0
            early = {p.number for p in buffer.sent[: buffer.reduced] if p.dense}
            late = [p.number for p in buffer.sent if p.number not in early]
            dense = {p.number for p in buffer.sent if p.dense}
            ready: dict[int, float] = {}
            for part in buffer.sent:
                each = self.gradients[part.number]
                clock += each.backward_us + (0.0 if part.dense else each.around_us)
                if part.offloaded:
                    cpu = max(cpu, clock) + each.offload_us
                elif not part.dense:
                    clock += each.select_us
                ready[part.number] = cpu if part.offloaded else clock
            for kind, numbers in (("all_reduce", early), ("all_gather", late)):
                if numbers:
                    begin = max(link, *(ready[number] for number in numbers))
                    nbytes = self.nbytes(numbers, dense)
                    link = begin + self.sent_us(kind, nbytes)
                    lost += self.overhead_us(kind, nbytes)
        return max(link, clock)


def fused(problem: Problem, dense: Collection[int], kind: str) -> list[range]:
    """Return runs of gradients whose exchanges, one ``kind`` for each run, end as early as
    possible; among equals, the fewest runs.

    An exchange begins when its last gradient is ready and the previous exchange has ended. The
    times at which gradients are ready do not depend on the runs. So an optimal solution contains an
    optimal solution of each prefix, and the recursion over the start of the last run is exact. One
    approximation remains: time in which messages keep the processors from backward is added to the
    exchange.
    """
    count = len(problem.gradients)
    ready = list(accumulate((problem.compute_us([n], dense) for n in range(count)), initial=0.0))
    sizes = list(accumulate((problem.nbytes([n], dense) for n in range(count)), initial=0))
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # end, runs, start of the last run
    for end in range(1, count + 1):
        best.append(
            min(
                (
                    max(best[begin][0], ready[end])
                    + problem.sent_us(kind, sizes[end] - sizes[begin])
                    + problem.overhead_us(kind, sizes[end] - sizes[begin]),
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
    """A buffer whose first ``reduced`` gradients use an all_reduce if they are sent dense."""

    sent: Sequence[_Part]
    reduced: int = 0


def excluded(
    problem: Problem, runs: Runs, dense: Collection[int], capacity: float = math.inf
) -> list[int]:
    """Return the gradients that become dense in addition to ``dense``.

    They are the smallest ones of each buffer, from the last to the second. A buffer is complete
    when the exchange of the previous buffer takes as long as backward and selection of this one
    (equation 2). It stops earlier if one more dense gradient would end the step later than
    selecting from it, or would exceed ``capacity`` entries in total.
    """
    sent_dense, found = set(dense), []

    def end_us(dense: Collection[int]) -> float:
        return problem.end_us(
            _Run([_Part(n, n in dense) for n in run], len(run) if problem.interleaved else 0)
            for run in runs
        )

    end = end_us(sent_dense)
    for before, run in zip(reversed(runs[:-1]), reversed(runs[1:]), strict=True):
        exchange = problem.exchange_us(before, sent_dense)
        for number in sorted(run, key=lambda n: (problem.gradients[n].entries, n)):
            if exchange >= problem.compute_us(run, sent_dense):
                break
            if number in sent_dense:
                continue
            entries = problem.gradients[number].entries
            later = end_us(sent_dense | {number})
            if entries > capacity or later > end:
                break
            capacity -= entries
            sent_dense.add(number)
            found.append(number)
            end = later
    return found


def offloaded(problem: Problem, run: Sequence[int], dense: Collection[int]) -> frozenset[int]:
    """Return the gradients of a buffer that a CPU thread selects from, one after another. Their
    selections end before backward of the buffer does (section IV.C, step 1)."""
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
    """Return after how many of a buffer's gradients its all_reduce starts, which minimizes T1 + T2
    (section IV.D).

    T1 is backward and selection up to that point. T2 is the longer of the all_reduce and the
    remaining backward and selection, plus the all_gather. Later dense gradients are part of the
    all_gather. Among equals, the latest start is returned.
    """
    dense = {part.number for part in sent if part.dense}
    on_cpu = {part.number for part in sent if part.offloaded}
    busy = [problem.compute_us([part.number], dense | on_cpu) for part in sent]

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
    """Return how many more entries than those of ``sent_dense`` can be sent dense.

    The entries sent are then still ``density`` of all, if all others are reduced to ``bound``, each
    gradient's rounded up.
    """
    dense = sum(gradients[number].entries for number in sent_dense)
    total = sum(each.entries for each in gradients)
    room = (density - bound) * total - (len(gradients) - len(sent_dense))
    return room / max(1 - bound, 1 / FINEST) - dense


def sparsified(
    gradients: Sequence[Gradient], sent_dense: Collection[int], density: float, bound: float
) -> float:
    """Density-aware sparsification: return the density of all gradients not in ``sent_dense``.

    With it, the entries sent are at most ``density`` of all entries, each gradient's rounded up. It
    is not below ``bound``.
    """
    numbers = range(len(gradients))
    dense = sum(gradients[n].entries for n in numbers if n in sent_dense)
    total = sum(each.entries for each in gradients)
    sparse = [n for n in numbers if n not in sent_dense]
    room = density * total - dense - len(sparse)
    share = room / (total - dense) if total > dense else 1.0
    found = math.floor(max(share, 0.0) * FINEST) / FINEST
    return min(max(found, bound), density)
