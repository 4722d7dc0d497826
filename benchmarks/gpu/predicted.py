"""Compare the kernel times of a card's profile with those that were measured on that card.

    python -m benchmarks.gpu.predicted FILE CARD [--json FILE]

``FILE`` is a result of ``benchmarks/gpu/run.py``, and ``CARD`` a name such as ``h100``. The shares
of a copy in ``commpass.costmodel.cards`` were measured on an H200: for any other card, this is what
its data sheet and those shares predict.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from commpass.costmodel.cards import CARDS, SHARES
from commpass.costmodel.kernels import Kernels

MIB = 64
VALUES = MIB * 2**20 // 2
"""Values of a timed kernel: bf16."""
COPY_MIB = 256
SPECS = {"equarx": "equarx(width=1024)"}
"""The codecs whose timings have another name."""


@dataclass(frozen=True)
class Row:
    """A time in microseconds, as predicted and as measured."""

    what: str
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        """The distance of the prediction, relative to the measured time."""
        return self.predicted_us / self.measured_us - 1


def rows(timings: list[dict[str, Any]], kernels: Kernels) -> Iterator[Row]:
    """Yield a copy of 256 MiB, the encode and decode of each codec that was timed, and the
    matmuls."""
    times = {(each["name"], each["what"]): each for each in timings}
    if found := times.get((f"{COPY_MIB} MiB", "copy")):
        us = 2 * COPY_MIB * 2**20 / kernels.gbytes_per_s / 1e3
        yield Row(f"copy of {COPY_MIB} MiB", us, found["us"])
    for name in SHARES:
        rate = kernels.rates[name]
        for way, ns in (("encode", rate.encode_ns), ("decode", rate.decode_ns)):
            if found := times.get((SPECS.get(name, name), f"{way} {MIB} MiB")):
                yield Row(f"{name} {way}", ns * VALUES / 1e3, found["us"])
    for (name, what), found in times.items():
        if what == "torch.mm":
            us = found["us"] * found["tflops"] * 1e3 / kernels.gflops
            yield Row(name, us, found["us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("card", choices=sorted(CARDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = json.loads(options.file.read_text())
    found = list(rows(measured["timings"], CARDS[options.card].kernels))
    table = Table("kernel", "predicted us", "measured us", "error", title=measured["card"])
    for each in found:
        times = f"{each.predicted_us:,.1f}", f"{each.measured_us:,.1f}"
        table.add_row(each.what, *times, f"{each.error:+.0%}")
    errors = [abs(each.error) for each in found]
    console = Console(highlight=False)
    console.print(table)
    console.print(f"median error {median(errors):.1%}, largest {max(errors):.1%}")
    if options.json:
        written = [{**asdict(each), "error": round(each.error, 4)} for each in found]
        content = {"file": options.file.name, "card": options.card, "rows": written}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
