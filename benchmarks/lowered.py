"""Report registers, spills, shared memory and occupancy of every generated kernel. Needs no GPU.

    python benchmarks/lowered.py [CODEC ...] [--arch sm_90 ...] [--dtype bfloat16] [--ranks 8]
        [--json benchmarks/results/lowered.json]

The report is for every architecture, and also has the share of a copy's bandwidth that the kernel's
instructions allow. The share is a bound, not a measurement: no kernel is faster (see
`commpass/lowering/inspect/roofline.py`). Rows of codecs and architectures that are not named stay
in the file unchanged. It takes some minutes for each architecture.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from commpass.lowering.inspect.architectures import ARCHITECTURES
from commpass.lowering.inspect.kernels import NAMES
from commpass.report.lower import KernelQuery, as_jsons, rows_of

CODECS = (
    "int8",
    "int6",
    "int4",
    "int2",
    "fp8",
    "rotated",
    "rotated(bits=4)",
    "table(bits=4)",
    "taco",
    "equarx",
    "sdp4bit",
    "tahquant",
    "exponent",
    "ecq",
    "topk",
)
RESULTS = Path(__file__).parent / "results" / "lowered.json"


def measured(codec: str, arch: str, dtype: str, ranks: int) -> list[dict[str, Any]]:
    """Return the kernels of a codec on an architecture, or the reason if it has none."""
    about = {"codec": codec, "arch": arch, "dtype": dtype, "ranks": ranks}
    queries = (KernelQuery(codec, name, dtype, ranks) for name in NAMES)
    return [about | data for query in queries for data in as_jsons(rows_of(query, arch)[1])]


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(box=None)
    for header in ("codec", "kernel", "arch", "registers", "spills B", "shared", "occupancy"):
        made.add_column(header, no_wrap=True)
    made.add_column("share of a copy", no_wrap=True)
    for row in rows:
        names = [row["codec"], row["kernel"], row["arch"]]
        if "why" in row:
            made.add_row(*names, "-", "-", "-", "-", row["why"])
            continue
        shares = [f"{each['card']} {each['share']:.2f} {each['limit']}" for each in row["cards"]]
        numbers = [row["registers"], row["spills"], row["shared"], f"{row['occupancy']:.0%}"]
        style = "red" if row["spills"] else ""
        made.add_row(*names, *map(str, numbers), ", ".join(shares) or "-", style=style)
    return made


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("codec", "arch", "dtype", "ranks"))


def written(path: Path, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all rows of the file, with the new rows in place of the earlier ones."""
    done = set(map(key, made))
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    file = {
        "date": time.strftime("%Y-%m-%d"),
        "triton": metadata.version("triton"),
        "torch": metadata.version("torch"),
        "rows": sorted([row for row in before if key(row) not in done] + made, key=key),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(file, indent=1) + "\n")
    return file["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", default=CODECS)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for arch in asked.arch:
        for codec in asked.codecs:
            made = measured(codec, arch, asked.dtype, asked.ranks)
            rows = written(asked.json, made)
            Console(stderr=True).print(f"{time.perf_counter() - start:5.0f} s  {arch} {codec}")
    Console(width=180).print(table(rows))


if __name__ == "__main__":
    main()
