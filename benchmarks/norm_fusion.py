"""Measure one kernel for decode, addition and norm, relative to separate kernels.

    python benchmarks/norm_fusion.py [--codec int8] [--tokens 1024] [--hidden 4096]
        [--dtype bfloat16 float32] [--norm rms layer] [--rounds 31] [--json FILE]

All forms compute the same from a wire: the decoded sum over ranks, plus the residual, which is
written, and its norm with a weight.

- `one`: the C++ kernel of the whole chain.
- `two`: the C++ kernel that decodes and adds, then Inductor's norm.
- `three`: the C++ kernel that decodes, Inductor's addition, Inductor's norm.
- `inline`: Inductor's code for all operators, which it fuses as it likes.

`plain` and `plain one` are the addition and the norm of values that were not compressed: Inductor's
code, and one C++ kernel. The forms take turns in each round, on one thread. Times are medians of
processor time in microseconds, with half the range between the quartiles. The heap keeps its pages,
as buffers do in a graph.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from commpass.codecs import codec
from commpass.lowering import cpu
from commpass.lowering.chain import Add, Cast, Chain, Decode, Normalize, Scale, Step, Store

EPS = 1e-5
FORMS = ("one", "two", "three", "inline", "plain", "plain one")
"""Forms in the order of the table; ratios are to `one`, and of `plain` to `plain one`."""
HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def norm_of(h: Tensor, weight: Tensor, kind: str) -> Tensor:
    """The norm of a model, with its casts: RMSNorm as in Llama, or LayerNorm without bias."""
    if kind == "layer":
        return torch.nn.functional.layer_norm(h, weight.shape, weight, None, EPS)
    x = h.to(torch.float32)
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).to(h.dtype)


def norm_steps(dtype: torch.dtype, width: int, kind: str) -> tuple[Step, ...]:
    normalize = Normalize(width, EPS, kind == "layer")
    if kind == "layer":
        return normalize, Scale(width, dtype), Cast(dtype)
    return normalize, Cast(dtype), Scale(width, dtype)


def kernel(
    steps: tuple[Step, ...], first: torch.dtype, like: Tensor
) -> Callable[..., list[Tensor]]:
    """Return the C++ kernel of steps as a function that allocates its results."""
    chain = Chain(first, steps)
    run, stores = cpu.compile_chain(chain), any(isinstance(step, Store) for step in steps)

    def call(*inputs: Tensor) -> list[Tensor]:
        made = [like.new_empty(1, like.numel()) for _ in range(1 + stores)]
        run(inputs, made[0], like.numel(), made[1:])
        return made

    return call


def forms(spec: str, residual: Tensor, kind: str) -> dict[str, Callable[[], Any]]:
    """Return each form as a function without arguments. All give (normalized, sum)."""
    coder, dtype, (_, width) = codec(spec), residual.dtype, residual.shape
    random = torch.Generator().manual_seed(1)
    x = torch.randn(residual.shape, generator=random).to(dtype)
    weight = torch.randn(width, generator=random).to(dtype)
    wire, flat, row = coder.encode_rows(x.reshape(1, -1)), residual.reshape(1, -1), weight[None]
    decode = (Decode(coder, dtype), Cast(dtype))
    norm = norm_steps(dtype, width, kind)
    whole = kernel((*decode, Add(dtype), Store(), *norm), torch.uint8, residual)
    decode_add = kernel((*decode, Add(dtype)), torch.uint8, residual)
    alone = kernel(decode, torch.uint8, residual)
    plain_one = kernel((Add(dtype), Store(), *norm), dtype, residual)
    shape, numel = residual.shape, residual.numel()

    def inline(wire: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = coder.decode_rows(wire, numel, dtype).to(dtype).reshape(shape) + r
        return norm_of(h, w, kind), h

    def plain(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return norm_of(h, w, kind), h

    torch._dynamo.reset()
    inlined = torch.compile(inline, dynamic=False)
    plainly = torch.compile(plain, dynamic=False)
    normed = torch.compile(lambda h, w: norm_of(h, w, kind), dynamic=False)
    added = torch.compile(lambda x, r: x + r, dynamic=False)

    def two() -> tuple[Tensor, Tensor]:
        h = decode_add(wire, flat)[0].view(shape)
        return normed(h, weight), h

    def three() -> tuple[Tensor, Tensor]:
        h = added(alone(wire)[0].view(shape), residual)
        return normed(h, weight), h

    made: dict[str, Callable[[], Any]] = {
        "one": lambda: whole(wire, flat, row),
        "two": two,
        "three": three,
        "inline": lambda: inlined(wire, residual, weight),
        "plain": lambda: plainly(x, residual, weight),
        "plain one": lambda: plain_one(x.reshape(1, -1), flat, row),
    }
    check(made)
    return made


def check(made: dict[str, Callable[[], Any]]) -> None:
    """Raise AssertionError if forms disagree by more than roundings."""
    for pair in (("one", "two", "three"), ("plain", "plain one")):
        first, *rest = (made[name]() for name in pair)
        for other in rest:
            for a, b in zip(first, other, strict=True):
                close = 16 * torch.finfo(a.dtype).eps
                torch.testing.assert_close(a.flatten(), b.flatten(), rtol=close, atol=close)


def times(made: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return microseconds of each form, one of each per round."""
    found: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 2):
        for name, run in made.items():
            start = time.process_time()
            run()
            if number >= 2:
                found[name].append((time.process_time() - start) * 1e6)
    return found


def row(found: dict[str, list[float]], **case: Any) -> dict[str, Any]:
    middle = {name: median(each) for name, each in found.items()}
    spread = {}
    for name, each in found.items():
        low, _, high = quantiles(each, n=4)
        spread[name] = (high - low) / 2
    ratios = {name: middle[name] / middle["one"] for name in ("two", "three", "inline")}
    ratios["plain"] = middle["plain"] / middle["plain one"]
    return {**case, "us": middle, "half_iqr_us": spread, "gain": ratios}


def work(options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = []
    for name in options.dtype:
        for kind in options.norm:
            residual = torch.randn(options.tokens, options.hidden).to(getattr(torch, name))
            found = times(forms(options.codec, residual, kind), options.rounds)
            rows.append(row(found, dtype=name, norm=kind))
    return rows


def show(made: dict[str, Any]) -> None:
    title = "{codec}, {tokens} x {hidden}, one thread: us (gain of one kernel)"
    table = Table(title=title.format(**made))
    for name in ("dtype", "norm", *FORMS):
        table.add_column(name, justify="left" if name in ("dtype", "norm") else "right")
    for each in made["rows"]:
        cells = []
        for name in FORMS:
            text = f"{each['us'][name]:,.0f} ± {each['half_iqr_us'][name]:,.0f}"
            cells.append(text + (f" ({each['gain'][name]:.2f})" if name in each["gain"] else ""))
        table.add_row(each["dtype"], each["norm"], *cells)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--norm", nargs="+", default=["rms", "layer"], choices=["rms", "layer"])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "MALLOC_TOP_PAD_" not in os.environ:  # glibc reads it when a process starts
        command = [sys.executable, *sys.argv]
        sys.exit(subprocess.call(command, env=os.environ | HEAP))
    made = {
        **{key: getattr(options, key) for key in ("codec", "tokens", "hidden", "rounds")},
        "machine": platform.processor() or platform.machine(),
        "rows": work(options),
    }
    show(made)
    if options.json:
        options.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
