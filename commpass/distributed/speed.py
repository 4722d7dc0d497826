"""How fast a processor core is here, compared with the one whose rates the cost model has."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from commpass.costmodel.kernels import CPU
from commpass.utils.ambient import making_lasting_tensors

WIDTH = 64
"""The width of matrices that fit in a level-1 cache, so that one core multiplies them."""
TIMES = 50
MOST = 4.0
"""The largest speed that counts."""


@cache
def speed_of_core() -> float:
    """Return how many times as fast as ``costmodel.kernels.CPU`` a core multiplies matrices here.

    It is 1 to ``MOST``, rounded down to a power of the square root of 2, so that it is the same in
    most runs. It is measured once in a process, in about a millisecond.
    """
    operations = 2 * WIDTH**3
    speed = operations / _least_seconds() / 1e9 / CPU.gflops
    steps = math.floor(2 * math.log2(min(max(speed, 1.0), MOST)))
    return float(2 ** (steps / 2))


def _least_seconds() -> float:
    """Return the least time of a product of two matrices on one thread."""
    with making_lasting_tensors(), _one_thread():
        a, b, out = (torch.ones(WIDTH, WIDTH, dtype=torch.float32, device="cpu") for _ in range(3))
        least = math.inf
        for _ in range(TIMES):
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            least = min(least, time.perf_counter() - start)
    return least


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute on one thread: it divides even these small products among four."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
