"""Check, then time, the all_reduce that is one kernel, on GPUs.

    python benchmarks/gpu/exchange.py [--ranks 4] [--codecs int8 rotated fp8] [--kib 8 64 1024]
                                      [--repeats 50] [--patience 240] [--json FILE] [--dry]

Each rank is a process. If there are more ranks than GPUs, the ranks take turns, which shows whether
results are right, and nothing about time. Several calls on fresh values are checked, with another
rank late in each, and so are the replays of a CUDA graph: all ranks must hold the same bits. They
are those that the codec's plain form gives on a CPU, or close to them if the codec has a rotation
or a root, which a GPU rounds differently. Times are microseconds per call, the median of five runs
of the slowest rank: `kernel` called from Python, and `graph` replayed. They stand beside torch's
plain all_reduce, by NCCL if each rank has a GPU, else by gloo. With `--dry` there is no GPU: Triton
interprets small tensors over memory that processes share, and nothing is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
BOTH = ("one_shot", "two_shot")
CALLS = 4
LATE_S = 0.05
CLOSE = 0.01
"""The largest relative distance from the plain form, for codecs whose bits a GPU rounds
differently."""


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--codecs", nargs="+", default=["int8", "rotated", "fp8"])
    parser.add_argument("--kib", nargs="+", type=int, default=[8, 32, 128, 512, 1024])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--patience", type=float, default=240, help="seconds before ranks are lost")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    if given.dry:
        os.environ["TRITON_INTERPRET"] = "1"
        given.kib = [4]
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no GPU; --dry runs the kernels in Triton's interpreter")
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    lines = run(given)
    for line in lines:
        print(" ".join(f"{name}={value}" for name, value in line.items()))
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1))
    wrong = [line for line in lines if "error" in line or line.get("right") is False]
    sys.exit(f"{len(wrong)} lines tell of something wrong" if wrong else 0)


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks; return what they report, as far as they got."""
    context = multiprocessing.get_context("spawn")
    folder = Path(tempfile.mkdtemp(prefix="exchange"))
    members = [
        context.Process(target=_member, args=(rank, folder, vars(given)))
        for rank in range(given.ranks)
    ]
    for member in members:
        member.start()
    until = time.time() + given.patience
    for member in members:
        member.join(max(until - time.time(), 0.1))
    lines = []
    for rank, member in enumerate(members):
        if member.is_alive():  # a waiting kernel cannot be stopped, but its process can
            member.kill()
            member.join()
            lines.append({"rank": rank, "error": f"not done in {given.patience:.0f} s"})
        said = folder / f"{rank}.jsonl"
        lines += map(json.loads, said.read_text().splitlines()) if said.exists() else []
    return lines


# --- on a rank ------------------------------------------------------------------------------------


def _member(rank: int, folder: Path, given: dict[str, Any]) -> None:
    def say(**what: Any) -> None:
        with (folder / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"rank": rank, **what}) + "\n")

    try:
        _measure(rank, folder, given, say)
    except BaseException:
        say(error="; ".join(traceback.format_exc().splitlines()[-6:]))
    sys.stdout.flush()
    os._exit(0)  # threads that wait for a dead rank would keep this process alive


def _measure(rank: int, folder: Path, given: dict[str, Any], say: Callable[..., None]) -> None:
    import torch
    import torch.distributed as dist
    from exchanging import mapped, plain

    from benchmarks.gpu.checks import plainly
    from commpass.codecs import codec
    from commpass.lowering.gpu import exchange as device_exchange
    from commpass.lowering.gpu.exchange import Exchange

    ranks, dry = given["ranks"], given["dry"]
    cards = 0 if dry else torch.cuda.device_count()
    device = torch.device("cpu") if dry else torch.device("cuda", rank % cards)
    if not dry:
        torch.cuda.set_device(device)
    by = "nccl" if cards >= ranks and dist.is_nccl_available() else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), ranks)
    backend = f"cpu:gloo,cuda:{by}" if by == "nccl" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None

    def values(numel: int, who: int, call: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(1000 * call + who)
        return torch.randn(numel, generator=random).to(torch.bfloat16)

    for spec in given["codecs"]:
        for algorithm in BOTH:
            for kib in given["kib"]:
                numel = kib * 1024 // 2 - (3 if dry else 0)
                kind = Exchange(algorithm, codec(spec), torch.bfloat16, numel, ranks)
                what = {"codec": spec, "algorithm": algorithm, "kib": kib}
                if dry:
                    space = mapped(folder, device_exchange.capacity_for([kind]))
                else:
                    space, kind = device_exchange.workspace(kind, group, device)
                wanted = []
                for call in range(CALLS):
                    brought = [values(numel, who, call) for who in range(ranks)]
                    wanted.append(plain(codec(spec), algorithm, brought, "sum")[2])
                exact = dry or plainly(codec(spec))
                results = []
                for call in range(CALLS):
                    if rank == call % ranks:
                        time.sleep(LATE_S)
                    made = device_exchange.run(space, kind, values(numel, rank, call).to(device))
                    results.append(made.cpu())
                found = _compared(results, wanted, exact)
                say(**what, check="calls", **found, missing=space.missing())
                if not dry:
                    graph = _graph(
                        space, kind, [values(numel, rank, call) for call in range(CALLS)]
                    )
                    found = _compared(graph["made"], wanted, exact)
                    say(**what, check="graph", **found, missing=space.missing())
                    _time(space, kind, graph["replay"], given["repeats"], by, say, what)
    dist.barrier()


def _compared(made: Sequence[Any], wanted: Sequence[Any], exact: bool) -> dict[str, Any]:
    """Compare the results of several calls with those wanted, and with the other ranks'."""
    import torch
    import torch.distributed as dist

    found, want = torch.stack(list(made)), torch.stack(list(wanted))
    own = hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest()
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, own)
    differ = float((found.view(torch.int16) != want.view(torch.int16)).double().mean())
    far = float((found.double() - want.double()).norm() / want.double().norm())
    right = len(set(every)) == 1 and (differ == 0 if exact else far <= CLOSE)
    return {"right": right, "differ": round(differ, 6), "far": round(far, 6)}


def _graph(space: Any, kind: Any, brought: list[Any]) -> dict[str, Any]:
    """Capture a call in a CUDA graph, and replay it on one input after the other."""
    import torch

    from commpass.lowering.gpu.exchange import run

    x = brought[0].to(space.memory.device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        made = run(space, kind, x)
    results = []
    for values in brought:
        x.copy_(values)
        graph.replay()
        results.append(made.cpu())
    return {"made": results, "replay": graph.replay}


def _time(
    space: Any,
    kind: Any,
    replay: Callable[[], None],
    repeats: int,
    by: str,
    say: Callable[..., None],
    what: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    from commpass.lowering.gpu.exchange import run

    x = torch.randn(kind.numel, device=space.memory.device).to(torch.bfloat16)
    ways: dict[str, Callable[[], Any]] = {
        "kernel": lambda: run(space, kind, x),
        "graph": replay,
        by: lambda: dist.all_reduce(x),
    }
    for name, call in ways.items():
        runs = []
        for _ in range(5):
            x.normal_()
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
            runs.append((time.perf_counter() - start) / repeats * 1e6)
        slowest = torch.tensor([median(runs)], dtype=torch.float64)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, slowest.item())
        if dist.get_rank() == 0:
            say(**what, way=name, us=round(max(every), 1))


if __name__ == "__main__":
    main()
