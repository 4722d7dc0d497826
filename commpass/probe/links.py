"""Measure plain collectives, and exchanges by messages, between the ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commpass.collectives.messages  # noqa: F401 (registers the operators)
from commpass.costmodel.links import ONE, SEVERAL, steps

ops, ours = torch.ops._c10d_functional, torch.ops.commpass
SIZES = tuple(1 << power for power in range(10, 27, 2))
"""Bytes that leave a rank, approximately: 1 KiB to 64 MiB."""
PARTS, BUSY_BYTES = 8, 64 << 10
"""To measure the cost of a message, ``BUSY_BYTES`` to each rank are divided into ``PARTS``
messages."""
LEAST, MOST = 5, 25
"""The least and the most repetitions of a size."""
LEAST_SIZES = 2


@dataclass(frozen=True)
class Times:
    """The time of a size of a kind, in microseconds, on the slowest rank: quartiles.

    Each rank handed over ``nbytes``, and ``sent`` of them left it in ``messages`` successive
    messages.
    """

    kind: str
    ranks: int
    nbytes: int
    messages: int
    sent: float
    low_us: float
    us: float
    high_us: float


def kinds(group: dist.ProcessGroup, *, by_messages: bool) -> list[str]:
    """Return the kinds that are measured of a group."""
    found = [*CALLS, *((ONE, SEVERAL) if by_messages else ())]
    if group.size() == 2 and SEVERAL in found:
        found.remove(SEVERAL)
    return found


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float,
    *,
    by_messages: bool,
    report: Callable[[str], None] = lambda message: None,
) -> list[Times]:
    """Measure every kind in growing sizes, within about ``seconds`` seconds.

    Every rank of the group calls it. Sizes that would take too long are left out, on all ranks
    alike. ``report`` is called with each kind.
    """
    wanted = kinds(group, by_messages=by_messages)
    trials: list[_Trial] = []
    for kind in wanted:
        report(kind)
        trials += _trials(kind, group, device, seconds / len(wanted))
    took: list[list[float]] = [[] for _ in trials]
    for turn in range(MOST):
        for trial, times in zip(trials, took, strict=True):
            if trial.has_turn(turn):
                times.append(seconds_of(trial.call, group, device))
    return [
        trial.times(group.size(), slowest_of(times, group, device))
        for trial, times in zip(trials, took, strict=True)
    ]


@dataclass(frozen=True)
class _Trial:
    """One size of one kind: what each rank hands over, the call, and how often it is made.

    The calls of all sizes take turns, so that a busy moment of the machine slows down a few calls
    of each size instead of all calls of one.
    """

    kind: str
    nbytes: int
    repeats: int
    call: Callable[[], Any]

    def has_turn(self, turn: int) -> bool:
        """Whether it is measured in one of ``MOST`` turns. Its repetitions are evenly spread."""
        return (turn + 1) * self.repeats // MOST > turn * self.repeats // MOST

    def times(self, ranks: int, seconds: Sequence[float]) -> Times:
        """Return its quartiles."""
        low, middle, high = (1e6 * each for each in quantiles(seconds, n=4, method="inclusive"))
        messages, sent = steps(self.kind, ranks, self.nbytes)
        return Times(self.kind, ranks, self.nbytes, messages, sent, low, middle, high)


def _trials(
    kind: str, group: dist.ProcessGroup, device: torch.device, seconds: float
) -> list[_Trial]:
    """Return the sizes of a kind that fit into ``seconds``, at least two: a line needs two."""
    found = []
    for number, size in enumerate(SIZES):
        nbytes = _handed(kind, size, group.size())
        call = _call(kind, nbytes, group, device)
        begun = time.perf_counter()
        first = slowest_of(
            [seconds_of(call, group, device), seconds_of(call, group, device)], group, device
        )
        if first[1] * LEAST > seconds and number >= LEAST_SIZES:
            break
        repeats = min(MOST, max(LEAST, int(seconds / 3 / first[1])))
        found.append(_Trial(kind, nbytes, repeats, call))
        tried = slowest_of([time.perf_counter() - begun], group, device)[0]
        seconds -= tried + repeats * first[1]
    return found


def overhead_us(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the microseconds of a rank's work for one more message to another rank and one from
    it.

    That is the additional time of the same bytes in many messages instead of one. Every rank of the
    group calls it.
    """
    took = []
    for parts in (1, PARTS):
        nbytes = _handed(SEVERAL, BUSY_BYTES // parts, group.size())
        start = _start(SEVERAL, nbytes, group, device)

        def exchange(parts: int = parts, start: Callable[[], Tensor] = start) -> None:
            for begun in [start() for _ in range(parts)]:
                ops.wait_tensor(begun)

        every = [seconds_of(exchange, group, device) for _ in range(LEAST + 1)]
        took.append(median(slowest_of(every[1:], group, device)))
    return max(1e6 * (took[1] - took[0]) / (PARTS - 1) / (group.size() - 1), 0.0)


def _handed(kind: str, size: int, ranks: int) -> int:
    """Return the bytes to hand over so that about ``size`` leave a rank: whole floats for each
    rank."""
    _, share = steps(kind, ranks, 1)
    unit = 4 * ranks * (ranks - 1)
    return max(round(size / share / unit), 1) * unit


def seconds_of(call: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the time of a call on this rank, after a barrier of all."""
    dist.barrier(group)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def slowest_of(
    seconds: Sequence[float], group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """Return the time of the slowest rank for each repetition."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return slowest.tolist()


# --- the calls ------------------------------------------------------------------------------------


def _call(
    kind: str, nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], Tensor]:
    start = _start(kind, nbytes, group, device)
    return lambda: ops.wait_tensor(start())


def _start(
    kind: str, nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], Tensor]:
    given = torch.ones(nbytes // 4, device=device)
    name, ranks, rank = group.group_name, group.size(), group.rank()
    if kind in CALLS:
        return lambda: CALLS[kind](given, ranks, name)
    each = given.numel() // (1 if kind == ONE else ranks - 1)
    others = [(rank + 1) % ranks] if kind == ONE else [at for at in range(ranks) if at != rank]
    from_ = [(rank - 1) % ranks] if kind == ONE else others
    sent = [each if at in others else 0 for at in range(ranks)]
    received = [each if at in from_ else 0 for at in range(ranks)]
    return lambda: ours.all_to_all_single(given, received, sent, name)


def _even(ranks: int, value: Tensor) -> list[int]:
    return [value.numel() // ranks] * ranks


CALLS: dict[str, Callable[[Tensor, int, str], Tensor]] = {
    "all_reduce": lambda x, ranks, group: ops.all_reduce(x, "sum", group),
    "all_gather": ops.all_gather_into_tensor,
    "reduce_scatter": lambda x, ranks, group: ops.reduce_scatter_tensor(x, "sum", ranks, group),
    "all_to_all": lambda x, ranks, group: ops.all_to_all_single(
        x, _even(ranks, x), _even(ranks, x), group
    ),
    "broadcast": lambda x, ranks, group: ops.broadcast(x, 0, group),
}
