"""Times of compiled encodes and decodes, of matmuls and of copies, on all ranks at once: ranks that
share cores will do so in a step as well."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.codecs import codec
from commpass.costmodel import KernelRate, Kernels
from commpass.probe.links import most

CODECS = ("int8", "int4", "fp8", "rotated", "exponent", "cast")
"""Those whose rates a profile knows; the slowest of them stands for all others."""
SMALL, LARGE = 1 << 14, 1 << 22
"""Values of the two sizes from which a rate and the time of a call are worked out."""
REPEATS = 9
MATMUL = 1024


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    known: Kernels,
    say: Callable[[str], None] = lambda what: None,
) -> Kernels:
    """What a profile says of kernels, measured here; every rank of the group calls it. Takes about
    a minute of compiling on a CPU."""

    def seconds(run: Callable[[], Any]) -> float:
        return slowest(run, group, device)

    rates, calls = {}, []
    for name in CODECS:
        say(name)
        (encode, decode), call = _rates(name, device, seconds)
        rates[name] = KernelRate(encode, decode)
        calls.append(call)
    aliases = dict.fromkeys(("bf16", "fp16"), rates["cast"])
    side = torch.randn(MATMUL, MATMUL, device=device)
    floats = torch.randn(LARGE, device=device)
    held = torch.empty_like(floats)
    one = torch.ones(1, device=device)
    nothing = seconds(partial(_compiled(torch.neg, one), one))  # a call's own part, not a kernel's
    return dataclasses.replace(
        known,
        rates={**rates, **aliases},
        other=KernelRate(
            max(rate.encode_ns for rate in rates.values()),
            max(rate.decode_ns for rate in rates.values()),
        ),
        call_us=round(max(median(calls) - 1e6 * nothing, 0.0), 1),
        gflops=round(2e-9 * MATMUL**3 / seconds(lambda: side @ side), 1),
        gbytes_per_s=round(2e-9 * 4 * LARGE / seconds(lambda: held.copy_(floats)), 2),
    )


Clock = Callable[[Callable[[], Any]], float]
"""What times a call."""


def _rates(name: str, device: torch.device, seconds: Clock) -> tuple[tuple[float, float], float]:
    """Nanoseconds a value to encode and to decode, and microseconds of a call beside them."""
    coder = codec(name)
    took: dict[int, tuple[float, float]] = {}
    for values in (SMALL, LARGE):
        rows = torch.randn(1, values, device=device)
        encode = _compiled(coder.encode_rows, rows)
        wire = encode(rows)

        def decoded(wire: Any, values: int = values) -> Tensor:
            return coder.decode_rows(wire, values, torch.float32).to(torch.float32)

        decode = _compiled(decoded, wire)
        took[values] = (
            seconds(partial(encode, rows)),
            seconds(partial(decode, wire)),
        )
    slopes = [1e9 * (b - a) / (LARGE - SMALL) for a, b in zip(*took.values(), strict=True)]
    rest = [1e6 * a - ns * SMALL / 1e3 for a, ns in zip(took[SMALL], slopes, strict=True)]
    encode_ns, decode_ns = (round(max(ns, 0.0), 4) for ns in slopes)
    return (encode_ns, decode_ns), max(median(rest), 0.0)


def _compiled(function: Callable[..., Any], given: Any) -> Callable[..., Any]:
    """A function as it is in a compiled graph. It is traced first: Dynamo compiles the same code
    only ``torch._dynamo.config.recompile_limit`` times, and codecs of one class share theirs."""

    def traced(x: Any) -> Any:  # what has defaults cannot be traced as it is
        return function(x)

    return torch.compile(make_fx(traced)(given), dynamic=False)


def slowest(run: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> float:
    """The median time of a call on the slowest rank in seconds, after two that do not count. Each
    follows another one at once, as in a graph: after a barrier a rank takes longer, whatever it
    computes (an empty call 250 us instead of 50)."""
    times = []
    for _ in range(REPEATS + 2):
        dist.barrier(group)
        for _ in range(2):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(most(times[2:], group, device))
