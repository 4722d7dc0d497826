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
    found = []
    for kind in wanted:
        report(kind)
        left = seconds / len(wanted)
        for number, size in enumerate(SIZES):
            begun = time.perf_counter()
            times = _times(kind, size, group, device, left, needed=number < 2)
            if times is None:
                break
            found.append(times)
            left -= slowest_of([time.perf_counter() - begun], group, device)[0]
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


def _times(
    kind: str,
    size: int,
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float,
    *,
    needed: bool,
) -> Times | None:
    """Measure one size. Return None if ``seconds`` are too few for it and it is not ``needed``.

    A line needs two sizes.
    """
    ranks = group.size()
    nbytes = _handed(kind, size, ranks)
    call = _call(kind, nbytes, group, device)
    first = slowest_of(
        [seconds_of(call, group, device), seconds_of(call, group, device)], group, device
    )
    if first[1] * LEAST > seconds and not needed:
        return None
    repeats = min(MOST, max(LEAST, int(seconds / 3 / first[1])))
    took = slowest_of([seconds_of(call, group, device) for _ in range(repeats)], group, device)
    low, middle, high = (1e6 * each for each in quantiles(took, n=4, method="inclusive"))
    messages, sent = steps(kind, ranks, nbytes)
    return Times(kind, ranks, nbytes, messages, sent, low, middle, high)


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
