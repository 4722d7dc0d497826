"""Check collectives in one kernel between GPUs, and time the all_reduce beside the library's
own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.collectives.public import all_reduce
from commpass.errors import CommpassError
from commpass.lowering.gpu import exchange
from commpass.probe.gpu.finding import Finding
from commpass.probe.links import slowest_of

ALGORITHMS = ("one_shot", "two_shot")
CODEC = "int8"
NUMEL = 20_000 + 7
SIZES = tuple(1 << power for power in (14, 17, 20, 23, 26))
"""Bytes of a bfloat16 tensor: 16 KiB to 64 MiB."""
MOST_BYTES = 8 << 20
"""The largest tensor that is timed by one kernel, whose programs are few."""
CALLS, RUNS = 20, 5
UNTESTED = "not tested: there is one rank"
Collective = Callable[[Tensor, dist.ProcessGroup, str], Tensor]


def findings(group: dist.ProcessGroup, device: torch.device) -> Iterator[Finding]:
    """Yield whether the results of all ranks are right, and the same everywhere. Every rank calls
    it."""
    by: dict[str, Collective] = {
        algorithm: partial(exchange.all_reduce, algorithm=algorithm) for algorithm in ALGORITHMS
    }
    by |= {"reduce_scatter": exchange.reduce_scatter, "all_gather": exchange.all_gather}
    for name, collective in by.items():
        what = f"by {name}" if name in ALGORITHMS else name
        test = f"exchange {CODEC} {what} in one kernel"
        if group.size() < 2:
            yield Finding(test, UNTESTED, True)
            continue
        try:
            yield _checked(test, name, collective, group, device)
        except (CommpassError, RuntimeError) as error:
            why = " ".join(str(error).split())[:200]
            instead = "all_reduce" if name in ALGORITHMS else name
            yield Finding(test, f"no: {why}", False, f"use commpass.{instead}")


def _checked(
    test: str, name: str, collective: Collective, group: dist.ProcessGroup, device: torch.device
) -> Finding:
    ranks = group.size()
    numel = NUMEL // ranks * ranks if name == "reduce_scatter" else NUMEL
    x = _values(group.rank(), numel).to(device)
    made = collective(x, group, CODEC).float().cpu()
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, made.numpy().tobytes(), group)
    handed = torch.stack([_values(rank, numel).double() for rank in range(ranks)])
    exact = handed.flatten() if name == "all_gather" else handed.sum(0)
    if name == "reduce_scatter":
        exact = exact.reshape(ranks, -1)[group.rank()]
    error = float((made.double() - exact).norm() / exact.norm())
    alike = len(set(every)) == 1 or name == "reduce_scatter"
    right = error < TOLERATED
    state = f"error {error:.1e}" if alike else "ranks hold different bits"
    return Finding(test, state, alike and right, "" if alike and right else "do not use it")


TOLERATED = 0.02
"""The largest relative error of a sum of normal values: int8 has 0.006, two hops 0.009."""


def _values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).bfloat16()


@dataclass(frozen=True)
class Timed:
    """Microseconds of an all_reduce of ``nbytes`` in bfloat16 on the slowest rank, by way; None for
    a way that was not timed."""

    nbytes: int
    us: dict[str, float | None]


def times(group: dist.ProcessGroup, device: torch.device) -> list[Timed]:
    """Time all_reduces by size: the library's, commpass's by two exchanges of the library, and in
    one kernel. Every rank calls it. A way that fails on one rank fails on all."""
    if group.size() < 2:
        return []
    return [
        Timed(nbytes, {name: _timed(call, group, device) for name, call in ways.items()})
        for nbytes in SIZES
        for ways in (_ways(torch.randn(nbytes // 2, device=device).bfloat16(), group),)
    ]


@torch.compile(dynamic=False)
def _two_exchanges(x: Tensor, group: str) -> Tensor:
    return all_reduce(x, group=group, codec=CODEC, algorithm="two_shot")


def _ways(x: Tensor, group: dist.ProcessGroup) -> dict[str, Callable[[], Any] | None]:
    small = x.numel() * x.itemsize <= MOST_BYTES
    return {
        dist.get_backend(group): lambda: dist.all_reduce(x, group=group),
        f"{CODEC}, two exchanges": lambda: _two_exchanges(x, group.group_name),
        **{
            f"{CODEC}, {algorithm} in one kernel": partial(
                exchange.all_reduce, x, group, CODEC, algorithm
            )
            if small
            else None
            for algorithm in ALGORITHMS
        },
    }


def _timed(
    call: Callable[[], Any] | None, group: dist.ProcessGroup, device: torch.device
) -> float | None:
    if call is None:
        return None
    failed = False
    took = [0.0]
    try:
        call()
    except (CommpassError, RuntimeError):
        failed = True
    if any(slowest_of([float(failed)], group, device)):
        return None
    took = []
    for _ in range(RUNS):
        _synchronize(device)
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        _synchronize(device)
        took.append((time.perf_counter() - start) / CALLS * 1e6)
    return round(median(slowest_of(took, group, device)), 1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
