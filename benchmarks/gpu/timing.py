"""Time kernels on a GPU, with a copy of as many bytes in the same run as their limit.

Calls are captured in a CUDA graph, one after the other, over different buffers that together are
larger than the L2 cache. Their results are kept, so that no two calls write to the same memory. A
sample is the time of one replay between two events, over the number of its calls.
"""

from __future__ import annotations

import subprocess
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checks import CODECS
from benchmarks.gpu.others import module, said, small
from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.domain import VALUES
from commpass.codecs.block.scales import row_numbers
from commpass.codecs.block.transforms import Hadamard
from commpass.lowering.chain import Cast, Chain, Decode, Encode, Enter, Sum
from commpass.lowering.matmul import Product

MIB = 1 << 20
SAMPLES = 30
WARM_UP = 5
CALLS = 16
"""The least number of calls in a graph: the cost of an event is then a small part of a sample."""
L2 = 60 * MIB
"""The largest L2 cache of the GPUs that this supports: an H200's."""
COPIED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""MiB of bf16 that are copied; other sizes are interpolated."""
SHOWN = (16, 64, 256)
SIZES = (64, 4)
"""MiB of bf16 that are encoded."""
CHOSEN = ("gaussiank", "dgc", "redsync", "topk")
PLAIN, ROTATED, LOSSLESS, SPARSE = 0.90, 0.85, 0.70, 0.70
"""Goals: shares of the speed of a copy of the same bytes."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Time:
    """The time of one call: the median in seconds, and the spread.

    The spread is that of the middle four fifths of samples, as a share of the median. ``by`` tells
    how it was measured.
    """

    seconds: float
    spread: float
    by: str

    @property
    def us(self) -> float:
        return self.seconds * 1e6


def measured(bench: Bench, calls: Sequence[Call]) -> Time | None:
    """Return the time of one of the calls. Without a GPU, run each once and return None."""
    for call in calls[:2]:
        call()
    if bench.dry:
        return None
    torch.cuda.synchronize()
    many = [calls[i % len(calls)] for i in range(max(CALLS, len(calls)))]
    try:
        return _of(_replays(many), len(many), "graph")
    except Exception as error:  # a call that reads a number on the host cannot be captured
        torch.cuda.synchronize()
        lines = str(error).splitlines()
        bench.note("timed call by call", lines[0] if lines else repr(error))
    return _of(_singles(calls), 1, "events")


def _of(samples: Sequence[float], calls: int, by: str) -> Time:
    """Return the time for ``samples`` in milliseconds."""
    middle = median(samples)
    tenths = quantiles(samples, n=10)
    return Time(middle / calls / 1e3, (tenths[-1] - tenths[0]) / middle, by)


def _replays(calls: Sequence[Call]) -> list[float]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    for _ in range(WARM_UP):
        graph.replay()
    samples = [_between(graph.replay) for _ in range(SAMPLES)]
    del kept, graph
    torch.cuda.empty_cache()  # each graph has its own pool
    return samples


def _singles(calls: Sequence[Call]) -> list[float]:
    """Time each call between events.

    A write before it fills the L2 cache and keeps the GPU busy while the host prepares the call.
    """
    filler = torch.empty(4 * L2, dtype=torch.uint8, device="cuda")
    samples = []
    for i in range(SAMPLES + WARM_UP):
        for _ in range(4):
            filler.zero_()
        samples.append(_between(calls[i % len(calls)]))
    return samples[WARM_UP:]


def _between(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def sets(bench: Bench, nbytes: int) -> int:
    """Return how many buffers of a size are used in turn."""
    return 1 if bench.dry else min(192, max(4, -(-3 * L2 // nbytes)))


# --- the limit ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """The time of a copy, by the bytes that it reads and writes."""

    times: dict[int, Time]

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for a number of bytes, interpolated linearly between the measured
        sizes."""
        known = sorted(self.times)
        place = min(max(bisect_left(known, nbytes), 1), len(known) - 1)
        (low, high) = known[place - 1 : place + 1]
        first, second = self.times[low].seconds, self.times[high].seconds
        if nbytes < low:
            return first
        return first + (second - first) * (nbytes - low) / (high - low)


def copies(bench: Bench) -> Copies | None:
    """Time copies, and an elementwise kernel that moves the same bytes; keep the faster."""
    both = [_moved(bench, copy) for copy in (True, False)]
    known = [each for each in both[0] if each in both[1]]
    fastest = {n: min((each[n] for each in both), key=lambda time: time.seconds) for n in known}
    return Copies(fastest) if fastest else None


def _moved(bench: Bench, copy: bool) -> dict[int, Time]:
    found = {}
    for mib in COPIED[:1] if bench.dry else COPIED:
        numel = mib * MIB // 2 if not bench.dry else 1024
        xs = [bench.normal(numel, dtype=torch.bfloat16) for _ in range(sets(bench, 4 * numel))]
        calls = [
            partial(torch.empty_like(x).copy_, x)
            if copy
            else partial(torch.neg, x, out=torch.empty_like(x))
            for x in xs
        ]
        time = measured(bench, calls)
        if time is not None:
            found[4 * numel] = time
    return found


def copy(bench: Bench) -> None:
    """Time the limit itself, and report the state of the GPU."""
    bench.note("card", card(bench), **facts(bench))
    for name, by_copy in (("copy", True), ("elementwise", False)):
        for nbytes, time in _moved(bench, by_copy).items():
            mib = nbytes // 4 // (MIB // 2)
            told(bench, f"{mib} MiB", name, time, nbytes, None, shown=mib in SHOWN)
    bench.note("clocks after copies", clocks())


def card(bench: Bench) -> str:
    return torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"


def facts(bench: Bench) -> dict[str, Any]:
    if bench.device.type != "cuda":
        return {"clocks": ""}
    card = torch.cuda.get_device_properties(bench.device)
    return {
        "memory": card.total_memory,
        "multiprocessors": card.multi_processor_count,
        "l2": getattr(card, "L2_cache_size", None),
        "capability": f"{card.major}.{card.minor}",
        "build": f"torch {torch.__version__}, CUDA {torch.version.cuda}",
        "clocks": clocks(),
    }


def clocks() -> str:
    """Return what the driver reports of clocks, power and temperature; "" if it cannot be
    queried."""

    asked = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked},driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def told(
    bench: Bench,
    name: str,
    what: str,
    time: Time | None,
    nbytes: int,
    limit: Copies | None,
    goal: float | None = None,
    **more: Any,
) -> None:
    """Report a time with its share of a copy of the same bytes."""
    if time is None:
        bench.say("timing", name=name, what=what, us=None, bytes=nbytes, **more)
        return
    of_copy = limit.seconds(nbytes) / time.seconds if limit else None
    met = None if goal is None or of_copy is None else of_copy >= goal
    bench.say(
        "timing",
        name=name,
        what=what,
        us=round(time.us, 3),
        spread=round(time.spread, 4),
        by=time.by,
        bytes=nbytes,
        gbs=round(nbytes / time.seconds / 1e9, 1),
        of_copy=None if of_copy is None else round(of_copy, 3),
        goal=goal,
        met=met,
        **more,
    )


# --- block codecs ---------------------------------------------------------------------------------


def blocks(bench: Bench) -> None:
    """Time encode, decode, and decode + sum + encode over 4 and 8 ranks.

    Values that share a message with the codes lie in whole blocks.
    """
    limit = copies(bench)
    for mib in SIZES[:1] if bench.dry else SIZES:
        for spec in CODECS[:2] if bench.dry else CODECS:
            name = f"{spec} {mib} MiB"
            if not bench.late(name):
                with bench.part(f"timing {name}"):
                    _block(bench, spec, mib, limit)
    bench.note("clocks after block codecs", clocks())


def goal_of(coder: BlockCodec) -> float:
    return ROTATED if isinstance(coder.transform, Hadamard) else PLAIN


def _block(bench: Bench, spec: str, mib: int, limit: Copies | None) -> None:
    coder = codec(spec)
    assert isinstance(coder, BlockCodec)
    dtype, numel = torch.bfloat16, 2048 if bench.dry else mib * MIB // 2
    size, goal = coder.wire_bytes(numel, dtype), goal_of(coder)
    moved = numel * dtype.itemsize + size
    xs = [bench.normal(1, numel, dtype=dtype) for _ in range(sets(bench, size))]
    encode = caller(Chain(dtype, (Encode(coder),)), numel)
    time = measured(bench, [partial(encode, x) for x in xs])
    told(bench, spec, f"encode {mib} MiB", time, moved, limit, goal, mib=mib)
    wires = [encode(x) for x in xs]
    decode = caller(Chain(torch.uint8, (Decode(coder, dtype), Cast(dtype))), numel)
    time = measured(bench, [partial(decode, wire) for wire in wires])
    told(bench, spec, f"decode {mib} MiB", time, moved, limit, goal, mib=mib)
    del wires
    inner = coder.domain_codec
    assert isinstance(inner, BlockCodec)
    for ranks in () if row_numbers(inner.scale) else (4, 8):
        per = numel // ranks
        row = inner.wire_bytes(per, dtype)
        entered = () if coder.domain == VALUES else (Enter(coder.domain),)
        encode = caller(Chain(dtype, (*entered, Encode(inner))), per)
        rows = [encode(x.reshape(ranks, per)) for x in xs]
        steps = (Decode(inner, dtype), Sum(ranks), Encode(inner))
        middle = caller(Chain(torch.uint8, steps), per)
        time = measured(bench, [partial(middle, each) for each in rows])
        what = f"decode_sum_encode({ranks}) {mib} MiB"
        told(bench, spec, what, time, (ranks + 1) * row, limit, goal, mib=mib)


def caller(chain: Chain, numel: int) -> Callable[[Tensor], Tensor]:
    from commpass.lowering.gpu import launch

    def call(taken: Tensor) -> Tensor:
        return launch.run(chain, taken, numel)

    return call


# --- others ---------------------------------------------------------------------------------------


def exponent(bench: Bench) -> None:
    """Time both directions, with a Gaussian's exponents. Bytes are those that are used."""
    kernels = module(bench, "exponent")
    if kernels is None:
        return
    limit = copies(bench)
    for planes in (2, 3):
        coder: Any = codec(f"exponent(planes={planes})")
        for mib in SIZES[:1] if bench.dry else SIZES:
            with bench.part(f"timing {coder.spec} {mib} MiB"):
                numel = 2048 if bench.dry else mib * MIB // 2
                xs = [
                    bench.normal(1, numel, dtype=torch.bfloat16)
                    for _ in range(sets(bench, 3 * numel))
                ]
                wires = [kernels.encode_rows(coder, x) for x in xs]
                used = int(coder.used_bytes(wires[0], numel, torch.bfloat16).item())
                moved, more = 2 * numel + used, {"ratio": round(2 * numel / used, 3), "mib": mib}
                time = measured(bench, [partial(kernels.encode_rows, coder, x) for x in xs])
                what = f"encode {mib} MiB"
                told(bench, coder.spec, what, time, moved, limit, LOSSLESS, **more)
                back = [
                    partial(kernels.decode_rows, coder, w, numel, torch.bfloat16) for w in wires
                ]
                time = measured(bench, back)
                what = f"decode {mib} MiB"
                told(bench, coder.spec, what, time, moved, limit, LOSSLESS, **more)


def sparse(bench: Bench) -> None:
    """Time the single pass that selects, compacts and stores the residual, then the whole encode.

    Bytes are x, the residual, what is left and the wire, each once.
    """
    kernels = module(bench, "sparse")
    if kernels is None:
        return
    limit = copies(bench)
    for spec in CHOSEN[:1] if bench.dry else CHOSEN:
        for mib in SIZES[:1] if bench.dry else SIZES:
            if not bench.late(f"{spec} {mib} MiB"):
                with bench.part(f"timing {spec} {mib} MiB"):
                    _sparse(bench, kernels, spec, mib, limit)


def _sparse(bench: Bench, kernels: Any, spec: str, mib: int, limit: Copies | None) -> None:
    from commpass.codecs.sparse.select import Threshold

    coder: Any = codec(spec)
    numel = 2048 if bench.dry else mib * MIB // 2
    size = coder.wire_bytes(numel, torch.bfloat16)
    moved = numel * (2 + 4 + 4) + size
    pairs = [
        (bench.normal(1, numel, dtype=torch.bfloat16), bench.normal(1, numel) / 4)
        for _ in range(sets(bench, moved))
    ]
    if isinstance(coder.selector, Threshold):
        chosen = [_selection(kernels, coder, *pair) for pair in pairs]
        time = measured(bench, chosen)
        what = f"select {mib} MiB"
        told(bench, spec, what, time, moved, limit, SPARSE, mib=mib)
    time = measured(bench, [partial(kernels.encode, coder, *pair) for pair in pairs])
    told(bench, spec, f"encode, all kernels, {mib} MiB", time, moved, limit, mib=mib)
    wires = [kernels.encode(coder, *pair)[0] for pair in pairs]
    time = measured(
        bench, [partial(kernels.decode, coder, wire, numel, torch.bfloat16) for wire in wires]
    )
    told(bench, spec, f"decode {mib} MiB", time, 4 * numel + size, limit, mib=mib)


def _selection(kernels: Any, coder: Any, x: Tensor, residual: Tensor) -> Call:
    """Time the kernel that only selects, with known bounds."""
    from commpass.lowering.gpu.call import launch

    sizes, layout = kernels.Sizes(), kernels.layout_of(coder, x.shape[1], x.dtype)
    within, lost = kernels.bounds_of(coder, x, residual, sizes)

    def call() -> list[Tensor]:
        wire = x.new_empty((x.shape[0], layout.pitch), dtype=torch.uint8)
        values = kernels.values_of(layout, wire)
        left = torch.empty_like(residual)
        known = kernels.encode_arguments(layout, sizes, x, residual, left, values, wire)
        select = kernels.select_call(layout, sizes, known, wire, within, lost)
        launch(select)
        return [wire, left, select.arguments["indices"]]

    return call


# --- matmul ---------------------------------------------------------------------------------------

PRODUCTS = ((2048, 4096, 4096), (4096, 8192, 8192), (8192, 4096, 14336))
MATMULS = ("int8", "rotated", "fp8", "int4")
RANKS = 8
OF_MATMUL = 1.03
"""Goal: the time of a matmul that encodes, over that of the matmul alone."""


def matmul(bench: Bench) -> None:
    """Time m x n x k in bf16: torch's matmul alone, a matmul followed by an encode, and one that
    encodes."""
    kernels, sizes = module(bench, "matmul_launch"), module(bench, "matmul_sizes")
    if kernels is None or sizes is None:
        return
    for shape in ((32, 256, 48),) if bench.dry else PRODUCTS:
        with bench.part(f"timing matmul_encode {shape}"):
            m, n, k = shape
            pairs = [
                (bench.normal(m, k, dtype=torch.bfloat16), bench.normal(n, k, dtype=torch.bfloat16))
                for _ in range(1 if bench.dry else 2)
            ]
            _products(bench, kernels, sizes, pairs)
            del pairs
    bench.note("clocks after matmuls", clocks())


def _products(bench: Bench, kernels: Any, sizes: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
    (m, k), n = pairs[0][0].shape, pairs[0][1].shape[0]
    numel, flops = m * n // RANKS, 2 * m * n * k
    shape = f"{m} x {n} x {k}"
    plain = [partial(torch.mm, a, b.t()) for a, b in pairs]
    alone = measured(bench, plain)
    tflops = {"tflops": round(flops / alone.seconds / 1e12, 1)} if alone else {}
    nbytes = 2 * (m * k + k * n + m * n)
    told(bench, f"matmul {shape}", "torch.mm", alone, nbytes, None, **tflops)
    for spec in MATMULS[:1] if bench.dry else MATMULS:
        if bench.late(f"matmul_encode {spec} {shape}"):
            continue
        coder = codec(spec)
        encode = caller(Chain(torch.bfloat16, (Encode(coder),)), numel)

        def apart(a: Tensor, b: Tensor, encode: Any = encode) -> Tensor:
            return encode(torch.mm(a, b.t()).view(RANKS, numel))

        by, tried = _fastest(bench, kernels, sizes, coder, pairs)
        # In sequence, because the GPU's clocks follow its temperature.
        alone = measured(bench, plain)
        both = measured(bench, [partial(apart, *pair) for pair in pairs])
        best = measured(bench, _encoding(kernels, coder, pairs, by)) if by else None
        ratios: dict[str, Any] = {"tried": tried, "configuration": said(by) if by else ""}
        if alone and both and best:
            of_matmul, of_both = best.seconds / alone.seconds, best.seconds / both.seconds
            tflops = {"tflops": round(flops / best.seconds / 1e12, 1)}
            ratios |= {
                "of_matmul": round(of_matmul, 4),
                "of_both": round(of_both, 4),
                "matmul_us": round(alone.us, 2),
                "matmul_then_encode_us": round(both.us, 2),
                "goal": OF_MATMUL,
                "met": of_matmul <= OF_MATMUL and of_both < 1,
                **tflops,
            }
        bench.say(
            *("timing",),
            name=f"matmul_encode {shape}",
            what=spec,
            us=round(best.us, 2) if best else None,
            spread=round(best.spread, 4) if best else None,
            **ratios,
        )


def _encoding(kernels: Any, coder: Any, pairs: list[tuple[Tensor, Tensor]], by: Any) -> list[Call]:
    product = Product(coder, RANKS)
    return [partial(kernels.run, (a, b.t()), product, by=by) for a, b in pairs]


def _fastest(
    bench: Bench, kernels: Any, sizes: Any, coder: Any, pairs: list[tuple[Tensor, Tensor]]
) -> tuple[Any, dict[str, Any]]:
    """Return the fastest of the listed configurations, or None if none runs, with the time or the
    failure of each."""
    (m, k), n = pairs[0][0].shape, pairs[0][1].shape[0]
    found: list[tuple[float, Any]] = []
    tried: dict[str, Any] = {}
    if bench.dry:
        listed = [small(bench)["by"]]
    else:
        problem = sizes.Problem(m, n, k, RANKS)
        listed = sizes.configurations(coder, problem, kernels.arch_of(bench.device))
    for by in listed:
        try:
            time = measured(bench, _encoding(kernels, coder, pairs, by))
        except Exception as error:
            tried[said(by)] = (str(error).splitlines() or [repr(error)])[0][:200]
            bench.synchronize()
            continue
        tried[said(by)] = round(time.us, 2) if time else None
        found.append((time.seconds if time else 0.0, by))
    shape = f"{m} x {n} x {k}"
    name = f"matmul_encode {coder.spec} {shape}: a configuration runs"
    bench.check(name, bool(found), str(tried) if not found else f"{len(found)} of {len(tried)}")
    return min(found, key=lambda each: each[0])[1] if found else None, tried
