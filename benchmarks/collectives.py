"""Measure the bytes and time of collectives with a codec against torch's plain collectives.

    python benchmarks/collectives.py [--ranks 2] [--kinds KIND ...] [--algorithms SPEC ... | all]
    [--codecs CODEC ...]
                                     [--kib 64 1024 16384] [--dtype bfloat16] [--link GBIT]
                                     [--eager] [--repeats 11] [--graph]
                                     [--json FILE]

Ranks are processes of this machine, one thread each, connected by gloo. If there are fewer cores
than ranks, the ranks take turns at coding. The exchange is a copy through this machine's memory,
which is faster than a network. `--link 1` gives each rank a network link of 1 Gbit/s each way
(root, Linux); `limit` is then the time that the bytes sent to other ranks take on it.

A row is one call on a tensor of the given KiB per rank. The plain collective, the call and the bare
exchange alternate in one loop, each behind a barrier. A time is the median over the repetitions,
[lower and upper quartile], of the slowest rank. `bare` sends the same bytes in the same exchanges
and does nothing else: the least that the algorithm can take here. Codec `plain` is the plain
collective against itself, which shows the noise. Codec `raw` is an algorithm without a codec. A
rank sends `wire_bytes` according to its stages, and `handed` as measured.

With compiled calls, `encode` and `decode` time the compiled codec alone on one rank, for as many
values as the algorithm codes, while the other ranks wait. With `--eager`, `encode` is the
computation before the first exchange, `decode` that after the last one, and `between` that between
exchanges. `waits` is the time spent waiting; `steps` measures it in a separate run. `exponent` is
measured with both orders of its exchanges. It takes a minute to compile on a CPU, so that it must
be named explicitly. `--graph` measures nothing. It lists what Inductor makes of each algorithm on 4
ranks of the fake process group. `copies` are the loops that only load and store. `copied` counts
the bytes that these loops, `cat` and `clone` write, and `allocated` the bytes of `buffers`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import netlab
import torch
import torch.distributed as dist
from processes import Ranks
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

import commpass
from commpass.codecs import codec
from commpass.collectives import Payload, Request, algorithm, read_stages, run
from commpass.costmodel import Link
from commpass.errors import PolicyError
from commpass.plan.stage import Stage
from commpass.report.codecs import DTYPES

ALGORITHMS = {
    "all_reduce": [
        "one_shot",
        "two_shot",
        "two_shot(stage=ag)",
        "two_shot(shards=4)",
        "ring",
        "semi_ring",
        "hierarchical(node=2)",
    ],
    "reduce_scatter": ["direct", "ring", "semi_ring"],
    "all_gather": ["direct"],
    "all_to_all": ["direct"],
}
USUAL, CODECS = ("one_shot", "two_shot", "direct"), ("plain", "int8", "rotated", "rotated(bits=4)")
GRAPH_RANKS, GRAPH_KIB, WARM_UP = 4, 1024, 3
HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "PYTHONWARNINGS": "ignore",
}
ops = torch.ops._c10d_functional
WAIT = ops.wait_tensor.default
quartiles = partial(quantiles, n=4, method="inclusive")
Row = dict[str, Any]
Times = dict[str, list[float]]


def cases(options: argparse.Namespace, ranks: int) -> Iterator[tuple[str, str, str]]:
    """Yield kind, algorithm and codec of all supported combinations for a number of ranks."""
    for kind, code in itertools.product(options.kinds, options.codecs):
        if code == "plain":
            yield kind, "torch", code
            continue
        wanted = ALGORITHMS[kind] if "all" in options.algorithms else options.algorithms
        for name, first in itertools.product(
            wanted, ("static", "sizes") if codec(code).dynamic else ("static",)
        ):
            with suppress(PolicyError):  # this kind has no such algorithm
                chosen = algorithm(kind, name, first=first)
                if chosen.unsupported_reason(codec(code), ranks) is None:
                    yield kind, chosen.spec, code


def plain(kind: str, x: torch.Tensor) -> torch.Tensor:
    ranks = dist.get_world_size()
    even = [x.shape[0] // ranks] * ranks
    known = {
        "all_reduce": (ops.all_reduce, "sum"),
        "reduce_scatter": (ops.reduce_scatter_tensor, "sum", ranks),
        "all_gather": (ops.all_gather_into_tensor, ranks),
        "all_to_all": (ops.all_to_all_single, even, even),
    }
    exchange, *how = known[kind]
    return ops.wait_tensor(exchange(x, *how, "0"))


def call(kind: str, spec: str, code: str, x: torch.Tensor) -> torch.Tensor:
    return (
        plain(kind, x)
        if code == "plain"
        else getattr(commpass, kind)(x, codec=code, algorithm=spec)
    )


class Recorder(TorchDispatchMode):
    """Record the exchanges and waits of an algorithm, so that they can be repeated without anything
    else."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self.seen.append((func, args, result))
        return result

    def again(self) -> None:
        started = {}
        for func, args, result in self.seen:
            if func is WAIT:
                ops.wait_tensor(started.pop(id(args[0])))
            else:
                started[id(result)] = func(*args)


def stages(steps: Any) -> dict[str, float]:
    """Return the milliseconds of one eager run of an algorithm, step by step."""
    marks, arrived = [time.perf_counter()], None
    with suppress(StopIteration):
        while True:
            started = steps.send(arrived)
            marks.append(time.perf_counter())
            arrived = ops.wait_tensor(started)
            marks.append(time.perf_counter())
    took = [
        1e3 * (after - before)
        for before, after in itertools.pairwise([*marks, time.perf_counter()])
    ]
    return {
        "encode": took[0],
        "between": sum(took[2:-1:2]),
        "decode": took[-1],
        "waits": sum(took[1::2]),
    }


def tensor(kib: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(kib * 1024 // DTYPES[dtype].itemsize, generator=generator).to(DTYPES[dtype])


def timed(
    functions: dict[str, Callable[[], Any]], repeats: int, before: Callable[[], Any] = lambda: None
) -> Times:
    """Return the milliseconds of each repetition of alternating functions."""
    times: Times = {name: [] for name in functions}
    for number in range(WARM_UP + repeats):
        for name in functions if number % 2 else reversed(functions):
            before()
            start = time.perf_counter()
            functions[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: some[WARM_UP:] for name, some in times.items()}


def measure(
    kind: str, spec: str, code: str, kib: int, dtype: str, eager: bool, repeats: int
) -> tuple[int, Times]:
    """Return the bytes that this rank sent, and the milliseconds of each repetition of each run."""
    x, recorder, parts = tensor(kib, dtype), Recorder(), []
    request = Request("0", dist.get_world_size(), dist.get_rank())
    with recorder:
        (
            plain(kind, x)
            if code == "plain"
            else run(algorithm(kind, spec).run(x, request, codec(code)))
        )
    keep = (lambda some: some) if eager else partial(torch.compile, dynamic=False, fullgraph=True)
    exact, ours = keep(lambda x: plain(kind, x)), keep(lambda x: call(kind, spec, code, x))
    functions = {"plain": lambda: exact(x), "call": lambda: ours(x), "bare": recorder.again}
    if eager and code != "plain":
        functions["steps"] = lambda: parts.append(
            stages(algorithm(kind, spec).run(x, request, codec(code)))
        )
    times = timed(functions, repeats, dist.barrier)
    times |= {
        name: [part[name] for part in parts[WARM_UP:]] for name in (parts[0] if parts else ())
    }
    return sum(args[0].nbytes for func, args, _ in recorder.seen if func is not WAIT), times


def alone(code: str, kib: int, dtype: str, repeats: int) -> Times:
    """Return the milliseconds of compiled encode and decode on rank 0 while the others wait.

    The tensor has a row for each rank.
    """
    times = {}
    if dist.get_rank() == 0:
        rows, coder = tensor(kib, dtype).reshape(dist.get_world_size(), -1), codec(code)
        encode = torch.compile(coder.encode_rows, dynamic=False)
        decode = torch.compile(
            lambda wire: coder.decode_rows(wire, rows.shape[1], rows.dtype).to(rows.dtype),
            dynamic=False,
        )
        wire = encode(rows)
        times = timed({"encode": lambda: encode(rows), "decode": lambda: decode(wire)}, repeats)
    dist.barrier()
    return times


def measured(options: argparse.Namespace) -> list[Row]:
    os.environ.update(HEAP)  # for the ranks, which start after this
    members = Ranks(
        options.ranks,
        netlab.shaped(options.ranks, options.link) if options.link else None,
        workers=2,
    )
    dtype, made, coding = DTYPES[options.dtype], [], {}
    for (kind, spec, code), kib in itertools.product(cases(options, options.ranks), options.kib):
        found = members.run(
            measure,
            kind,
            spec,
            code,
            kib,
            options.dtype,
            options.eager,
            options.repeats,
            timeout=1800,
        )
        slowest = {
            name: zip(*(times[name] for _, times in found), strict=True) for name in found[0][1]
        }
        ms = {name: quartiles([max(times) for times in some]) for name, some in slowest.items()}
        row = {
            "kind": kind,
            "algorithm": spec,
            "codec": code,
            "KiB": kib,
            "wire_bytes": kib * 1024,
            "handed": found[0][0],
        }
        row |= ms | {f"of_{base}": ms["call"][1] / ms[base][1] for base in ("plain", "bare")}
        work = None
        if code != "plain":
            payload = Payload(kib * 1024 // dtype.itemsize, 1, dtype)
            work = read_stages(kind, spec, code, payload, Request("0", options.ranks))
            assert codec(code).dynamic or work.wire_bytes == row["handed"], (row, work)
            row["wire_bytes"] = work.wire_bytes
            if not options.eager and (code, kib) not in coding:
                coding[code, kib] = members.run(
                    alone, code, kib, options.dtype, options.repeats, timeout=1800
                )[0]
            for name, times in coding.get((code, kib), {}).items():
                share = work.values(name) / payload.numel
                row[name] = [share * took for took in quartiles(times)]
        if options.link:
            handed = Stage(role="exchange", kind=kind, nbytes=row["handed"], leaving=row["handed"])
            hops = (handed,) if work is None else work.exchanges
            link = Link(0.0, options.link / 8)
            row["limit"] = (
                sum(link.time_us(hop.kind, hop.leaving, options.ranks, hop.peers) for hop in hops)
                / 1e3
            )
        made.append(row)
        print(
            f"{kind} {spec} {code} {kib} KiB: {row['call'][1]:.3f} ms, plain"
            f" {row['plain'][1]:.3f} ms",
            flush=True,
        )
    members.stop()
    return made


BYTES = {
    "uint8_t": 1,
    "int8_t": 1,
    "bool": 1,
    "at::BFloat16": 2,
    "at::Half": 2,
    "int16_t": 2,
    "float": 4,
    "int32_t": 4,
}
MOVED = re.compile(r"assert_size_stride\(\w+, (\(.*?\)), .*?'torch\.ops\.aten\.(?:cat|clone)\.")
KERNEL = re.compile(
    r"^(\w+) = async_compile\.cpp_pybinding\(.*?r'''\n(.*?)^'''\)", re.DOTALL | re.MULTILINE
)


def nests(kernel: str) -> list[int]:
    """Return, for each loop nest of a kernel, the bytes that it writes if it only loads and stores,
    else 0."""
    types = {name: kind for kind, name in re.findall(r"([\w:]+)\* (\w*out_ptr\d+)", kernel)}
    found = []
    for nest in re.findall(r"^    \{\n(.*?for\(.*?)^    \}", kernel, re.DOTALL | re.MULTILINE):
        values = re.findall(r"auto tmp\d+ = (.*);", nest)
        targets = {a or b for a, b in re.findall(r"store\((\w+) |^\s*(\w+)\[", nest, re.MULTILINE)}
        copies = values and all("_ptr" in value and "::convert" not in value for value in values)
        trips = math.prod(map(int, re.findall(r"for\(.*?<static_cast<int64_t>\((\d+)L\);", nest)))
        found.append(sum(trips * BYTES[types[name]] for name in targets) if copies else 0)
    return found


def listed(source: str) -> Row:
    """Summarize a graph that Inductor made, without sizes that are known only at run time."""
    kernels, body = dict(KERNEL.findall(source)), source[source.index("def call(") :]
    called = re.findall(r"^\s+(cpp_fused\w*)\(", body, re.MULTILINE)
    loops = [nest for name in called for nest in nests(kernels[name])]
    others = Counter(re.findall(r"[( ](?:torch\.ops\.aten|extern_kernels)\.(\w+)", body))
    buffers = re.findall(r"empty_strided_cpu\((\(.*?\)), \(.*?\), torch\.(\w+)\)", body)
    moved = [
        (shape, "uint8") for shape in re.findall(MOVED, body)
    ]  # the only cat that Inductor leaves to torch is that of bytes
    allocated, copied = (
        sum(
            math.prod(map(int, re.findall(r"\b\d+", shape))) * getattr(torch, dtype).itemsize
            for shape, dtype in some
        )
        for some in (buffers, moved)
    )
    exchanges = len(re.findall(r"torch\.ops\._c10d_functional\.(?!wait)\w+\.default\(", body))
    made = {
        "exchanges": exchanges,
        "kernels": len(called),
        "loops": len(loops),
        "copies": sum(nest > 0 for nest in loops),
    }
    made |= {
        "calls": ", ".join(f"{count} {name}" for name, count in others.items()),
        "buffers": len(buffers),
    }
    return made | {"allocated": allocated, "copied": sum(loops) + copied}


def graphs(options: argparse.Namespace) -> list[Row]:
    from torch._inductor.utils import get_code
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # nothing is compiled, so nothing may be cached
    torch.compiler.config.force_disable_caches = True
    warnings.filterwarnings("ignore", message="dynamo_pgo")
    torch.set_num_threads(1)  # as on the ranks: the loops depend on the number of threads
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GRAPH_RANKS)
    x, made = tensor(GRAPH_KIB, options.dtype), []
    for case in cases(options, GRAPH_RANKS):
        source = get_code(torch.compile(partial(call, *case), dynamic=False, fullgraph=True), x)[0]
        made.append(dict(zip(("kind", "algorithm", "codec"), case, strict=True)) | listed(source))
    return made


def show(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for name, value in rows[-1].items():
        table.add_column(
            name, justify="left" if isinstance(value, str) else "right", no_wrap=name != "calls"
        )
    for r in rows:
        table.add_row(*(shown(r.get(name, ""), name in ("plain", "call")) for name in rows[-1]))
    Console(width=210).print(table)


def shown(value: Any, spread: bool) -> str:
    if isinstance(value, list):
        return f"{value[1]:.3g} \\[{value[0]:.3g} {value[2]:.3g}]" if spread else f"{value[1]:.3g}"
    return (
        f"{value:.2f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else value
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument(
        "--algorithms",
        nargs="+",
        help=f"names with parameters, or all; {' '.join(USUAL)} if left out",
    )
    parser.add_argument(
        "--codecs",
        nargs="+",
        help=f"{' '.join(CODECS)} if left out; raw: the algorithm without a codec",
    )
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--graph", action="store_true", help="list kernels, buffers and copies instead of measuring"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--link",
        type=float,
        metavar="GBIT",
        help="a network with links of so many Gbit/s between the ranks",
    )
    options = parser.parse_args()
    if options.link:
        try:
            netlab.stand_apart()
        except netlab.LabError as error:
            parser.error(f"--link: {error}")
    options.algorithms = options.algorithms or (("all",) if options.graph else USUAL)
    options.codecs = options.codecs or (("int8", "rotated", "raw") if options.graph else CODECS)
    if not list(cases(options, GRAPH_RANKS if options.graph else options.ranks)):
        parser.error(
            "none of these algorithms carries out one of these kinds with one of these codecs on so"
            " many ranks"
        )
    rows = graphs(options) if options.graph else measured(options)
    cores, how = len(os.sched_getaffinity(0)), "eager" if options.eager else "compiled"
    link = f" and are linked by {options.link:g} Gbit/s" if options.link else ""
    title = (
        f"{options.ranks} ranks share {cores} cores of this machine{link}; {options.dtype}, {how};"
        " times in ms"
    )
    show(
        (
            f"Inductor, CPU, {GRAPH_RANKS} ranks, {GRAPH_KIB} KiB of {options.dtype}"
            if options.graph
            else title
        ),
        rows,
    )
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "cores": cores,
    }
    facts |= {
        "ranks": GRAPH_RANKS if options.graph else options.ranks,
        "dtype": options.dtype,
        "eager": options.eager,
        "link": options.link,
    }
    path = options.json or Path(
        f"benchmarks/out/collectives{'_graph' if options.graph else ''}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({**facts, "repeats": options.repeats, "rows": rows}, indent=1) + "\n"
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
