"""Measure the error and bytes of the presets named after papers, beside our own at the same bits.

    python benchmarks/presets.py [--json FILE]

Each codec encodes 2^20 float32 values of three kinds. The first is a Gaussian. The second is
partial sums as a row-parallel layer makes them: heavy-tailed activations, gated, times weights
whose output channels differ. The third has 1,024 channels, of which one in 64 is 30 times as large.
Errors are 2-norms of one encoding, relative to the data. `on 8 ranks` is the predicted error of the
result, by the preset's first algorithm. Lossless codecs get bfloat16, and have no error. The
channels of `outlier` are calibrated on other data of the same kind, with 64 tokens per sequence.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import silu

from commpass.codecs import codec
from commpass.codecs.wrappers.outlier import Running, calibrate
from commpass.collectives import algorithm
from commpass.report.codecs import DATA

TOKENS, WIDTH, SEQUENCE = 1024, 1024, 64
RANKS, NODE = 8, 4
CALIBRATED = "outlier, calibrated"


@dataclass(frozen=True)
class Compared:
    """A preset's codec, its kind and algorithm, and the corresponding preset and codec of our
    own."""

    preset: str
    codec: str
    kind: str
    algorithm: str
    ours: str
    our_codec: str


COMPARED = (
    Compared("taco", "taco", "all_reduce", "two_shot", "balanced", "rotated"),
    Compared("equarx", "equarx", "all_reduce", "ring", "balanced", "rotated"),
    Compared("zipccl", "exponent(planes=3)", "all_gather", "direct", "", "exponent"),
    Compared("lowbit-tp", "int4", "all_reduce", "one_shot", "aggressive", "rotated(bits=4)"),
    Compared("", CALIBRATED, "all_reduce", "one_shot", "aggressive", "rotated(bits=4)"),
    Compared("sdp4bit", "sdp4bit(bits=8)", "reduce_scatter", "direct", "balanced", "rotated"),
    Compared(
        "sdp4bit",
        "sdp4bit",
        "reduce_scatter",
        "hierarchical(between=sdp4bit)",
        "aggressive",
        "rotated(bits=4)",
    ),
    Compared("tahquant", "tahquant", "send", "direct", "aggressive", "rotated(bits=4)"),
)


def student(generator: torch.Generator, *shape: int) -> Tensor:
    """Return samples of Student's t with 3 degrees of freedom."""
    squares = torch.randn(3, *shape, generator=generator).square().sum(dim=0)
    return torch.randn(shape, generator=generator) / (squares / 3).sqrt()


def partial_sums(generator: torch.Generator) -> Tensor:
    """Return what one rank adds to a row-parallel layer's result; the weights are the same for
    every generator.

    The output channels differ by a factor of about 1.3, and one in 64 is larger by another factor
    of two.
    """
    fixed = torch.Generator().manual_seed(1)
    weights = torch.randn(WIDTH, WIDTH, generator=fixed) / WIDTH**0.5
    sizes = torch.exp(0.25 * torch.randn(WIDTH, generator=fixed))
    sizes[11::64] *= 2
    inner = silu(student(generator, TOKENS, WIDTH)) * student(generator, TOKENS, WIDTH)
    return inner @ (weights * sizes)


KINDS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "gaussian": DATA["gaussian"],
    "partial sums": partial_sums,
    "outliers": DATA["outliers"],
}


def values(kind: str, seed: int) -> Tensor:
    return KINDS[kind](torch.Generator().manual_seed(seed)).reshape(TOKENS, WIDTH)


def calibrated(kind: str) -> str:
    """Return the codec of low-bit tensor-parallel inference, with statistics of other data."""
    first, *rest = values(kind, 2).split(SEQUENCE)
    running = Running.start(first)
    for sequence in rest:
        running = running.update(sequence)
    return codec("outlier", statistics=calibrate([running]).to_text()).spec


def measure(name: str, kind: str) -> tuple[float, float]:
    """Return the bits per value and the relative error."""
    coder = codec(calibrated(kind) if name == CALIBRATED else name)
    x = values(kind, 0).to(torch.bfloat16 if coder.lossless else torch.float32)
    wire = coder.encode(x)
    lost = coder.decode(wire).double() - x.double()
    return 8 * wire.payload.numel() / x.numel(), float(lost.norm() / x.double().norm())


def result_error(row: Compared) -> float | None:
    """Return the predicted error of the result; None for the calibrated codec, whose error is not
    known in advance."""
    if row.codec == CALIBRATED:
        return None
    hosts = row.algorithm.startswith("hierarchical")
    chosen = algorithm(row.kind, row.algorithm, **({"node": NODE} if hosts else {}))
    coder = codec("sdp4bit(bits=8)" if hosts else row.codec)
    return chosen.error(coder, RANKS)


def show(rows: list[dict]) -> None:
    table = Table(title="presets by the papers' names, and ours at the same bits")
    headings = ["preset", "codec", "bits", *KINDS, f"on {RANKS} ranks", "ours", "codec", "bits"]
    for name in (*headings, *KINDS):
        table.add_column(name, justify="right" if name in ("bits", *KINDS) else "left")

    def cells(measured: dict) -> list[str]:
        bits = sorted({f"{one['bits']:.2f}" for one in measured.values()})
        return [
            bits[0] if len(bits) == 1 else f"{bits[0]} to {bits[-1]}",
            *(f"{one['error']:.2%}" for one in measured.values()),
        ]

    for row in rows:
        expected = row["result"]
        table.add_row(
            row["preset"],
            row["codec"],
            *cells(row["measured"]),
            "" if expected is None else f"{expected:.2%}",
            row["ours"],
            row["our_codec"],
            *cells(row["our_measured"]),
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/presets.json"))
    options = parser.parse_args()
    names = dict.fromkeys(name for row in COMPARED for name in (row.codec, row.our_codec))
    found = {
        name: {
            kind: dict(zip(("bits", "error"), measure(name, kind), strict=True)) for kind in KINDS
        }
        for name in names
    }
    rows = [
        {
            **asdict(row),
            "result": result_error(row),
            "measured": found[row.codec],
            "our_measured": found[row.our_codec],
        }
        for row in COMPARED
    ]
    show(rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
