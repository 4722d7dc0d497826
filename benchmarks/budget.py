"""Measure the cost of checking error budgets on real values.

    python benchmarks/budget.py [--layers 4] [--steps 100] [--json FILE]

Two ranks on gloo train a tensor-parallel stack of MLPs under int8 and a budget that all sites meet.
Three graphs of it alternate step by step, so that noise affects all alike: one without the check,
one whose check has ended (the operator is in the graph, and returns at once), and one that is
checked on every call. 100 steps of a job are 2 of the last kind and 98 of the second. Expected: at
most 1 % more than 100 steps of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
import types
from pathlib import Path
from statistics import median, quantiles
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
    """The all_reduce after a row-parallel matmul; its gradient is the identity."""

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


KINDS = {"without": 0, "ended": 1, "checked": 1 << 20}
"""Kinds of graphs, by their ``check_calls``. The check of "ended" is over when timing begins."""
CHECKED = 2
"""Calls that are checked, unless a policy sets another number."""


def graphs() -> dict[str, Any]:
    """Return a compiled model of each kind, by name."""
    found = {}
    for name, calls in KINDS.items():
        policy = commpass.Policy(codecs=("int8",), max_error=0.05, check_calls=calls)
        backend = commpass.backend(policy, profile=commpass.ethernet(0.01))

        # A separate code object for each kind: no graph is reused for another kind.
        def function(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
            return model(x, weights)

        compiled = types.FunctionType(function.__code__.replace(co_name=name), globals())
        found[name] = (torch.compile(compiled, backend=backend), backend)
    return found


def seconds(layers: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step, by kind of graph."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(TOKENS, SIZE)
    weights = [torch.randn(SIZE, SIZE) / SIZE**0.5 for _ in range(2 * layers)]
    for weight in weights:
        weight.requires_grad_()
    took: dict[str, list[float]] = {name: [] for name in KINDS}
    each = graphs()
    for step in range(steps + 4):
        for name in sorted(KINDS, key=lambda name: (step + list(KINDS).index(name)) % len(KINDS)):
            compiled, _ = each[name]
            dist.barrier()
            began = time.perf_counter()
            compiled(x, weights).backward()
            took[name].append(time.perf_counter() - began)
    for name, (_, backend) in each.items():
        sites = [site for entry in backend.step_log.entries for site in entry.plan.sites]
        assert [site.codec for site in sites] == ["int8"] * layers
        counts = {each.count for entry in backend.step_log.entries for each in entry.samples.sites}
        assert counts == {min(KINDS[name], steps + 4)}, (name, counts)
    # the first steps compile, and end the check
    return {name: times[4:] for name, times in took.items()}


def run(rank: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = seconds(args.layers, args.steps)
    if rank == 0:
        show(args, found)
    dist.barrier()
    dist.destroy_process_group()


def more(found: dict[str, list[float]], name: str) -> float:
    """Return the seconds that a step of one kind takes beyond the same step without the check (the
    median of the differences)."""
    return median(a - b for a, b in zip(found[name], found["without"], strict=True))


def show(args: argparse.Namespace, found: dict[str, list[float]]) -> None:
    table = Table("graph", "a step, ms (median)", "quartiles", "more, ms (median of pairs)")
    for name, took in found.items():
        low, middle, high = (f"{1e3 * q:.1f}" for q in quantiles(took, n=4))
        table.add_row(name, middle, f"{low} to {high}", f"{1e3 * more(found, name):+.2f}")
    plain = median(found["without"])
    extra = CHECKED * more(found, "checked") + (100 - CHECKED) * more(found, "ended")
    share = extra / (100 * plain)
    checks = CHECKED * more(found, "checked") / (100 * plain)
    Console().print(table)
    print(
        f"100 steps of which {CHECKED} are checked: {share:+.2%} (of it the checks {checks:+.2%})"
    )
    if args.json:
        said = {
            "commpass": "budget",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "layers": args.layers,
            "steps": args.steps,
            "seconds": found,
            "share_of_100_steps": share,
            "share_of_checks": checks,
        }
        args.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, args), nprocs=2)
