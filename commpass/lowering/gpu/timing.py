"""The time of a kernel call on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from commpass.lowering.gpu.current import on_device

SAMPLES = 10
FLUSHED = 256 << 20
"""Bytes that are written before each call. No cache of a GPU is larger."""
FLUSHES = 4
"""How often they are written. The GPU is busy meanwhile, while the host prepares the call."""


def time_us(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call in microseconds, between two events on the GPU, with its
    input not in a cache.

    The call must have run before, so that it is compiled.
    """
    memory = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    with on_device(device):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(SAMPLES)]
        for start, end in events:
            for _ in range(FLUSHES):
                memory.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
    return 1e3 * median(start.elapsed_time(end) for start, end in events)
