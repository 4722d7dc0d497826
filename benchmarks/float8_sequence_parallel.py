"""Measure float8 training with sequence parallelism: bytes of its gathers, and time of a step.

    python benchmarks/float8_sequence_parallel.py [--gbit 0.1] [--steps 50] [--dtype bfloat16]
        [--layers 2] [--width 512] [--tokens 512] [--policies off lossless] [--json FILE]

Needs torchao (`pip install 'commpass[dev]'`), and with `--gbit` above 0 Linux and root: both ranks
get a virtual host with a link of that speed (docs/netlab.md). A block normalizes its tokens,
gathers them, and applies two float8 linear layers of torchao with tensorwise scales. Their result
is reduced and scattered. Copies of one model, each under its own policy, take the same steps of
SGD in turn, each behind a barrier. A policy is a preset, or a codec: `raw` and `exponent` are
lossless, `raw/kernel` also names the lowering. `equal` says whether all losses are those of the
first policy, to the bit. Bytes are those that a rank hands to collectives in a step. `network_ms`
is what the plans predict for the exchanges of a step, and `exposed_ms` the part of it for which a
rank is idle (not known under `off`). `cpu_ms` is the median of the processor time of a step, of the
slower rank. Unlike `ms`, it hardly depends on other work of the machine. `ms` is the median over
the steps, [lower and upper quartile], of the slowest rank.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from functional_ops import ag, rs
from processes import Ranks
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import commpass
from benchmarks import netlab
from commpass.policy import PRESETS

POLICIES = ("off", "lossless")
SENT = ("gathers", "gathered_bytes", "scattered_bytes", "network_ms", "exposed_ms")
WARM_UP = 3
quartiles = partial(quantiles, n=4, method="inclusive")
Row = dict[str, Any]


class Gather(torch.autograd.Function):
    """Gather tokens; the gradient is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return ag(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return rs(gradient)


class Scatter(torch.autograd.Function):
    """Reduce and scatter tokens; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rs(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ag(gradient)


class Block(nn.Module):
    """Two linear layers that are split between the ranks, of gathered tokens."""

    def __init__(self, width: int, ranks: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width // ranks, bias=False)
        self.down = nn.Linear(4 * width // ranks, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.up(Gather.apply(self.norm(x))))
        return x + Scatter.apply(self.down(hidden))


def model_of(options: argparse.Namespace, rank: int, ranks: int) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(rank)
    blocks = [Block(options.width, ranks) for _ in range(options.layers)]
    model = nn.Sequential(*blocks).to(getattr(torch, options.dtype))
    return convert_to_float8_training(
        model, config=Float8LinearConfig.from_recipe_name("tensorwise")
    )


def measure(options: argparse.Namespace) -> dict[str, Row]:
    """Return for each policy the losses, the milliseconds of each step, and the bytes sent."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    profile = f"ethernet-{options.gbit or 10:g}g"
    generator = torch.Generator().manual_seed(rank)
    shape = (options.tokens, options.width)
    x = torch.randn(shape, generator=generator).to(getattr(torch, options.dtype))
    steps, found = {}, {}
    for policy in options.policies:
        torch._dynamo.reset()
        model = model_of(options, rank, ranks)
        backend = commpass.backend(policy_of(policy), profile=profile, strict=True)
        compiled = torch.compile(model, backend=backend, dynamic=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        steps[policy] = partial(step, compiled, optimizer, x)
        known = len(commpass.plans())
        found[policy] = {"ms": [], "cpu_ms": [], "losses": [steps[policy]()]}
        sites = [site for plan in commpass.plans()[known:] for site in plan.sites]
        gathers = [site for site in sites if site.kind == "all_gather"]
        sums = [site for site in sites if site.kind == "reduce_scatter"]
        found[policy]["gathers"] = len(gathers)
        found[policy]["gathered_bytes"] = sum(site.wire_bytes for site in gathers)
        found[policy]["scattered_bytes"] = sum(site.wire_bytes for site in sums)
        found[policy]["network_ms"] = sum(site.predicted_us for site in sites) / 1e3
        exposed = sum(site.exposed_us for site in sites) / 1e3
        found[policy]["exposed_ms"] = exposed if policy != "off" else None
    for number in range(1, options.steps):
        for policy in options.policies if number % 2 else reversed(options.policies):
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            found[policy]["losses"].append(steps[policy]())
            if number >= WARM_UP:
                found[policy]["ms"].append((time.perf_counter() - start) * 1e3)
                found[policy]["cpu_ms"].append((time.process_time() - busy) * 1e3)
    return found


def policy_of(name: str) -> str | commpass.Policy:
    """Return a preset by its name, or the policy of one codec and maybe of a lowering."""
    codec, _, lowering = name.partition("/")
    return name if name in PRESETS else commpass.Policy(codecs=codec, lowering=lowering or None)


def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """Take a step, and return its loss."""
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def rows(options: argparse.Namespace) -> list[Row]:
    hosts = {}
    if options.gbit:
        netlab.build(netlab.Network(hosts=2, gbit=options.gbit))
        hosts = {"RANKS_HOST": "host", "GLOO_SOCKET_IFNAME": "eth0"}
    members = Ranks(2, hosts)
    found = members.run(measure, options, timeout=3600)
    members.stop()
    made = []
    for policy in options.policies:
        slowest = [
            max(times) for times in zip(*(each[policy]["ms"] for each in found), strict=True)
        ]
        first = options.policies[0]
        equal = all(each[policy]["losses"] == each[first]["losses"] for each in found)
        one = found[0][policy]
        made.append(
            {
                "policy": policy,
                **{name: one[name] for name in SENT},
                "equal": equal,
                "cpu_ms": max(median(each[policy]["cpu_ms"]) for each in found),
                "ms": quartiles(slowest),
                "last_loss": one["losses"][-1],
            }
        )
    return made


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        low, middle, high = value
        return f"{middle:.1f} [{low:.1f}, {high:.1f}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gbit", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.steps < WARM_UP + 2:
        parser.error(
            f"--steps {options.steps}: at least {WARM_UP + 2}, as the first {WARM_UP} warm up"
        )
    if options.gbit:
        netlab.stand_apart()
    made = rows(options)
    given = {name: value for name, value in vars(options).items() if name != "json"}
    title = ", ".join(f"{name} {value}" for name, value in given.items())
    table = Table(*made[0], title=title, box=None)
    for row in made:
        table.add_row(*map(cell, row.values()))
    Console(width=120).print(table)
    if options.json:
        said = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            **given,
            "rows": made,
        }
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
