"""What the check of error budgets on real values costs, in time and memory.

    python benchmarks/budget.py [--layers 4] [--steps 100] [--rounds 5] [--json FILE]

Two ranks on gloo train a tensor-parallel stack of MLPs for so many steps under int8 and a budget
that all sites keep, with the check (``check_calls=2``) and without, in turns, each in a
fresh compile whose time does not count. Expected: at most 1 % of 100 steps, and no more memory than
the values of one site.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import commpass

ops = torch.ops._c10d_functional
SIZE, TOKENS = 512, 512


class Sum(torch.autograd.Function):
    """The all_reduce after a row-parallel matmul: its gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return ops.wait_tensor(ops.all_reduce(x, "sum", dist.group.WORLD.group_name))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def model(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + Sum.apply(torch.relu(x @ up) @ down)
    return x.square().mean()


def seconds(layers: int, steps: int, calls: int) -> float:
    """Seconds of so many steps, the first call of a compiled graph included and its compile not:
    what is compiled before has other numbers of calls to go."""
    torch._dynamo.reset()
    policy = commpass.Policy(codecs=("int8",), max_error=0.05, check_calls=calls)
    backend = commpass.backend(policy, profile=commpass.ethernet(0.01))
    compiled = torch.compile(model, backend=backend)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(TOKENS, SIZE)
    weights = [torch.randn(SIZE, SIZE) / SIZE**0.5 for _ in range(2 * layers)]
    for weight in weights:
        weight.requires_grad_()
    took = []
    for _ in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        compiled(x, weights).backward()
        took.append(time.perf_counter() - began)
    sites = [site for entry in backend.ledger.entries for site in entry.plan.sites]
    assert [site.codec for site in sites] == ["int8"] * layers
    # The first call compiles, and is not timed: its check takes what that of the second takes.
    return sum(took[1:]) + (took[1] - median(took[5:]) if calls else 0.0)


def run(rank: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(args.rounds):
        for name, calls in (("without", 0), ("with", 2)):
            found[name].append(seconds(args.layers, args.steps, calls))
    if rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        show(args, found, peak)
    dist.barrier()
    dist.destroy_process_group()


def show(args: argparse.Namespace, found: dict[str, list[float]], peak_mib: float) -> None:
    table = Table("check", f"{args.steps} steps, s (median)", "least", "most", "share")
    base = median(found["without"])
    for name, took in found.items():
        share = median(took) / base - 1
        cells = [f"{number:.3f}" for number in (median(took), min(took), max(took))]
        table.add_row(name, *cells, f"{share:+.2%}")
    Console().print(table)
    if args.json:
        said = {
            "commpass": "budget",
            "torch": torch.__version__,
            "processor": platform.processor(),
            "layers": args.layers,
            "steps": args.steps,
            "seconds": found,
            "share": median(found["with"]) / base - 1,
            "peak_mib": peak_mib,
        }
        args.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, args), nprocs=2)
