"""Check collectives in one kernel between GPUs, and time them beside the library's own."""

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

from commpass.collectives import public
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
    """Microseconds of a collective on the slowest rank, by way; None for a way that was not timed.

    Each rank passes ``nbytes`` of bfloat16, or slightly less if the ranks do not divide them.
    """

    kind: str
    nbytes: int
    us: dict[str, float | None]


def times(group: dist.ProcessGroup, device: torch.device) -> list[Timed]:
    """Time collectives by size: the library's, commpass's by exchanges of the library, and in one
    kernel. Every rank calls it. A way that fails on one rank fails on all."""
    if group.size() < 2:
        return []
    found = []
    for kind, ways_of in WAYS.items():
        for nbytes in SIZES:
            numel = nbytes // 2 // group.size() * group.size()
            ways = ways_of(torch.randn(numel, device=device).bfloat16(), group)
            if nbytes > MOST_BYTES:
                ways |= dict.fromkeys(name for name in ways if name.endswith(IN_ONE_KERNEL))
            us = {name: _timed(call, group, device) for name, call in ways.items()}
            found.append(Timed(kind, nbytes, us))
    return found


IN_ONE_KERNEL = "in one kernel"
Ways = dict[str, Callable[[], Any] | None]
"""The ways to carry out one collective, by name."""


@torch.compile(dynamic=False)
def _reduced(x: Tensor, group: str) -> Tensor:
    return public.all_reduce(x, group=group, codec=CODEC, algorithm="two_shot")


@torch.compile(dynamic=False)
def _gathered(x: Tensor, group: str) -> Tensor:
    return public.all_gather(x, group, codec=CODEC)


@torch.compile(dynamic=False)
def _scattered(x: Tensor, group: str) -> Tensor:
    return public.reduce_scatter(x, group=group, codec=CODEC)


def _reductions(x: Tensor, group: dist.ProcessGroup) -> Ways:
    single = {
        f"{CODEC}, {algorithm} {IN_ONE_KERNEL}": partial(
            exchange.all_reduce, x, group, CODEC, algorithm
        )
        for algorithm in ALGORITHMS
    }
    return {
        dist.get_backend(group): lambda: dist.all_reduce(x, group=group),
        f"{CODEC}, two exchanges": lambda: _reduced(x, group.group_name),
        **single,
    }


def _gathers(x: Tensor, group: dist.ProcessGroup) -> Ways:
    whole = x.new_empty(x.numel() * group.size())
    return {
        dist.get_backend(group): lambda: dist.all_gather_into_tensor(whole, x, group=group),
        f"{CODEC}, one exchange": lambda: _gathered(x, group.group_name),
        f"{CODEC} {IN_ONE_KERNEL}": lambda: exchange.all_gather(x, group, CODEC),
    }


def _scatters(x: Tensor, group: dist.ProcessGroup) -> Ways:
    part = x.new_empty(x.numel() // group.size())
    return {
        dist.get_backend(group): lambda: dist.reduce_scatter_tensor(part, x, group=group),
        f"{CODEC}, one exchange": lambda: _scattered(x, group.group_name),
        f"{CODEC} {IN_ONE_KERNEL}": lambda: exchange.reduce_scatter(x, group, CODEC),
    }


WAYS: dict[str, Callable[[Tensor, dist.ProcessGroup], Ways]] = {
    "all_reduce": _reductions,
    "all_gather": _gathers,
    "reduce_scatter": _scatters,
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
