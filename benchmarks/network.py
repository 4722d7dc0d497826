"""What all_reduce gains on a real network: hosts in namespaces, joined by links of a given rate.

    python benchmarks/network.py [--ranks 2 4] [--gbit 0.1 1 10] [--kib 1024 4096 16384 65536]
        [--codecs bf16 int8 int4 rotated] [--chunks N] [--algorithm SPEC] [--repeats 9]
        [--json FILE]

Needs Linux and root (docs/netlab.md). Every rank is a host of its own; the tensors are float32. A
row is one codec with what the cost model chooses for it on this link, or with the chunks and the
algorithm that are named. It takes turns, in one loop and each behind a barrier, with Inductor's
plain all_reduce of the same values and of the values cast to bfloat16, which anybody has for
nothing. A time is the median over the repetitions, [lower and upper quartile], of the slowest rank.

`ideal` is what the bytes that a rank sends take on its link; `share` how much of the time that is.
`CPU` is the processor time of one rank for one call. Memory is kept by the ranks' malloc and not
given back to the system between calls (HEAP), for all rows alike.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist
from processes import Ranks
from rich.console import Console
from rich.table import Table

import commpass
from benchmarks import netlab
from commpass.collectives import algorithm

HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "PYTHONWARNINGS": "ignore",
    "TORCH_LOGS": "-all",
}
WARM_UP = 3
quartiles = partial(quantiles, n=4, method="inclusive")
ops = torch.ops._c10d_functional
Row = dict[str, Any]


def plain(x: torch.Tensor) -> torch.Tensor:
    return ops.wait_tensor(ops.all_reduce(x * 1.0, "sum", "0"))


def plain_bf16(x: torch.Tensor) -> torch.Tensor:
    return ops.wait_tensor(ops.all_reduce(x.bfloat16(), "sum", "0")).float()


def coded(codec: str, gbit: float, named: dict[str, Any]) -> Any:
    """The compiled all_reduce with a codec, and its planned site."""
    rule = commpass.Rule(codec=codec, force=True, **named)
    backend = commpass.backend(
        commpass.Policy(rules=[rule]), profile=f"ethernet-{gbit:g}g", strict=True
    )
    return torch.compile(plain, backend=backend, dynamic=False)


def measure(
    codecs: list[str], kib: int, gbit: float, named: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """For the plain sums and each codec: milliseconds and processor milliseconds of each
    repetition, and the site as planned."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(kib * 256, generator=generator)
    functions: dict[str, Callable] = {
        "plain": torch.compile(plain, dynamic=False),
        "plain bf16": torch.compile(plain_bf16, dynamic=False),
    }
    found: dict[str, Any] = {name: {} for name in (*functions, *codecs)}
    with torch.no_grad():
        for codec in codecs:
            functions[codec] = coded(codec, gbit, named)
            functions[codec](x)
            (site,) = commpass.plans()[-1]
            found[codec] = {
                "algorithm": site.algorithm,
                "chunks": site.chunks,
                "wire_bytes": site.wire_bytes,
                "predicted_ms": site.predicted_us / 1e3,
                "sent": sum(map(sent, site.stages, itertools.repeat(site.group_size))),
            }
        for name in found:
            found[name] |= {"ms": [], "cpu_ms": []}
        for number in range(WARM_UP + repeats):
            for name, function in functions.items():
                dist.barrier()
                start, busy = time.perf_counter(), time.process_time()
                function(x)
                took, worked = time.perf_counter() - start, time.process_time() - busy
                if number >= WARM_UP:
                    found[name]["ms"].append(1e3 * took)
                    found[name]["cpu_ms"].append(1e3 * worked)
    return found


def sent(stage: Any, ranks: int) -> int:
    """Bytes that leave a rank in one stage."""
    if stage.role != "exchange":
        return 0
    return stage.leaving * (ranks - 1 if stage.kind == "all_gather" else 1)


def rows_of(ranks: int, gbit: float, kib: int, found: list[dict[str, Any]]) -> list[Row]:
    made = []
    for name in found[0]:
        every = [each[name] for each in found]
        ms = quartiles([max(times) for times in zip(*(e["ms"] for e in every), strict=True)])
        whole = 2 * (ranks - 1) / ranks * kib * 1024
        leaves = {"plain": whole, "plain bf16": whole / 2}.get(name) or every[0]["sent"]
        ideal = leaves * 8 / gbit / 1e6
        row = {"ranks": ranks, "gbit": gbit, "KiB": kib, "codec": name, "ms": ms}
        row |= {key: every[0].get(key) for key in ("algorithm", "chunks", "predicted_ms")}
        row |= {"ideal_ms": ideal, "share": ideal / ms[1]}
        row["cpu_ms"] = median([time for e in every for time in e["cpu_ms"]])
        made.append(row)
    base = {row["codec"]: row["ms"][1] for row in made}
    for row in made:
        row["of_plain"] = base["plain"] / row["ms"][1]
        row["of_bf16"] = base["plain bf16"] / row["ms"][1]
    return made


COLUMNS = ("ranks", "Gbit/s", "KiB", "codec", "by", "ms", "predicted", "ideal", "share")
MORE = ("x plain", "x bf16", "CPU ms")


def show(rows: list[Row]) -> Table:
    table = Table(box=None)
    for column in (*COLUMNS, *MORE):
        table.add_column(column, justify="left" if column in ("codec", "by") else "right")
    for row in rows:
        low, middle, high = row["ms"]
        by = f"{row['algorithm']} x{row['chunks']}" if row["algorithm"] else "torch"
        predicted = f"{row['predicted_ms']:.1f}" if row["predicted_ms"] else "-"
        table.add_row(
            *(str(row["ranks"]), f"{row['gbit']:g}", str(row["KiB"]), row["codec"], by),
            f"{middle:.1f} [{low:.1f}, {high:.1f}]",
            *(predicted, f"{row['ideal_ms']:.1f}", f"{row['share']:.2f}"),
            *(f"{row['of_plain']:.2f}", f"{row['of_bf16']:.2f}", f"{row['cpu_ms']:.1f}"),
        )
    return table


def measured(options: argparse.Namespace) -> list[Row]:
    os.environ.update(HEAP)  # of the ranks, which begin after this
    lab = netlab.build(netlab.Network(hosts=max(options.ranks), gbit=max(options.gbit)))
    named = {"chunks": options.chunks, "algorithm": options.algorithm}
    named = {key: value for key, value in named.items() if value}
    made = []
    for ranks in options.ranks:
        members = Ranks(ranks, {"RANKS_HOST": "host", "GLOO_SOCKET_IFNAME": "eth0"}, workers=2)
        for gbit, kib in itertools.product(options.gbit, options.kib):
            for host in range(lab.network.hosts):
                lab.slow(host, gbit)
            job = (measure, options.codecs, kib, gbit, named, options.repeats)
            made += rows_of(ranks, gbit, kib, members.run(*job, timeout=3600))
            Console(width=160).print(show(made[-2 - len(options.codecs) :]))
        members.stop()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1, 10])
    parser.add_argument("--kib", type=int, nargs="+", default=[256, 1024, 4096, 16384, 65536])
    codecs = ["bf16", "int8", "int4", "rotated", "rotated(bits=4)"]
    parser.add_argument("--codecs", nargs="+", default=codecs)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--algorithm")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.algorithm:
        algorithm("all_reduce", options.algorithm)  # raises for what there is not
    netlab.stand_apart()
    rows = measured(options)
    Console(width=160).print(show(rows))
    if options.json:
        said = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "heap": HEAP,
            "rows": rows,
        }
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
