"""Measure what chunks of rows gain in the forward of a tensor-parallel layer.

    python -m benchmarks.netlab --hosts 2 --gbit 1 -- python benchmarks/rows.py [--repeats 9]

The layer is a matmul, its sum over the ranks, a residual and an RMSNorm, and the next matmul.
Torch's own compile, and commpass with no codec and with int8, each in 1, 2 and 4 chunks, alternate
in one loop, each behind a barrier. A time is the median over the repetitions of the slower rank,
and [the fastest, the slowest]. `exposed` is the predicted time for which a rank waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

import commpass

ROWS, WIDTH = 2048, 1024
CODECS: dict[str, dict[str, Any]] = {
    "lossless": {},
    "int8": {"codec": "int8", "algorithm": "two_shot"},
}
CHUNKS = (1, 2, 4)


def layer(x: Any, w: Any, residual: Any, weight: Any, w2: Any) -> Any:
    total = torch.ops._c10d_functional.all_reduce(x @ w, "sum", "0")
    h = residual + torch.ops._c10d_functional.wait_tensor(total)
    return h, (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * weight) @ w2


def compiled(codec: str, chunks: int) -> tuple[Callable[..., Any], float]:
    rule = commpass.Rule(rows=chunks, **CODECS[codec])
    backend = commpass.backend(commpass.Policy(rules=[rule]), profile="ethernet-1g", strict=True)
    made = torch.compile(layer, backend=backend, dynamic=False)
    made(*inputs())
    return made, sum(site.exposed_us for site in commpass.plans()[-1]) / 1e3


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shapes = [(ROWS, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH), (WIDTH,), (WIDTH, WIDTH)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with torch.no_grad():
        every: dict[str, tuple[Callable[..., Any], float]] = {}
        every["inductor"] = torch.compile(layer, dynamic=False), 0.0
        every["inductor"][0](*inputs())
        for codec in CODECS:
            for chunks in CHUNKS:
                every[f"{codec} rows={chunks}"] = compiled(codec, chunks)
        times = measured({name: one for name, (one, _) in every.items()}, options.repeats)
    for name, (_, exposed) in every.items() if dist.get_rank() == 0 else ():
        ms = times[name]
        print(
            f"{name:18} {median(ms):7.1f} ms [{min(ms):.1f}, {max(ms):.1f}],"
            f" exposed {exposed:.1f} ms"
        )
    dist.destroy_process_group()


def measured(every: dict[str, Callable[..., Any]], repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each, of the slower rank."""
    given = inputs()
    times: dict[str, list[float]] = {name: [] for name in every}
    for number in range(repeats + 1):
        for name, one in every.items():
            dist.barrier()
            start = time.perf_counter()
            one(*given)
            took = torch.tensor([(time.perf_counter() - start) * 1e3])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number:
                times[name].append(float(took))
    return times


if __name__ == "__main__":
    main()
