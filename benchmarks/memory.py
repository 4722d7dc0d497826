"""Measure the peak memory that a compressed all_reduce needs beside its input, in tensors.

    python benchmarks/memory.py [--ranks 2 4] [--mib 64] [--codecs int8 int4 rotated bf16]
        [--chunks 0 1 8] [--json FILE]

The peak is that of a rank's resident memory (VmHWM), reset before each call, minus what was
resident before. malloc returns freed memory at once (HEAP). The peak contains the result, so that
plain torch has 1.0: one tensor. The number is the median of three calls after two warm-up calls,
and the largest over the ranks. Chunks 0 is what the cost model chooses on links of 1 Gbit/s. Needs
Linux.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist
from processes import Ranks
from rich.console import Console
from rich.table import Table

import commpass

ops = torch.ops._c10d_functional
Row = dict[str, Any]
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
CALLS = (2, 3)
"""The number of warm-up calls, and of measured calls."""


def plain(x: torch.Tensor) -> torch.Tensor:
    return ops.wait_tensor(ops.all_reduce(x, "sum", "0"))


def resident(peak: bool) -> int:
    """Return the bytes that are resident, or the peak since it was reset."""
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Return the peak of one call above the memory before it, in tensors of the input's size."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident(peak=False)
    function(x)
    return (resident(peak=True) - before) / (x.numel() * x.itemsize)


def measure(codec: str, chunks: int, mib: int) -> Row:
    torch._dynamo.reset()
    x = torch.randn(mib << 18, generator=torch.Generator().manual_seed(dist.get_rank()))
    row: Row = {"codec": codec, "by": "torch"}
    if codec == "plain":
        function = torch.compile(plain, dynamic=False)
    else:
        rule = commpass.Rule(codec=codec, force=True, **({"chunks": chunks} if chunks else {}))
        backend = commpass.backend(
            commpass.Policy(rules=[rule]), profile="ethernet-1g", strict=True
        )
        function = torch.compile(plain, backend=backend, dynamic=False)
    with torch.no_grad():
        found = [peak_of(function, x) for _ in range(sum(CALLS))]
    if codec != "plain":
        (site,) = commpass.plans()[-1]
        row["by"] = f"{site.algorithm} x{site.chunks}, {site.lowering}"
    return row | {"tensors": median(found[CALLS[0] :])}


def show(rows: list[Row]) -> Table:
    table = Table(box=None, title="peak beside the input, in tensors")
    for column in ("ranks", "MiB", "codec", "chunks", "by", "tensors"):
        table.add_column(column, justify="left" if column in ("codec", "by") else "right")
    for row in rows:
        cells = [str(row[key]) for key in ("ranks", "MiB", "codec", "chunks", "by")]
        table.add_row(*cells, f"{row['tensors']:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4", "rotated", "bf16"])
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(HEAP)  # for the ranks, which start after this
    rows = []
    for size in options.ranks:
        members = Ranks(size, workers=2)
        cases = [("plain", 0), *itertools.product(options.codecs, options.chunks)]
        for codec, chunks in cases:
            found = members.run(measure, codec, chunks, options.mib, timeout=600)
            worst = max(found, key=lambda row: row["tensors"])
            named = chunks or "chosen" if codec != "plain" else "-"
            rows.append({"ranks": size, "MiB": options.mib, "chunks": named} | worst)
        members.stop()
    Console(width=120).print(show(rows))
    if options.json:
        said = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "rows": rows,
        }
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
