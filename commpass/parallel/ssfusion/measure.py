"""Measure the inputs of a fusion plan in the first steps: times of backward, selection and the
link."""

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
"""Entries: below this size, the time of a selection does not depend on the size."""
LARGEST = 1 << 22
"""Entries: above this size, times are extrapolated proportionally."""
FACTOR = 8
"""The factor between measured sizes."""
LINK_BYTES = (1 << 12, 1 << 16, 1 << 20)
LONG_US = 10_000.0
"""An exchange that takes longer is not measured with more bytes: its time is extrapolated."""
SHORT_US = LONG_US / 4
"""After an exchange that takes longer, the next size is measured once, without a warm-up."""


@dataclass
class Clock:
    """When gradients arrived, in each measured step.

    On a GPU this uses events in its stream, so that nothing waits for it.
    """

    device: torch.device
    steps: list[list[tuple[int, Any]]] = field(default_factory=list)
    begun: Any = None

    def begin(self) -> None:
        """Record that forward has ended and backward begins."""
        self.begun = self._timestamp()

    def step(self) -> None:
        """Record that a backward begins to produce gradients."""
        self.steps.append([])

    def mark(self, number: int) -> None:
        """Record that gradient ``number`` has arrived."""
        if self.steps and not self.steps[-1] and self.begun is not None:
            self.steps[-1].append((-1, self.begun))
        if self.steps:
            self.steps[-1].append((number, self._timestamp()))

    def order(self) -> list[int]:
        """Return the gradients in the order of the last step."""
        last = self.steps[-1] if self.steps else []
        return [number for number, _ in last if number >= 0]

    def backward_us(self, count: int, cores: float = math.inf) -> list[float]:
        """Return the least time of each of ``count`` gradients since the previous one arrived.

        The least time is used because disturbances only add. It is 0 for gradients that never came.
        A rank that has ``cores`` processors to itself takes no less than its processor time on
        those: a step of a few milliseconds may run undisturbed, but a longer backward does not.
        """
        found: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        for step in self.steps:
            for (_, before), (number, after) in pairwise(step):
                found[number].append(self._us(before, after))
        return [_minimum(times, cores) for times in found]

    def _timestamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter(), time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _us(self, before: Any, end: Any) -> tuple[float, float]:
        """Return wall time and processor time."""
        if self.device.type != "cuda":
            wall, busy = (1e6 * (after - first) for first, after in zip(before, end, strict=True))
            return wall, busy
        end.synchronize()
        return 1e3 * before.elapsed_time(end), 0.0


def _minimum(times: Sequence[tuple[float, float]], cores: float) -> float:
    """Return the time that applies if all ranks compute at once, from wall and processor times."""
    wall, busy = (min(each, default=0.0) for each in zip(*times, strict=True)) if times else (0, 0)
    return max(wall, busy / cores)


@dataclass(frozen=True)
class Rate:
    """Microseconds of a selection by number of entries, interpolated between measured sizes."""

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
    codec: SparseCodec,
    entries: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    group: Any,
    cores: float = math.inf,
) -> Rate:
    """Measure selection from rows of ``entries`` on a device, on all ranks of a group at once.

    Ranks that share processors share them in a step as well.
    """
    encode = encoding(codec, torch.device(device))
    return _rate(lambda row: functools.partial(encode, row), entries, dtype, device, group, cores)


def offloaded_rate(
    codec: SparseCodec,
    entries: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    group: Any,
    cores: float = math.inf,
) -> Rate:
    """Measure selection in a CPU thread while another one is as busy, as backward's is on a CPU.

    For a gradient on another device, the copies to the CPU and back are included.
    """
    encode, cpu = encoding(codec, torch.device("cpu")), torch.device("cpu")

    def prepared(row: Tensor) -> Callable[[], object]:
        if row.device != cpu:
            return lambda: encode(row.cpu()).to(row.device)
        return functools.partial(_run_both, *(functools.partial(encode, row.clone()) for _ in "12"))

    return _rate(prepared, entries, dtype, device, group, cores)


def sparsifying(
    codec: SparseCodec,
    entries: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    group: Any,
    cores: float = math.inf,
) -> Rate:
    """Measure all that sending a sparse gradient of ``entries`` takes.

    That is adding it to the residual, selecting from it, and summing what all ranks of a group
    return.
    """
    ranks = dist.get_world_size(group)

    def prepared(row: Tensor) -> Callable[[], object]:
        part = Part(row.numel(), row.dtype, codec)
        memory = Memory(torch.zeros_like(row, dtype=accumulation_dtype(row.dtype)))
        into = torch.empty_like(row)

        def run() -> None:
            memory.add(row)
            wires = memory.select(codec, row.dtype, row.device).repeat(ranks, 1)
            into.copy_((part.sum(wires) / ranks).view(into.shape))

        return run

    return _rate(prepared, entries, dtype, device, group, cores)


def _run_both(one: Callable[[], object], second: Callable[[], object]) -> None:
    thread = threading.Thread(target=second)
    thread.start()
    one()
    thread.join()


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
    """Return the microseconds of a call on all ranks at once, each with ``cores`` processors to
    itself."""
    times = [_seconds(call, device) for _ in range(REPEATS)]
    wall, busy = (median(each) for each in zip(*times, strict=True))
    return 1e6 * max(wall, busy / cores)


def _seconds(call: Callable[[], object], device: Any) -> tuple[float, float]:
    """Return wall time, and processor time of all threads."""
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
    """The times of exchanges.

    ``link`` is the link between the ranks. ``busy`` is, by kind, for how long an exchange of so
    many bytes keeps a rank's processors from backward.
    """

    link: Link
    busy: Mapping[str, Rate] = field(default_factory=dict)

    def overhead_us(self, kind: str, nbytes: float) -> float:
        return self.busy[kind].of(round(nbytes)) if kind in self.busy else 0.0


def backward_slowdown(cores: float) -> float:
    """Return how much longer backward takes for each unit of the exchanging thread's processor
    time.

    The rank has ``cores`` processors to itself. With two or more, each thread has its own. With one
    or less, one thread waits for the other.
    """
    return 1 / cores if cores <= 1 else max(2 / cores - 1, 0.0)


def exchanges(group: Any, device: Any, cores: float = math.inf) -> ExchangeTimes:
    """Measure alpha and beta of a step's messages between the ranks of a group, and their processor
    time.

    All ranks of the group call it. The times are those of the slowest rank.
    """
    ranks = dist.get_world_size(group)
    calls: dict[str, Callable[[Part, Tensor], Any]] = {
        "all_reduce": lambda part, x: messages.sums([part], [x], group, device),
        "all_gather": lambda part, x: messages.gather([part], [x], group, device),
    }
    measured: dict[str, tuple[Region, ...]] = {}
    busy: dict[str, Rate] = {}
    share = backward_slowdown(cores)
    for kind, call in calls.items():
        points: list[Point] = []
        lost_us: list[float] = []
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
            lost_us.append(round(share * worked, 1) if device.type == "cpu" else 0.0)
        measured[kind] = regions(points)
        busy[kind] = Rate(LINK_BYTES[: len(lost_us)], tuple(lost_us))
    slow = measured["all_reduce"][-1]
    link = Link(measured["all_reduce"][0].alpha_us, slow.gbytes_per_s, measured=measured)
    return ExchangeTimes(link, busy)
