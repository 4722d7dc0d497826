"""Measure what simplify saves in a step of a tensor-parallel Llama, and the time of the pass.

    python benchmarks/simplify.py [--steps 20] [--ranks 4] [--inner eager] [--only pass] [--sizes
    100 1000 ...] [--json FILE]

The step: a Llama of width 256 and 4 layers, sharded over the ranks by DTensor, all ranks on this
machine's CPU with gloo. Two compiled copies, without and with simplify, alternate in one run. A
step is forward and backward, between two barriers. Expected: 7 all_reduces per layer become 4, so
that there are 43 % fewer bytes.

The pass: graphs of n nodes for rank 0 of 8 on the fake process group, of four shapes, all of which
the rules change. Expected: linear in n, so that the time per node is the same for all sizes.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import fx

import commpass
from commpass.policy import Policy

WARM_UP = 3
LAYERS, WIDTH, HEADS = 4, 256, 8
BATCH, LENGTH = 4, 128
POLICIES = {"off": Policy(skip=("simplify", "group")), "on": Policy(skip="group")}


# --- the training step ---


def rank_main(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    found = train(options.steps, options.inner)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def train(steps: int, inner: str) -> list[dict[str, Any]]:
    from llama import build, step, tokens

    model = build("tensor", dist.get_world_size(), LAYERS, WIDTH, HEADS)
    batch = tokens("tensor", dist.get_rank(), BATCH, LENGTH)
    compiled, plans = {}, {}
    for name, policy in POLICIES.items():
        seen = len(commpass.plans())
        compiled[name] = torch.compile(
            model, backend=commpass.backend(policy, inner=inner, strict=True), fullgraph=True
        )
        step(compiled[name], model, batch)
        plans[name] = commpass.plans()[seen:]
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    for number in range(WARM_UP + steps):
        for name in POLICIES if number % 2 else reversed(POLICIES):
            dist.barrier()
            start = time.perf_counter()
            step(compiled[name], model, batch)
            dist.barrier()
            if number >= WARM_UP:
                times[name].append((time.perf_counter() - start) * 1e3)
    assert len(commpass.plans()) == sum(len(found) for found in plans.values()), (
        "nothing was compiled while measuring"
    )
    return [summary(name, plans[name], times[name]) for name in POLICIES]


def summary(name: str, plans: list[commpass.Plan], times: list[float]) -> dict[str, Any]:
    sites = [site for plan in plans for site in plan]
    return {
        "simplify": name,
        "steps": len(times),
        "collectives": len(sites),
        "a_layer": len(sites) / LAYERS,
        "bytes": sum(site.bytes for site in sites),
        "predicted_comm_ms": sum(site.predicted_us for site in sites) / 1e3,
        "median_ms": median(times),
        "quarter_ms": sorted(times)[len(times) // 4],
        "three_quarters_ms": sorted(times)[3 * len(times) // 4],
        "fastest_ms": min(times),
        "slowest_ms": max(times),
    }


def measure_step(options: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (options, tempfile.mkdtemp(prefix="ranks"), results)
    ranks = [
        context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(options.ranks)
    ]
    for process in ranks:
        process.daemon = True
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
    return results.get()


# --- the pass itself ---


def reduced(x: torch.Tensor) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", "0"))


def layers(x: torch.Tensor, nodes: int) -> torch.Tensor:
    """Sums of two all_reduces, in sequence, as in the layers of a model."""
    for _ in range(nodes // 8):
        x = (reduced(x.sin()) + reduced(x.cos())).tanh()
    return x


def long_sum(x: torch.Tensor, nodes: int) -> torch.Tensor:
    """One sum of many all_reduces, added from the left."""
    total = reduced(x.sin())
    for number in range(nodes // 4):
        total = total + reduced(x * (number + 2))
    return total


def late_sum(x: torch.Tensor, nodes: int) -> torch.Tensor:
    """The same sum, but all all_reduces come before the first addition, and the last one is added
    first."""
    parts = [reduced(x * (number + 2)) for number in range(nodes // 4)]
    total = parts.pop()
    while parts:
        total = parts.pop() + total
    return total


def gathers(x: torch.Tensor, nodes: int) -> torch.Tensor:
    """Many all_gathers of one value, each followed by a cast."""
    ops = torch.ops._c10d_functional
    value, total = x.sin(), None
    for number in range(nodes // 4):
        part = ops.wait_tensor(ops.all_gather_into_tensor(value, 8, "0")).bfloat16()
        total = part if total is None else (total + part if number % 2 else total * part)
    return total


def sized(
    shape: Callable[[torch.Tensor, int], torch.Tensor], nodes: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: shape(x, nodes)


SHAPES = (layers, long_sum, late_sum, gathers)


def timed(gm: fx.GraphModule) -> tuple[float, int]:
    """Return the milliseconds of processor time of the pass on a graph, and the number of applied
    rules.

    The pass changes the graph.
    """
    from commpass.passes import PASSES, PassContext

    passes = {step.name: step.run for step in PASSES}
    profile = commpass.ethernet(0.001)
    road = passes["discover"](
        PassContext(gm=gm, direction="forward", policy=POLICIES["on"], profile=profile)
    )
    start = time.process_time()
    road = passes["simplify"](road)
    return (time.process_time() - start) * 1e3, len(road.simplified)


def measure_pass(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    from graphs import trace
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    timed(trace(sized(layers, 100), torch.ones(8, 8)))  # so that imports are not measured
    rows = []
    for shape in SHAPES:
        for size in sizes:
            gm = trace(sized(shape, size), torch.ones(8, 8))
            times, applied = [], 0
            for _ in range(repeats if size <= 1000 else 1):
                took, applied = timed(fx.GraphModule(gm, copy.deepcopy(gm.graph)))
                times.append(took)
            nodes = len(gm.graph.nodes)
            facts = {
                "shape": shape.__name__,
                "nodes": nodes,
                "applied": applied,
                "median_ms": median(times),
            }
            rows.append(
                {
                    **facts,
                    "spread_ms": max(times) - min(times),
                    "ms_per_node": median(times) / nodes,
                }
            )
    dist.destroy_process_group()
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(
                f"{v:,}" if isinstance(v, int) else f"{v:.4g}" if isinstance(v, float) else v
                for v in row.values()
            )
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--only",
        choices=("step", "pass"),
        help="measure only the training step, or only the pass itself",
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="measured steps of each kind, at least 10"
    )
    parser.add_argument(
        "--ranks", type=int, default=4, help="1, 2 or 4: the model has four heads of keys"
    )
    parser.add_argument(
        "--inner",
        default="eager",
        help="the compiler behind the passes: eager, aot_eager or inductor",
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 3000, 10_000])
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="of the pass on each graph of up to 1000 nodes; larger ones are measured once",
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/simplify.json"))
    options = parser.parse_args()
    if options.steps < 10:
        parser.error("--steps: at least 10, or the spread says nothing")
    steps = measure_step(options) if options.only != "pass" else []
    if steps:
        show(f"a training step, {options.ranks} ranks, inner {options.inner}", steps)
    passes = measure_pass(options.sizes, options.repeats) if options.only != "step" else []
    if passes:
        show("the pass itself", passes)
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    model = {
        "layers": LAYERS,
        "width": WIDTH,
        "batch": BATCH,
        "length": LENGTH,
        "ranks": options.ranks,
        "inner": options.inner,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({**facts, "model": model, "step": steps, "pass": passes}, indent=1) + "\n"
    )
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
