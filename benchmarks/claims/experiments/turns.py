"""Time functions that alternate on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import Any

import torch.distributed as dist

PLAIN = "plain"
"""The baseline: the collective without commpass."""
WARM_UP = 3


def quartiles(times: list[float]) -> list[float]:
    return quantiles(times, n=4, method="inclusive")


def turns(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int,
    late_rank: int = -1,
    late_ms: float = 0,
) -> dict[str, list[float]]:
    """Return quartiles in ms of each function, each call behind a barrier.

    A time is from the start of the rank that starts last to the end of the one that ends last.
    ``late_rank`` sleeps before it starts.
    """
    rank, found = dist.get_rank(), {name: list[float]() for name in functions}
    for number in range(WARM_UP + repeats):
        for name, function in functions.items():
            dist.barrier()
            if rank == late_rank:
                time.sleep(late_ms / 1e3)
            start = time.perf_counter()
            function()
            end = time.perf_counter()
            spans: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(spans, (start, end))
            if number >= WARM_UP:
                last_start, last_end = (max(each[at] for each in spans) for at in (0, 1))
                found[name].append(1e3 * (last_end - last_start))
    return {name: quartiles(times) for name, times in found.items()}
