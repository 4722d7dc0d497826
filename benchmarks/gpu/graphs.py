"""Run compiled graphs of many kinds on ranks that share one GPU, and the same graphs on the CPU.

Both use the same policy, so their results differ by what a GPU's matmuls round differently, and by
codes at a tie. A lossless codec must give the bits of the graph without commpass. Graphs with
single kernels run several times, also as CUDA graphs.
"""

from __future__ import annotations

import hashlib
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.nn.functional import gelu

from commpass.passes.post import order

GROUP = "0"
WIDTH, HIDDEN, TOKENS = 512, 1024, 256
CLOSE = 0.03
"""The largest relative distance of a result from that on the CPU: some codes are at a tie."""
DEFINED = re.compile(r"\bdef (\w*(?:encode|decode|norm)\w*)\(")
"""Matches kernels in the code that Inductor makes."""
QUANTISED = "quantised before gather"
TIMED = 20
"""Calls of a graph that is timed."""
CALLS = 5
"""Calls of a graph with single kernels: a CUDA graph is recorded in the second or third."""
ops = torch.ops._c10d_functional
Made = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Case:
    """A graph under a rule.

    ``kernel`` is a part of the name of a kernel that the code on a GPU must have.
    """

    name: str
    made: Made
    rule: dict[str, Any]
    kernel: str = ""


def _sum(x: Tensor) -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", GROUP))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def reduced(of: dict[str, Tensor]) -> Tensor:
    return _sum(gelu(of["x"] @ of["up"]) @ of["down"])


def normed(of: dict[str, Tensor]) -> Tensor:
    """The end of one layer and the start of the next, twice."""
    x = of["x"]
    for _ in range(2):
        x = x + _sum(gelu(_norm(x, of["weight"]) @ of["up"]) @ of["down"])
    return _norm(x, of["weight"])


def between(of: dict[str, Tensor]) -> Tensor:
    """A norm between a reduce_scatter and an all_gather, as in sequence parallelism."""
    ranks = torch.distributed.get_world_size()
    product = gelu(of["x"] @ of["up"]) @ of["down"]
    own = ops.wait_tensor(ops.reduce_scatter_tensor(product, "sum", ranks, GROUP))
    h = _norm(own + of["x"][: len(own)], of["weight"])
    return ops.wait_tensor(ops.all_gather_into_tensor(h, ranks, GROUP)) @ of["up"]


def gathered(of: dict[str, Tensor]) -> Tensor:
    ranks = torch.distributed.get_world_size()
    whole = ops.wait_tensor(ops.all_gather_into_tensor(of["x"], ranks, GROUP))
    return whole @ of["up"]


def scattered(of: dict[str, Tensor]) -> Tensor:
    ranks = torch.distributed.get_world_size()
    own = ops.reduce_scatter_tensor(gelu(of["x"] @ of["up"]) @ of["down"], "sum", ranks, GROUP)
    return ops.wait_tensor(own) * 2


def exchanged(of: dict[str, Tensor]) -> Tensor:
    ranks = torch.distributed.get_world_size()
    rows = [len(of["x"]) // ranks] * ranks
    return ops.wait_tensor(ops.all_to_all_single(of["x"], rows, rows, GROUP)) @ of["up"]


def quantised(of: dict[str, Tensor]) -> Tensor:
    """A float8 matmul with a scale for each row, after a gather: codes are gathered."""
    ranks = torch.distributed.get_world_size()
    whole = ops.wait_tensor(ops.all_gather_into_tensor(of["x"], ranks, GROUP)).float()
    scale = 448 / whole.abs().amax(1, keepdim=True).clamp(min=1e-12)
    codes = (whole * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale.reciprocal()).to(of["x"].dtype) @ of["up"]


def cases() -> list[Case]:
    found = [
        Case(f"all_reduce, {spec}", reduced, {"codec": spec, "algorithm": "two_shot"}, "decode")
        for spec in ("int8", "rotated", "fp8", "int4", "mxfp8", "taco")
    ]
    found += [
        Case("all_reduce by one shot, int8", reduced, {"codec": "int8", "algorithm": "one_shot"}),
        Case("all_reduce in 2 chunks, int8", reduced, {"codec": "int8", "chunks": 2}),
        Case("all_reduce, nvfp4", reduced, {"codec": "nvfp4"}),
        Case("norms, int8", normed, {"codec": "int8", "algorithm": "two_shot"}, "norm"),
        Case("norms, rotated", normed, {"codec": "rotated", "algorithm": "two_shot"}, "norm"),
    ]
    rule = {"codec": "int8", "algorithm": "direct"}
    found.append(Case("norm between two exchanges, int8", between, rule, "norm_encode"))
    for spec in ("int8", "fp8", "mxfp4"):
        found.append(Case(f"all_gather, {spec}", gathered, {"codec": spec}))
        found.append(Case(f"reduce_scatter, {spec}", scattered, {"codec": spec}))
        found.append(Case(f"all_to_all, {spec}", exchanged, {"codec": spec}))
    for made in (reduced, gathered, exchanged):
        found.append(Case(f"{made.__name__}, exponent", made, {"codec": "exponent"}))
    return found


def single_cases() -> list[Case]:
    """Return graphs whose all_reduces are single kernels over symmetric memory."""
    found = [
        Case(
            f"single kernel, {spec} by {algorithm}",
            reduced,
            {"codec": spec, "algorithm": algorithm},
        )
        for spec in ("int8", "rotated", "fp8")
        for algorithm in ("one_shot", "two_shot")
    ]
    found.append(
        Case("single kernel, norms", normed, {"codec": "int8", "algorithm": "one_shot"}),
    )
    return found


def run(device: torch.device | str, seed: int) -> Iterator[tuple[str, bool, str]]:
    """Yield the name of each check on this rank, whether it passed, and what was found. Without a
    GPU, only a few graphs are tried."""
    cpu = torch.device(device).type == "cpu"
    checks = {case.name: partial(_run, case) for case in cases()[:: 8 if cpu else 1]}
    checks[QUANTISED] = _quantised
    yield from _each(checks, device, seed)


def run_single(device: torch.device | str, seed: int) -> Iterator[tuple[str, bool, str]]:
    """Yield the checks of graphs with single kernels, which need a GPU, as ``run`` does."""
    checks = {}
    for case in single_cases():
        checks[case.name] = partial(_run_single, case, False)
        checks[f"{case.name}, CUDA graph"] = partial(_run_single, case, True)
    yield from _each(checks, device, seed)


def _each(
    checks: dict[str, Callable[..., Iterator[tuple[str, bool, str]]]],
    device: torch.device | str,
    seed: int,
) -> Iterator[tuple[str, bool, str]]:
    for name, check in checks.items():
        try:
            yield from check(device, seed)
        except Exception:
            yield f"{name}: runs", False, "\n".join(traceback.format_exc().splitlines()[-8:])


def _given(device: torch.device | str, seed: int) -> dict[str, Tensor]:
    rank = torch.distributed.get_rank()
    own = torch.Generator().manual_seed(seed + 1 + rank)
    shared = torch.Generator().manual_seed(seed)
    made = {
        "x": torch.randn(TOKENS, WIDTH, generator=shared)
        * torch.randn(TOKENS, 1, generator=shared).abs().exp(),
        "up": torch.randn(WIDTH, HIDDEN, generator=own) / 16,
        "down": torch.randn(HIDDEN, WIDTH, generator=own) / 16,
        "weight": torch.rand(WIDTH, generator=shared) + 0.5,
    }
    return {name: each.to(device, torch.bfloat16) for name, each in made.items()}


def _run(case: Case, device: torch.device | str, seed: int) -> Iterator[tuple[str, bool, str]]:
    import commpass

    backends = {
        inner: commpass.backend(
            commpass.Policy(rules=(commpass.Rule(force=True, lowering=lowering, **case.rule),)),
            inner=inner,
            strict=True,
        )
        for inner, lowering in (("inductor", "kernel"), ("aot_eager", None))
    }
    made, codes = with_code(lambda: _result(case.made, backends["inductor"], device, seed))
    sites = commpass.plans()[-1].sites
    coded = bool(sites) and all(site.codec != "none" for site in sites)
    yield f"{case.name}: compressed", coded, "; ".join({site.reason for site in sites})
    if case.rule["codec"] == "exponent":
        plain = _result(case.made, "inductor", device, seed)
        same = torch.equal(made.view(torch.int16), plain.view(torch.int16))
        yield f"{case.name}: bits without commpass", same, f"{int((made != plain).sum())} differ"
        return
    other = _result(case.made, backends["aot_eager"], "cpu", seed)
    far = float((made.cpu().double() - other.double()).norm() / other.double().norm())
    yield f"{case.name}: close to the CPU's", far <= CLOSE, f"{far:.1e} apart"
    if case.kernel and torch.device(device).type == "cuda":
        kernels = sorted(set(DEFINED.findall("\n".join(codes))))
        found = any(case.kernel in kernel for kernel in kernels)
        yield f"{case.name}: kernel", found, ", ".join(kernels)


def _run_single(
    case: Case, captured: bool, device: torch.device | str, seed: int
) -> Iterator[tuple[str, bool, str]]:
    """Call a graph on other values each time: all ranks hold equal bits, close to the CPU's."""
    import commpass
    from commpass.plan import SINGLE_KERNEL

    name = f"{case.name}, CUDA graph" if captured else case.name

    def results(inner: str, lowering: str | None, place: torch.device | str) -> list[Tensor]:
        torch._dynamo.reset()
        rule = commpass.Rule(force=True, lowering=lowering, **case.rule)
        backend = commpass.backend(commpass.Policy(rules=(rule,)), inner=inner, strict=True)
        compiled = torch.compile(case.made, backend=backend, dynamic=False)
        with torch.no_grad():
            return [compiled(_given(place, seed + 10 * call)).cpu() for call in range(CALLS)]

    counters["inductor"].clear()
    with config.patch({"triton.cudagraphs": captured, "fx_graph_cache": False}):
        made = results("inductor", SINGLE_KERNEL, device)
        torch.cuda.synchronize()
    lowerings = {site.lowering for site in commpass.plans()[-1].sites}
    yield f"{name}: is one", lowerings == {SINGLE_KERNEL}, str(commpass.plans()[-1].sites)[:400]
    if captured:
        skipped = counters["inductor"]["cudagraph_skips"]
        yield f"{name}: captured", not skipped, f"{skipped} not captured"
    other = results("aot_eager", None, "cpu")
    far = max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(made, other, strict=True)
    )
    yield f"{name}: close to the CPU's in {CALLS} calls", far <= CLOSE, f"{far:.1e} apart"
    own = hashlib.sha256(torch.stack(made).view(torch.uint8).numpy().tobytes()).hexdigest()
    every: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    yield f"{name}: ranks hold the same bits", len(set(every)) == 1, f"{len(set(every))} results"


def ordered(
    device: torch.device | str, seed: int
) -> tuple[list[tuple[str, bool, str]], list[float]]:
    """Run a graph whose exchanges overlap, with the pass ``order`` and without it.

    Return the checks of this rank, and the median times of a call in microseconds, with the pass
    first. Both have the same bits.
    """
    import commpass

    rule = {"codec": "int8", "algorithm": "two_shot", "lowering": "kernel", "chunks": 2}
    policy = commpass.Policy(
        rules=(commpass.Rule(force=True, **rule),), check_calls=0, error_sample_rate=0.0
    )
    made, times, checks = list[Tensor](), list[float](), list[tuple[str, bool, str]]()
    for name, pinned in (("with order", order.ordered), ("without order", nullcontext)):
        torch._dynamo.reset()
        backend = commpass.backend(policy, strict=True)
        given, compiled = _given(device, seed), torch.compile(normed, backend=backend)
        seen = list[str]()

        def entered(how: Any = pinned, word: str = name, seen: list[str] = seen) -> Any:
            seen.append(word)
            return how()

        with (
            torch.no_grad(),
            config.patch(fx_graph_cache=False),
            patch.object(order, "ordered", entered),
        ):
            made.append(compiled(given))
            times.append(_median_us(lambda call=compiled, given=given: call(given), device))
        chunks = {site.chunks for site in commpass.plans()[-1].sites}
        checks.append((f"{name}: two chunks of each", chunks == {2}, f"chunks: {chunks}"))
        checks.append((f"{name}: compiled so", set(seen) == {name}, f"{len(seen)} graphs"))
    same = torch.equal(*(each.view(torch.int16) for each in made))
    checks.append(("no bit differs without order", same, f"{int((made[0] != made[1]).sum())}"))
    return checks, times


def _median_us(call: Callable[[], Any], device: torch.device | str) -> float:
    """Return the median time of calls that all ranks begin together, in microseconds."""
    is_gpu = torch.device(device).type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if is_gpu else lambda: None
    taken = []
    for _ in range(TIMED if is_gpu else 3):
        wait()
        torch.distributed.barrier()
        begin = time.perf_counter()
        call()
        wait()
        taken.append((time.perf_counter() - begin) * 1e6)
    return median(taken)


def _quantised(device: torch.device | str, seed: int) -> Iterator[tuple[str, bool, str]]:
    """Check that codes are gathered, and that the result has the bits of the gather of values."""
    import commpass

    found = []
    for policy in ("off", "lossless"):
        backend = commpass.backend(policy, profile=commpass.ethernet(0.001), strict=True)
        found.append(_result(quantised, backend, device, seed))
    rules = [step.rule for step in commpass.plans()[-1].simplified]
    yield f"{QUANTISED}: applied", rules == [QUANTISED], f"rules applied: {rules}"
    same = torch.equal(*(each.view(torch.int16) for each in found))
    yield f"{QUANTISED}: bits", same, f"{int((found[0] != found[1]).sum())} differ"


def _result(made: Made, backend: Any, device: torch.device | str, seed: int) -> Tensor:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(made, backend=backend, dynamic=False)(_given(device, seed))


def with_code(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the result of a call, and the code that Inductor makes for it."""
    from torch._inductor.utils import run_and_get_code

    with config.patch(fx_graph_cache=False):
        return run_and_get_code(call)
