"""Measure how fast codecs encode and decode, compiled and eager, relative to a copy of the bytes.

    python benchmarks/codecs.py [CODEC ...] [--dtype bfloat16] [--threads 1 2] [--mib 32] [--json
    FILE]

GB/s count the input. `of a copy` is the ratio to `torch.Tensor.copy_` of the input, which reads and
writes every byte once. It is measured again beside every codec, because the load on a machine
changes. The targets are for one core, and for the faster of two forms. `inline` is Inductor's code
for the codec's operators; `kernel` is the C++ of `commpass.lowering.cpu`, if there is one.
`kernels` is the number of kernels that Inductor made. With `pip install 'commpass[bench]'`,
lossless codecs are compared with ZipNN and zstd. Every thread count runs in a separate process,
because code is compiled for one count. The heap keeps its pages; otherwise page faults dominate for
results of 32 MiB and more, for a copy as for a codec.
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
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from commpass.codecs import codec
from commpass.errors import CommpassError
from commpass.report.codecs import DATA, DTYPES

TARGETS = {"int8": 0.6, "fp8": 0.35, "int4": 0.3, "exponent": 0.25, "rotated": 0.25}
CODECS = (
    "int8",
    "int8(stored=bf16)",
    "int6",
    "int4",
    "int2",
    "fp8",
    "fp8(form=e5m2)",
    "rotated",
    "rotated(bits=4)",
    "rotated(form=int)",
    "table(bits=4)",
    "taco",
    "equarx",
    "sdp4bit",
    "tahquant",
    "exponent",
)
REPEATS = 9
WIDTH = 160
"""Columns of the printed table. With fewer, names and numbers are cut off."""
HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def seconds(run: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, float]:
    """Return the median and spread of a call, after two warm-up calls."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times[2:]), max(times[2:]) - min(times[2:])


def row(
    name: str, size: int, copy: float, runs: dict[str, Callable[[], Any]], **more: Any
) -> dict[str, Any]:
    made: dict[str, Any] = {"codec": name, **more}
    for what, run in runs.items():
        middle, spread = seconds(run, 3 if what.startswith("eager") else REPEATS)
        made |= {
            f"{what}_gbs": size / middle / 1e9,
            f"{what}_spread": spread / middle,
            f"{what}_of_copy": copy / middle,
        }
    return made


def by_kernel(spec: str, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Encode and decode with commpass's C++, each into a new tensor; return nothing if there is no
    C++ for the codec."""
    from commpass.lowering import cpu
    from commpass.lowering.chain import Cast, Chain, Decode, Encode

    coder, rows = codec(spec), x.reshape(1, -1)
    encode = Chain(x.dtype, (Encode(coder),))
    decode = Chain(torch.uint8, (Decode(coder, x.dtype), Cast(x.dtype)))
    if cpu.unsupported_reason(encode) or cpu.unsupported_reason(decode):
        return {}
    encoder, decoder = cpu.compile_chain(encode), cpu.compile_chain(decode)
    size = coder.wire_bytes(x.numel(), x.dtype)
    wire = torch.empty((1, size), dtype=torch.uint8)
    encoder([rows], wire, x.numel())
    return {
        "kernel_encode": lambda: encoder([rows], wire.new_empty(1, size), x.numel()),
        "kernel_decode": lambda: decoder([wire], rows.new_empty(1, x.numel()), x.numel()),
    }


def measure(spec: str, x: torch.Tensor, copy: float) -> dict[str, Any]:
    from torch._inductor import metrics

    coder, numel, dtype = codec(spec), x.numel(), x.dtype
    rows = x.reshape(1, -1)
    kernels = {}
    compiled: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    takes = {"encode": rows, "decode": coder.encode_rows(rows)}
    eager = {
        "encode": coder.encode_rows,
        "decode": lambda wire: coder.decode_rows(wire, numel, dtype).to(dtype),
    }
    for what, function in eager.items():
        torch._dynamo.reset()
        metrics.reset()
        compiled[what] = torch.compile(function, dynamic=False)
        compiled[what](takes[what])
        kernels[what] = metrics.generated_kernel_count
    runs = {
        **{what: lambda what=what: compiled[what](takes[what]) for what in compiled},
        **by_kernel(spec, x),
        **{f"eager_{what}": lambda what=what: eager[what](takes[what]) for what in eager},
    }
    bits = coder.bits_per_value(numel, dtype)
    if coder.lossless:
        bits = 8 * coder.encode(x).payload.numel() / numel
    return row(spec, x.nbytes, copy, runs, bits=bits, kernels=kernels)


def others(x: torch.Tensor, copy: float) -> list[dict[str, Any]]:
    """Return other lossless compressors, if they are installed."""
    try:
        import zipnn
        import zstandard
    except ImportError:
        return []
    raw = x.view(torch.uint8).numpy().tobytes()
    made = []
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    nn = zipnn.ZipNN(
        bytearray_dtype=names[x.dtype], input_format="byte", threads=torch.get_num_threads()
    )
    packed = bytes(nn.compress(bytearray(raw)))
    runs = {"encode": lambda: nn.compress(bytearray(raw)), "decode": lambda: nn.decompress(packed)}
    assert bytes(nn.decompress(packed)) == raw
    made.append(row("ZipNN", len(raw), copy, runs, bits=8 * len(packed) / x.numel()))
    for level in (1, 3):
        press, unpress = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        squeezed = press.compress(raw)
        runs = {
            "encode": lambda p=press: p.compress(raw),
            "decode": lambda u=unpress, s=squeezed: u.decompress(s),
        }
        made.append(row(f"zstd -{level}", len(raw), copy, runs, bits=8 * len(squeezed) / x.numel()))
    return made


def work(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.worker)
    dtype = DTYPES[options.dtype]
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            DATA["gaussian"](generator)
            for _ in range(options.mib * 2**20 // (2**20 * dtype.itemsize))
        ]
    ).to(dtype)
    target = torch.empty_like(x)
    copy, spread = seconds(lambda: target.copy_(x))
    rows = []
    for spec in options.codecs or CODECS:
        rows.append(measure(spec, x, seconds(lambda: target.copy_(x))[0]))
    return {
        "threads": options.worker,
        "copy_gbs": x.nbytes / copy / 1e9,
        "copy_spread": spread / copy,
        "rows": rows + others(x, seconds(lambda: target.copy_(x))[0]),
    }


def show(part: dict[str, Any], dtype: str) -> None:
    """Format GB/s and, after the slash, the share of a copy."""
    table = Table(title=f"{dtype}, {part['threads']} thread(s), copy {part['copy_gbs']:.1f} GB/s")
    table.add_column("codec", no_wrap=True)
    columns = ("encode", "kernel_encode", "decode", "kernel_decode")
    for name in ("bits", "target", *columns, "kernels", "eager"):
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for r in part["rows"]:
        table.add_row(
            r["codec"],
            f"{r['bits']:.2f}",
            str(TARGETS.get(r["codec"].partition("(")[0], "")),
            *(
                f"{r[f'{c}_gbs']:.2f}/{r[f'{c}_of_copy']:.2f}" if f"{c}_gbs" in r else ""
                for c in columns
            ),
            f"{r['kernels']['encode']}/{r['kernels']['decode']}" if "kernels" in r else "",
            f"{r['eager_encode_gbs']:.2f}/{r['eager_decode_gbs']:.2f}"
            if "eager_encode_gbs" in r
            else "",
        )
    Console(width=WIDTH).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("codecs", nargs="*")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--mib", type=int, default=64, help="MiB of input")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/codecs.json"))
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.mib, *options.threads) < 1:
        parser.error("--mib and --threads: at least 1")
    try:
        for spec in options.codecs:
            codec(spec)
    except CommpassError as error:
        parser.error(str(error))
    if options.worker:
        print(json.dumps(work(options)))
        return
    parts = []
    for threads in options.threads:
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            *options.codecs,
            "--dtype",
            options.dtype,
        ]
        command += ["--mib", str(options.mib), "--worker", str(threads)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | HEAP
        )
        if done.returncode:
            sys.exit(done.returncode)
        parts.append(json.loads(done.stdout.splitlines()[-1]))
        show(parts[-1], options.dtype)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    options.json.write_text(
        json.dumps({**facts, "dtype": options.dtype, "parts": parts}, indent=1) + "\n"
    )
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
