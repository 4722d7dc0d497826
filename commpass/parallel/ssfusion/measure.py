"""What a fusion plan is made of: times of backward, of selection and of the link, measured in the
first steps."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.codecs.codec import accumulation_dtype
from commpass.codecs.sparse import SparseCodec
from commpass.costmodel import Link, Region
from commpass.costmodel.fit import Point, regions
from commpass.costmodel.links import steps
from commpass.parallel.ssfusion import messages
from commpass.parallel.ssfusion.memory import Memory, encoding
from commpass.parallel.ssfusion.messages import Part
from commpass.utils.ambient import without_ambient_state

REPEATS = 3
SMALLEST = 1 << 10
"""Entries: what selecting from fewer takes does not depend on their number."""
LARGEST = 1 << 22
"""Entries: the time of more is that of so many, times as often."""
FACTOR = 8
"""Between sizes that are measured."""
LINK_BYTES = (1 << 12, 1 << 16, 1 << 20)
LONG_US = 10_000.0
"""An exchange that takes longer is not measured with more bytes: those are what it takes."""
SHORT_US = LONG_US / 4
"""After one that takes longer, an exchange of more bytes is measured once, without a warm-up."""


@dataclass
class Clock:
    """When gradients were there, in each of the steps that are measured: on a GPU by events in its
    stream, so that nobody waits for it."""

    device: torch.device
    steps: list[list[tuple[int, Any]]] = field(default_factory=list)
    begun: Any = None

    def begin(self) -> None:
        """Forward has ended: what follows is backward."""
        self.begun = self._timestamp()

    def step(self) -> None:
        """A backward begins to make gradients."""
        self.steps.append([])

    def mark(self, number: int) -> None:
        """Gradient ``number`` is there."""
        if self.steps and not self.steps[-1] and self.begun is not None:
            self.steps[-1].append((-1, self.begun))
        if self.steps:
            self.steps[-1].append((number, self._timestamp()))

    def order(self) -> list[int]:
        """Gradients as they came in the last step."""
        last = self.steps[-1] if self.steps else []
        return [number for number, _ in last if number >= 0]

    def backward_us(self, count: int, cores: float = math.inf) -> list[float]:
        """Of each of ``count`` gradients, the least time since the one before was there, for what
        disturbs a step only adds; 0 for those that never came. A rank that has ``cores``
        processors to itself takes no less than its processor time on those: a step of a few
        milliseconds may by luck go undisturbed, and all of a backward does not."""
        found: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        for step in self.steps:
            for (_, before), (number, there) in pairwise(step):
                found[number].append(self._us(before, there))
        return [_minimum(times, cores) for times in found]

    def _timestamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter(), time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _us(self, before: Any, end: Any) -> tuple[float, float]:
        """Time, and processor time."""
        if self.device.type != "cuda":
            wall, busy = (1e6 * (after - first) for first, after in zip(before, end, strict=True))
            return wall, busy
        end.synchronize()
        return 1e3 * before.elapsed_time(end), 0.0


def _minimum(times: Sequence[tuple[float, float]], cores: float) -> float:
    """Of some times and processor times, what is taken where all ranks compute at once."""
    wall, busy = (min(each, default=0.0) for each in zip(*times, strict=True)) if times else (0, 0)
    return max(wall, busy / cores)


@dataclass(frozen=True)
class Rate:
    """Microseconds of a selection by number of entries, between the sizes that were measured."""

    sizes: tuple[int, ...]
    us: tuple[float, ...]

    def of(self, entries: int) -> float:
        if entries >= self.sizes[-1]:
            return self.us[-1] * entries / self.sizes[-1]
        if entries <= self.sizes[0]:
            return self.us[0]
        at = next(i for i, size in enumerate(self.sizes) if size > entries)
        (a, b), (low, high) = self.sizes[at - 1 : at + 1], self.us[at - 1 : at + 1]
        return low + (high - low) * (entries - a) / (b - a)


def selection(
    coder: SparseCodec,
    entries: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    group: Any,
    cores: float = math.inf,
) -> Rate:
    """What selecting from rows of so many entries takes on a device, on all ranks of a group at
    once: those that share processors do so in a step as well."""
    encode = encoding(coder, torch.device(device))
    return _rate(lambda row: functools.partial(encode, row), entries, dtype, device, group, cores)


def offloaded_rate(
    coder: SparseCodec,
    entries: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    group: Any,
    cores: float = math.inf,
) -> Rate:
    """The same by a thread of the CPU beside the one that runs backward, which is as busy on a CPU;
    for a gradient on another device, copies there and back included."""
    encode, cpu = encoding(coder, torch.device("cpu")), torch.device("cpu")

    def prepared(row: Tensor) -> Callable[[], object]:
        if row.device != cpu:
            return lambda: encode(row.cpu()).to(row.device)
        return functools.partial(_both, *(functools.partial(encode, row.clone()) for _ in "12"))

    return _rate(prepared, entries, dtype, device, group, cores)


def sparsifying(
    coder: SparseCodec,
    entries: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    group: Any,
    cores: float = math.inf,
) -> Rate:
    """All that it takes to send gradients of so many entries sparse: to add one to what was not
    sent, to select from it, and to add up what comes back from all ranks of a group."""
    ranks = dist.get_world_size(group)

    def prepared(row: Tensor) -> Callable[[], object]:
        part = Part(row.numel(), row.dtype, coder)
        memory = Memory(torch.zeros_like(row, dtype=accumulation_dtype(row.dtype)))
        into = torch.empty_like(row)

        def run() -> None:
            memory.add(row)
            wires = memory.select(coder, row.dtype, row.device).repeat(ranks, 1)
            into.copy_((part.sum(wires) / ranks).view(into.shape))

        return run

    return _rate(prepared, entries, dtype, device, group, cores)


def _both(one: Callable[[], object], second: Callable[[], object]) -> None:
    beside = threading.Thread(target=second)
    beside.start()
    one()
    beside.join()


def _rate(
    make: Callable[[Tensor], Callable[[], object]],
    entries: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    group: Any,
    cores: float,
) -> Rate:
    most = min(max(entries, default=SMALLEST), LARGEST)
    sizes = [SMALLEST]
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] * FACTOR, most))
    generator = torch.Generator().manual_seed(0)
    times = []
    with without_ambient_state():
        for size in sizes:
            run = make(torch.randn((1, size), generator=generator).to(dtype).to(device))
            run()
            dist.barrier(group)
            times.append(_median_us(run, device, cores))
    return Rate(tuple(sizes), tuple(times))


def _median_us(call: Callable[[], object], device: Any, cores: float) -> float:
    """Microseconds of a call on all ranks at once, of which each has ``cores`` processors to
    itself."""
    times = [_seconds(call, device) for _ in range(REPEATS)]
    wall, busy = (median(each) for each in zip(*times, strict=True))
    return 1e6 * max(wall, busy / cores)


def _seconds(call: Callable[[], object], device: Any) -> tuple[float, float]:
    """Time, and processor time of all threads."""
    _synchronize(device)
    start, busy = time.perf_counter(), time.process_time()
    call()
    _synchronize(device)
    return time.perf_counter() - start, time.process_time() - busy


def _synchronize(device: Any) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class ExchangeTimes:
    """What exchanges take: the ``link`` between the ranks, and by kind for how long one of so many
    bytes keeps the processors of a rank from backward."""

    link: Link
    busy: Mapping[str, Rate] = field(default_factory=dict)

    def busy_us(self, kind: str, nbytes: float) -> float:
        return self.busy[kind].of(round(nbytes)) if kind in self.busy else 0.0


def taken_from_backward(cores: float) -> float:
    """How much longer backward takes for each unit of processor time of the thread that exchanges,
    on a rank that has ``cores`` processors to itself. With two or more each thread has its own;
    with one, and less, one waits for the other."""
    return 1 / cores if cores <= 1 else max(2 / cores - 1, 0.0)


def exchanges(group: Any, device: Any, cores: float = math.inf) -> ExchangeTimes:
    """Alpha and beta of the messages of a step between the ranks of a group, all of which call it,
    of the slowest rank; and what they take of the processors."""
    ranks = dist.get_world_size(group)
    calls: dict[str, Callable[[Part, Tensor], Any]] = {
        "all_reduce": lambda part, x: messages.sums([part], [x], group, device),
        "all_gather": lambda part, x: messages.gather([part], [x], group, device),
    }
    measured: dict[str, tuple[Region, ...]] = {}
    busy: dict[str, Rate] = {}
    share = taken_from_backward(cores)
    for kind, call in calls.items():
        points: list[Point] = []
        taken: list[float] = []
        for size in LINK_BYTES:
            if len(points) > 1 and points[-1].us > LONG_US:
                break
            x = torch.zeros(size // 4, device=device)
            run = functools.partial(call, Part(x.numel(), x.dtype), x)
            is_long = bool(points) and points[-1].us > SHORT_US
            if not is_long:
                run()
            dist.barrier(group)
            times = [_seconds(run, device) for _ in range(1 if is_long else REPEATS)]
            medians = [median(each) for each in zip(*times, strict=True)]
            slowest = torch.tensor(medians, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            wall, worked = (1e6 * each for each in slowest.tolist())
            many, sent = steps(kind, ranks, size)
            points.append(Point(many, sent, max(wall, 0.1)))
            taken.append(round(share * worked, 1) if device.type == "cpu" else 0.0)
        measured[kind] = regions(points)
        busy[kind] = Rate(LINK_BYTES[: len(taken)], tuple(taken))
    slow = measured["all_reduce"][-1]
    link = Link(measured["all_reduce"][0].alpha_us, slow.gbytes_per_s, measured=measured)
    return ExchangeTimes(link, busy)
