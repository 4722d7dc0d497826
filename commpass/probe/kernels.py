"""Measure compiled encodes and decodes, matmuls and copies on all ranks at once.

Ranks that share cores share them in a step as well.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.codecs import Codec, codec
from commpass.collectives import messages
from commpass.costmodel import KernelRate, Kernels
from commpass.lowering import cpu
from commpass.lowering.chain import Cast, Chain, Decode, Encode
from commpass.probe.links import seconds_of, slowest_of

CODECS = ("int8", "int4", "fp8", "rotated", "exponent", "cast")
"""The codecs that are measured. All others get the rate that ``_other`` returns."""
SERIAL = ("ecq",)
"""Codecs that are measured as well, but count neither for ``_other`` nor for the median of
``call_us``: they are far slower."""
SMALL, LARGE = 1 << 11, 1 << 22
"""A number of values for which the call takes longer than the values, and one for the opposite
case."""
REPEATS, CALLS, WARM_UP = 9, 200, 20
"""How often a kernel is timed, how often a small gather is, and the number of warm-up calls."""
MATMUL = 1024


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    known: Kernels,
    report: Callable[[str], None] = lambda message: None,
) -> Kernels:
    """Measure the kernel rates of a profile; every rank of the group calls it.

    It takes about a minute of compilation on a CPU.
    """

    clock = partial(slowest, group=group, device=device)
    rates: dict[str, KernelRate] = {}
    calls: dict[str, float] = {}
    for name in CODECS + SERIAL:
        report(name)
        rates[name], calls[name] = _rate(name, group, device, clock)
    call_us = round(median(calls[name] for name in CODECS), 1)
    for name in SERIAL:
        rates[name] = dataclasses.replace(rates[name], call_us=calls[name])
    aliases = dict.fromkeys(("bf16", "fp16"), rates["cast"])
    side = torch.randn(MATMUL, MATMUL, device=device)
    floats = torch.randn(LARGE, device=device)
    copied = torch.empty_like(floats)
    return dataclasses.replace(
        known,
        rates={**rates, **aliases},
        other=_unmeasured(rates, known),
        call_us=call_us,
        gflops=round(2e-9 * MATMUL**3 / clock(lambda: side @ side), 1),
        gbytes_per_s=round(2e-9 * 4 * LARGE / clock(lambda: copied.copy_(floats)), 2),
    )


def _unmeasured(rates: Mapping[str, KernelRate], known: Kernels) -> KernelRate:
    """Return the rate of all codecs that were not measured: the time of the slowest in ``CODECS``,
    times the ratio of the two in the ``known`` kernels, or times 1 if that is larger."""

    def ns(role: str) -> float:
        slowest, stated = (
            max(getattr(each[name], role) for name in CODECS if name in each)
            for each in (rates, known.rates)
        )
        times: float = max(getattr(known.other, role) / stated, 1.0)
        return round(slowest * times, 4)

    return KernelRate(ns("encode_ns"), ns("decode_ns"))


Clock = Callable[[Callable[[], Any]], float]
"""Returns the time of a call."""
Call = Callable[[Tensor], Tensor]


def _rate(
    name: str, group: dist.ProcessGroup, device: torch.device, clock: Clock
) -> tuple[KernelRate, float]:
    """Return the rate of a codec in nanoseconds a value, without ``call_us``, and the microseconds
    that a call takes in addition."""
    coder = codec(name)
    rows = torch.randn(1, LARGE, device=device)
    encode, decode = _by_kernel(coder, device) or _inline(coder, rows)
    wire = encode(rows)
    encode_ns = 1e9 * clock(partial(encode, rows)) / LARGE
    decode_ns = 1e9 * clock(partial(decode, wire)) / LARGE
    call_us = _call_us(coder, encode_ns + group.size() * decode_ns, group, device)
    return KernelRate(round(encode_ns, 4), round(decode_ns, 4)), round(call_us, 1)


def _inline(coder: Codec, rows: Tensor) -> tuple[Call, Call]:
    """Return encode and decode as Inductor compiles them."""
    encode = _compiled(coder.encode_rows, rows)
    return encode, _compiled(_decoded(coder, LARGE), encode(rows))


def _by_kernel(coder: Codec, device: torch.device) -> tuple[Call, Call] | None:
    """Return encode and decode as the C++ that graphs call; None on a GPU, and without C++ for the
    codec."""
    encoding = Chain(torch.float32, (Encode(coder),))
    decoding = Chain(torch.uint8, (Decode(coder, torch.float32), Cast(torch.float32)))
    if device.type != "cpu" or any(map(cpu.unsupported_reason, (encoding, decoding))):
        return None
    encoder, decoder = cpu.compile_chain(encoding), cpu.compile_chain(decoding)
    size = coder.wire_bytes(LARGE, torch.float32)

    def encode(rows: Tensor) -> Tensor:
        wire = rows.new_empty((1, size), dtype=torch.uint8)
        encoder([rows], wire, LARGE)
        return wire

    def decode(wire: Tensor) -> Tensor:
        rows = wire.new_empty((1, LARGE), dtype=torch.float32)
        decoder([wire], rows, LARGE)
        return rows

    return encode, decode


def _decoded(codec: Codec, numel: int) -> Call:
    return lambda wire: codec.decode_rows(wire, numel, torch.float32).to(torch.float32)


def _call_us(codec: Codec, ns: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the microseconds that an encode or decode call takes in a graph in addition to its
    values.

    ``ns`` nanoseconds is the total time of one value in a gather. The result comes from a small
    gather and the sum of what arrives. The exchange alone and a compiled call that does almost
    nothing are subtracted. A kernel that is timed alone is several times faster, since its code is
    still in the caches.
    """
    ranks, decoded = group.size(), _decoded(codec, SMALL)
    gather = messages.ops if device.type == "cpu" else torch.ops._c10d_functional
    rows = torch.randn(1, SMALL, device=device)

    def exchange(wire: Tensor) -> Tensor:
        started = gather.all_gather_into_tensor(wire, ranks, group.group_name)
        return torch.ops._c10d_functional.wait_tensor(started)

    def site(rows: Tensor) -> Tensor:
        return decoded(exchange(codec.encode_rows(rows))).sum(0)

    wire, nothing = codec.encode_rows(rows), _compiled(torch.neg, rows[0, :1])
    calls = {
        "site": partial(_compiled(site, rows), rows),
        "exchange": partial(exchange, wire),
        "call": partial(nothing, rows[0, :1]),
    }
    us = {name: 1e6 * in_turns for name, in_turns in _medians(calls, group, device).items()}
    return max(us["site"] - us["exchange"] - us["call"] - SMALL * ns / 1e3, 0.0) / 2


def _medians(
    calls: Mapping[str, Callable[[], Any]], group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Return the median seconds of each of some calls on the slowest rank. The calls alternate."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(CALLS + WARM_UP):
        for name, call in calls.items():
            took[name].append(seconds_of(call, group, device))
    return {name: median(slowest_of(each[WARM_UP:], group, device)) for name, each in took.items()}


def _compiled(function: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
    """Compile a function as it would be in a compiled graph.

    It is traced first: Dynamo compiles the same code only ``torch._dynamo.config.recompile_limit``
    times, and codecs of one class share theirs.
    """

    def traced(x: Any) -> Any:  # a function with defaults cannot be traced directly
        return function(x)

    return torch.compile(make_fx(traced)(inputs), dynamic=False)


def slowest(run: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the median seconds of a call on the slowest rank, after two that do not count.

    Each timed call directly follows another one, as in a graph. After a barrier a rank takes
    longer, whatever it computes (an empty call 250 us instead of 50).
    """
    times = []
    for _ in range(REPEATS + 2):
        dist.barrier(group)
        for _ in range(2):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(slowest_of(times[2:], group, device))
