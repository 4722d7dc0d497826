"""Measure how long a Llama takes to compile with every site compressed, against the plain compile.

    python benchmarks/compile_time.py [--layers 8 32] [--codecs int8 rotated] [--lowerings inline
        kernel] [--repeats 3] [--json FILE]

Each row is a separate process with empty caches. It compiles a tensor-parallel Llama on rank 0 of 8
of the fake process group, forward and backward. The time is from the first call to the end of its
first backward. Then the step time of the compiled model is measured, without exchanges (they are
fakes). Expected: with kernels at most 1.25 times the plain compile for 8 layers and 1.15 times for
32, since every site calls the same three functions; inline about 1.8 times. Step time: inline fuses
more, kernels less.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
STEPS = 10


def measure(layers: int, codec: str, lowering: str) -> dict[str, float]:
    """Return the seconds to compile, and the milliseconds of a step afterwards. Runs in a separate
    process."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    import torch.distributed as dist
    from llama import llama, tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import commpass

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    model = tensor(llama(layers=layers, width=256, heads=16), mesh)
    backend: object = "inductor"
    if codec != "plain":
        rule = commpass.Rule(codec=codec, algorithm="two_shot", force=True, lowering=lowering)
        backend = commpass.backend(commpass.Policy(rules=[rule]), strict=True)
    step = torch.compile(lambda x: model(x).logits.float().square().mean(), backend=backend)
    x = torch.randint(0, 256, (1, 128))
    start = time.perf_counter()
    step(x).backward()
    seconds = time.perf_counter() - start
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        step(x).backward()
        times.append(time.perf_counter() - begun)
    plans = commpass.plans()
    sites = sum(len(plan.sites) for plan in plans)
    assert sites == sum(len(plan.compressed) for plan in plans)
    from torch._dynamo.utils import counters

    return {
        "compile_s": seconds,
        "step_ms": median(times) * 1e3,
        "sites": sites,
        "passes_s": counters["commpass"]["passes_us"] / 1e6,
    }


def in_a_process(layers: int, codec: str, lowering: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        own = {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--one", str(layers), codec, lowering]
        done = subprocess.run(
            command, env=os.environ | own, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32], help="models to compile")
    parser.add_argument("--codecs", nargs="+", default=["int8", "rotated"], help="forced codecs")
    parser.add_argument("--lowerings", nargs="+", default=["inline", "kernel"], help="their forms")
    parser.add_argument("--repeats", type=int, default=3, help="processes a row; medians are shown")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        layers, codec, lowering = options.one
        print(json.dumps(measure(int(layers), codec, lowering)))
        return
    import torch
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"a Llama, rank 0 of 8, {os.cpu_count()} cores, torch {torch.__version__}")
    for column in ("codec", "form"):
        table.add_column(column)
    for column in ("sites", "compile s", "spread", "of plain", "passes s", "step ms", "of plain "):
        table.add_column(column, justify="right", no_wrap=True)
    table.caption = "passes: of the compile time, kernels of commpass and torch's headers included"
    rows = []
    ways = [(c, how) for c in options.codecs for how in options.lowerings]
    for layers in options.layers:
        plain: dict[str, float] = {}
        for codec, lowering in [("plain", ""), *ways]:
            found = [in_a_process(layers, codec, lowering) for _ in range(options.repeats)]
            times = [each["compile_s"] for each in found]
            row = {
                "layers": layers,
                "codec": codec,
                "lowering": lowering,
                "sites": found[0]["sites"],
                "compile_s": median(times),
                "spread_s": max(times) - min(times),
                "passes_s": median(each["passes_s"] for each in found),
                "step_ms": median(each["step_ms"] for each in found),
            }
            plain = plain or row
            row["compile_ratio"] = row["compile_s"] / plain["compile_s"]
            row["step_ratio"] = row["step_ms"] / plain["step_ms"]
            rows.append(row)
            table.add_row(
                f"{codec}, {layers} layers",
                lowering,
                str(row["sites"]),
                f"{row['compile_s']:.1f}",
                f"{row['spread_s']:.1f}",
                f"{row['compile_ratio']:.2f}",
                f"{row['passes_s']:.2f}",
                f"{row['step_ms']:.1f}",
                f"{row['step_ratio']:.2f}",
            )
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
    if options.json:
        facts = {
            "date": f"{datetime.date.today()}",
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
