"""Measure how long commpass's passes take, against Inductor's whole compile of the same graph.

    python benchmarks/passes.py [--sizes 10 100 1000] [--repeats 3] [--codec int8] [--json FILE]
    python benchmarks/passes.py --alone 100 1000 10000

A graph of n collectives (a matmul, a relu and an all_reduce each, every one compressed) is compiled
for rank 0 of 8 on the fake process group, with Inductor's caches off. Expected: linear in n, and at
most 5 % of the compile. ``--alone`` runs the passes without Inductor, on that graph and on one of n
gradients that are summed while others are computed, with the cost model's choice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import commpass
from commpass.passes import PassContext, run
from commpass.policy import Policy
from commpass.policy.rules import Rule

WIDTH = 128


def model(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    for weight in weights:
        x = ops.wait_tensor(ops.all_reduce(torch.relu(x @ weight), "sum", "0"))
    return x


def compile_once(collectives: int, codec: str) -> dict[str, float]:
    """Return the seconds of one cold compile, and of each pass in it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    policy = (
        Policy(rules=[Rule(codec=codec, force=True)])
        if codec != "none"
        else Policy(off=True, name="off")
    )
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(collectives)]
    start = time.perf_counter()
    with torch.no_grad():
        torch.compile(model, backend=commpass.backend(policy))(torch.randn(64, WIDTH), weights)
    whole = time.perf_counter() - start
    assert counters["commpass"]["compressed"] == (collectives if codec != "none" else 0)
    return {"whole_s": whole, "passes_s": counters["commpass"]["passes_us"] / 1e6}


def measure(collectives: int, codec: str, repeats: int) -> dict[str, Any]:
    runs = [compile_once(collectives, codec) for _ in range(repeats)]
    passes, whole = [run["passes_s"] for run in runs], [run["whole_s"] for run in runs]
    return {
        "collectives": collectives,
        "codec": codec,
        "repeats": repeats,
        "passes_s": median(passes),
        "passes_spread_s": max(passes) - min(passes),
        "whole_s": median(whole),
        "whole_spread_s": max(whole) - min(whole),
        "share": median(p / w for p, w in zip(passes, whole, strict=True)),
        "ms_per_collective": median(passes) / collectives * 1e3,
    }


def chain(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """A graph in which each collective depends on the one before."""
    return model(x, weights)


def gradients(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """A graph of independent collectives, which can overlap with the computation of the
    gradients."""
    ops, found = torch.ops._c10d_functional, []
    for weight in weights:
        x = x @ weight
        found.append(ops.wait_tensor(ops.all_reduce(x.t() @ x, "sum", "0")))
    return found


def passes_alone(graph: Callable[..., Any], collectives: int) -> dict[str, Any]:
    """Return the seconds of each pass on a traced graph, on a link of 1 Gbit/s."""
    with FakeTensorMode():
        weights = [torch.randn(8 * WIDTH, 8 * WIDTH) for _ in range(collectives)]
        gm = make_fx(graph)(torch.randn(2 * WIDTH, 8 * WIDTH), weights)
    road = PassContext(
        gm=gm,
        direction="backward",
        policy=Policy(codecs=("int8", "bf16"), max_error=0.02),
        profile=commpass.ethernet(1),
        kernels=True,
        hidden={},
        hides=True,
    )
    start = time.perf_counter()
    found = run(road, "0", strict=True)
    whole = time.perf_counter() - start
    assert found.plan.compressed
    return {
        "graph": graph.__name__,
        "collectives": collectives,
        "sites": len(found.plan.sites),
        "nodes": len(gm.graph.nodes),
        "seconds": whole,
        "by_pass_s": {name: ms / 1e3 for name, ms in found.times_ms.items()},
    }


def print_alone(rows: list[dict[str, Any]]) -> None:
    table = Table(title="passes alone: seconds, and milliseconds for each site")
    names = list(rows[0]["by_pass_s"])
    for name in ("graph", "collectives", "sites", "nodes", "seconds", "ms each", *names):
        table.add_column(name, justify="right")
    for row in rows:
        each = [row["seconds"] * 1e3 / row["sites"], *row["by_pass_s"].values()]
        counts = (str(row[name]) for name in ("collectives", "sites", "nodes"))
        shown = (f"{value:.2f}" for value in (row["seconds"], *each))
        table.add_row(row["graph"], *counts, *shown)
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each size up to 100; larger ones run once"
    )
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/passes.json"))
    parser.add_argument("--alone", type=int, nargs="+", default=[], metavar="N")
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    torch._dynamo.config.recompile_limit = 10_000
    # so that imports and the start of worker processes are not measured
    compile_once(1, options.codec)
    if options.alone:
        passes_alone(chain, 3)  # nor kernels that are compiled once
        pairs = [(graph, many) for graph in (chain, gradients) for many in options.alone]
        alone = [passes_alone(graph, many) for graph, many in pairs]
        print_alone(alone)
        write(options.json, alone)
        return
    table = Table(title=f"passes against the whole compile, codec {options.codec}")
    for name in ("collectives", "passes s", "spread", "compile s", "spread", "share", "ms each"):
        table.add_column(name, justify="right")
    rows = []
    for size in options.sizes:
        row = measure(size, options.codec, options.repeats if size <= 100 else 1)
        rows.append(row)
        table.add_row(
            str(size),
            f"{row['passes_s']:.3f}",
            f"{row['passes_spread_s']:.3f}",
            f"{row['whole_s']:.1f}",
            f"{row['whole_spread_s']:.1f}",
            f"{row['share']:.1%}",
            f"{row['ms_per_collective']:.2f}",
        )
    Console().print(table)
    write(options.json, rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
