"""Measure what fusing small all_reduces saves, and what the copies for it cost.

    python benchmarks/group.py [--ranks 2] [--gbit 0 1 10] [--tensors 32] [--kib 16]
        [--repeats 50] [--json FILE]

With `--gbit 0` the ranks are on this machine, over loopback. Any other number needs Linux and root:
every rank gets a virtual host with a link of that speed (docs/netlab.md). The tensors are float32
inputs of one compiled function, which starts all of their all_reduces, then waits for them. Two
compiled copies, without and with the pass `group`, alternate in one loop, each behind a barrier. A
time is the median over the repetitions, [lower and upper quartile], of the slowest rank. gloo has
one worker. With two workers and many small exchanges in flight it may fail (docs/collectives.md).

`copies` are the same tensors joined by one compiled function and split by another, in one process;
GB/s count each byte once.
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
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from processes import Ranks
from rich.console import Console
from rich.table import Table

import commpass
from benchmarks import netlab
from commpass.policy import Policy

WARM_UP = 5
POLICIES = {"apart": Policy(group_bytes=0), "grouped": Policy()}
quartiles = partial(quantiles, n=4, method="inclusive")
ops = torch.ops._c10d_functional
Row = dict[str, Any]


def inputs(tensors: int, kib: int) -> list[torch.Tensor]:
    return [torch.randn(kib * 256) for _ in range(tensors)]


# --- exchanges ------------------------------------------------------------------------------------


def reduced(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    starts = [ops.all_reduce(x, "sum", "0") for x in xs]
    return [ops.wait_tensor(start) for start in starts]


def measure(tensors: int, kib: int, gbit: float, repeats: int) -> dict[str, Row]:
    """Return for each policy the milliseconds of each repetition on this rank, and the plan."""
    import torch.distributed as dist

    profile = f"ethernet-{gbit or 10:g}g"
    xs, functions, found = inputs(tensors, kib), {}, {}
    with torch.no_grad():
        for name, policy in POLICIES.items():
            torch._dynamo.reset()
            backend = commpass.backend(policy, profile=profile, strict=True)
            functions[name] = torch.compile(reduced, backend=backend, dynamic=False)
            functions[name](xs)
            plan = commpass.plans()[-1]
            predicted = sum(site.predicted_us for site in plan) / 1e3
            found[name] = {"exchanges": len(plan.sites), "predicted_ms": predicted, "ms": []}
        for number in range(WARM_UP + repeats):
            for name in POLICIES if number % 2 else reversed(POLICIES):
                dist.barrier()
                start = time.perf_counter()
                functions[name](xs)
                if number >= WARM_UP:
                    found[name]["ms"].append((time.perf_counter() - start) * 1e3)
    return found


def exchanges(options: argparse.Namespace) -> list[Row]:
    made = []
    links = [gbit for gbit in options.gbit if gbit]
    lab = netlab.build(netlab.Network(hosts=options.ranks, gbit=max(links))) if links else None
    for gbit in options.gbit:
        hosts = {"RANKS_HOST": "host", "GLOO_SOCKET_IFNAME": "eth0"} if gbit else {}
        for host in range(options.ranks) if lab and gbit else ():
            lab.slow(host, gbit)
        members = Ranks(options.ranks, hosts)
        job = (measure, options.tensors, options.kib, gbit, options.repeats)
        found = members.run(*job, timeout=3600)
        members.stop()
        for name in POLICIES:
            slowest = map(max, zip(*(each[name]["ms"] for each in found), strict=True))
            row = {"ranks": options.ranks, "gbit": gbit, "group": name, **found[0][name]}
            made.append(row | {"ms": quartiles(list(slowest))})
    return made


# --- copies ---------------------------------------------------------------------------------------


def joined(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(xs)


def parted(line: torch.Tensor, tensors: int) -> list[torch.Tensor]:
    return [part.clone() for part in line.chunk(tensors)]


def copies(options: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(1)
    xs = inputs(options.tensors, options.kib)
    work = {
        "join": partial(torch.compile(joined, dynamic=False), xs),
        "part": partial(torch.compile(parted, dynamic=False), torch.cat(xs), options.tensors),
    }
    made = []
    for name, function in work.items():
        times = []
        for number in range(WARM_UP + 10 * options.repeats):
            start = time.perf_counter()
            function()
            if number >= WARM_UP:
                times.append((time.perf_counter() - start) * 1e6)
        us = quartiles(times)
        rate = options.tensors * options.kib * 1024 / us[1] / 1e3
        made.append({"copies": name, "us": us, "gbytes_per_s": rate})
    return made


# --- output ---------------------------------------------------------------------------------------


def show(title: str, rows: list[Row]) -> None:
    table = Table(title=title, box=None)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(cell, row.values()))
    Console(width=120).print(table)


def cell(value: Any) -> str:
    if isinstance(value, list):
        low, middle, high = value
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gbit", type=float, nargs="+", default=[0, 1, 10])
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--kib", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if any(options.gbit):
        netlab.stand_apart()
    what = f"{options.tensors} tensors of {options.kib} KiB"
    made = {"exchanges": exchanges(options), "copies": copies(options)}
    for title, rows in made.items():
        show(f"{title}: {what}", rows)
    if options.json:
        said = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "tensors": options.tensors,
            "kib": options.kib,
            **made,
        }
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
