"""Predict with the cost model when SSFusion's offload and interleaving pay.

    python -m benchmarks.ssfusion_parts [--json FILE]

It uses two models of the paper, by the shapes of their gradients. The time of a selection, on a GPU
and on the CPU, is from the paper's table III, interpolated between its sizes. Backward does as many
operations per parameter as it has tokens, twice each for weights and inputs, at ``TFLOPS``, an
assumption. Plans are those of ``commpass.parallel.ssfusion``, forced to be sparse; ``+`` adds one
part to fusion and density-aware selection. A time is the predicted end of the last exchange.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from commpass.codecs import codec
from commpass.costmodel import Link
from commpass.costmodel.buffers import Gradient
from commpass.parallel.ssfusion.measure import Rate
from commpass.parallel.ssfusion.plan import FusionPlan, Settings, make

TABLE_III = (2_500, 25_000, 250_000, 2_500_000)
"""Numbers of float32 entries: 10 KB to 10,000 KB."""
ON_GPU = Rate(TABLE_III, (850.0, 890.0, 1060.0, 1820.0))
ON_CPU = Rate(TABLE_III, (1490.0, 1810.0, 3220.0, 8740.0))
TFLOPS = 50.0
TOKENS = 32 * 384
ALPHA_US = 5.0
RATES = (1.25, 25.0)
"""In GB/s: 10 and 200 Gbit/s."""
RANKS = (8, 64)
WAYS = {
    "fusion": {"interleave": False, "offload": False},
    "+ interleaved": {"offload": False},
    "+ offload": {"interleave": False},
    "both": {},
}


def transformer(layers: int, width: int, embedding: int) -> list[int]:
    """Return the number of entries of each gradient of an encoder or decoder, in the order of
    backward."""
    layer = [width, width, width, 4 * width * width, 4 * width, 4 * width * width, width, width]
    layer += [width, width * width] + [width, width * width] * 3
    return [width, width, *layer * layers, width, width, 512 * width, embedding * width]


MODELS = {
    "BERT-large": transformer(24, 1024, 30_522),
    "GPT2-large": transformer(36, 1280, 50_257),
}


def gradients(entries: Sequence[int]) -> list[Gradient]:
    """Return the gradients with their times."""
    found = []
    for number, each in enumerate(entries):
        backward = 4e-6 * TOKENS * each / TFLOPS if each > 1e5 else 0.0
        select, offload = ON_GPU.of(each), ON_CPU.of(each)
        found.append(Gradient(str(number), each, 4, backward, select, offload))
    return found


@cache
def row_bytes(entries: int, density: float) -> int:
    return codec("dgc", density=density).wire_bytes(entries, torch.float32)


def planned(entries: Sequence[int], ranks: int, rate: float, **asked: Any) -> FusionPlan:
    settings = Settings(force=True, **asked)
    return make(gradients(entries), ranks, Link(ALPHA_US, rate), row_bytes, settings)


def rows() -> list[dict[str, Any]]:
    found = []
    for model, entries in MODELS.items():
        for ranks in RANKS:
            for rate in RATES:
                row: dict[str, Any] = {"model": model, "ranks": ranks, "gbit": 8 * rate}
                for way, asked in WAYS.items():
                    plan = planned(entries, ranks, rate, **asked)
                    row[way] = plan.end_us / 1e3
                    row[f"{way}: offloaded"] = sum(each.offloaded for each in plan.sparse)
                    row[f"{way}: reduced"] = sum(m.kind == "all_reduce" for m in plan.messages)
                    row[f"{way}: whole"] = len(entries) - len(plan.sparse)
                row["dense"] = plan.dense_us / 1e3
                row["backward"] = sum(each.backward_us for each in gradients(entries)) / 1e3
                found.append(row)
    return found


def table(found: Sequence[dict[str, Any]]) -> Table:
    made = Table(box=None)
    names = ("model", "ranks", "gbit", "backward", "dense", *WAYS)
    for name in (*names, "reduced", "offloaded", "whole"):
        made.add_column(name, justify="left" if name == "model" else "right")
    for row in found:
        cells = [row[name] for name in names]
        cells += [row[f"both: {name}"] for name in ("reduced", "offloaded", "whole")]
        made.add_row(*(f"{each:.1f}" if isinstance(each, float) else str(each) for each in cells))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ssfusion_parts", description=__doc__
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = rows()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    Console(width=160).print(table(found))


if __name__ == "__main__":
    main()
