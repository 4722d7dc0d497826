"""How each source measured: the machine, the collective, and the way of each of its two times."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from benchmarks.published import hosts
from benchmarks.published.rows import Row
from commpass.costmodel import Profile, profile_named

LIBRARY, SINGLE_KERNEL, BEST = "library", "single kernel", "best of both"
KERNELS, COPY_RING, COPIES = "kernels", "ring of copies", "copies to all"
"""Ways to carry out an exchange:

- ``LIBRARY``: NCCL, RCCL or gloo.
- ``SINGLE_KERNEL``: one kernel, which encodes, exchanges and decodes.
- ``BEST``: whichever of these two is faster.
- ``KERNELS``: kernels that encode and decode, and exchanges of the library between them.
- ``COPY_RING``: a ring of copies by copy engines. Of a codec, only the all_gather is coded.
- ``COPIES``: each rank's copies to all others, one after the other, and kernels between them.
"""


@dataclass(frozen=True)
class Setup:
    """One row as an experiment. ``codec`` is "" if nothing is compressed. With ``copies``, the
    plain time includes a copy of the tensor. ``plain`` is "" if there is no plain time."""

    profile: Profile
    kind: str
    ranks: int
    nbytes: int
    dtype: str
    plain: str = LIBRARY
    codec: str = ""
    compressed: str = ""
    algorithm: str = "two_shot"
    copies: bool = False


Found = Setup | str
"""A setup, or the reason why a row is not predicted."""


def setup_of(row: Row) -> Found:
    """Return the setup of a row, or why it names too little for a prediction."""
    for pattern, made in SOURCES.items():
        if re.search(pattern, row.source):
            return made(row)
    return "the source is not described in setups.py"


@cache
def machine(name: str, *, graph: bool = False) -> Profile:
    """Return one host of a named machine; with ``graph``, CUDA graphs launch its kernels."""
    found = profile_named(name)
    assert found is not None
    return dataclasses.replace(found, kernels=found.kernels.in_graph) if graph else found


def _plain(row: Row, profile: Profile, plain: str = LIBRARY, *, copies: bool = False) -> Setup:
    assert row.ranks is not None
    assert row.nbytes is not None
    dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[row.dtype]
    return Setup(profile, row.collective, row.ranks, row.nbytes, dtype, plain, copies=copies)


def _coded(row: Row, profile: Profile, codec: str, way: str, plain: str = LIBRARY) -> Setup:
    return dataclasses.replace(_plain(row, profile, plain), codec=codec, compressed=way)


QUICK = {
    "fp8 b32": "fp8(block=64)",
    "int8 b32": "int8(block=64)",
    "int6 b32": "int6(block=64)",
    "int4 b32": "int4(block=64)",
    "none": "raw",
}
"""QuickReduce's 2 bytes of scale for 32 values, as 4 for 64."""


def _quickreduce(row: Row) -> Found:
    codec = QUICK[next(name for name in QUICK if row.codec.startswith(name))]
    return _coded(row, machine("mi300x-8"), codec, SINGLE_KERNEL)


def _vllm(row: Row) -> Found:
    return _coded(row, machine("mi300x-8"), QUICK[row.codec], SINGLE_KERNEL, BEST)


def _aiter(row: Row) -> Found:
    return _coded(row, machine("mi300x-8"), QUICK[row.codec], SINGLE_KERNEL, SINGLE_KERNEL)


def _flashinfer(row: Row) -> Found:
    found = _coded(row, machine("dgx-h200", graph=True), "fp8(block=256)", SINGLE_KERNEL)
    return dataclasses.replace(found, copies=True)


def _pcie_copies(row: Row) -> Found:
    name = "l40s-pcie" if "L40S" in row.hardware else "rtx-pro-6000-pcie"
    return _plain(row, machine(name, graph=True), COPY_RING)


def _b12x(row: Row) -> Found:
    if row.nbytes is None:
        return "a step: sizes are not given"
    host = hosts.sm120_with_uplinks()
    if row.codec.startswith("none"):
        return dataclasses.replace(_plain(row, host), compressed=COPY_RING)
    way = COPY_RING if "ring" in row.codec else COPIES
    return _coded(row, host, "fp8(block=128)", way, COPY_RING)


RELAYS = {2: 4.0, 4: 2.0}
"""How many times the rate of its own links a group of so many ranks reaches over idle GPUs: the
bound of the relay's schedule."""
RELAY_US = 25.0
"""The start of a relayed exchange, as its authors state it."""


def _relay(row: Row) -> Found:
    """Predict RCCL alone: the relay is no algorithm of commpass."""
    return _plain(row, machine("mi350x-8"))


def _coded_relay(row: Row) -> Found:
    if row.nbytes is None:
        row = dataclasses.replace(row, nbytes=100 << 20)
    host = machine("mi350x-8")
    assert row.ranks is not None
    inner = host.intra_host_link
    assert inner is not None
    rate = inner.rate_to(row.ranks - 1) * RELAYS[row.ranks]
    link = dataclasses.replace(
        inner, alpha_us=RELAY_US, gbytes_per_s=rate, peer_gbytes_per_s=0.0, protocols=(), least_us=0
    )
    relay = Profile("relay", link, kernels=host.kernels)
    return _coded(row, relay, "fp8(block=128)", KERNELS)


def _coccl(row: Row) -> Found:
    if row.level == "step":
        return STEPS
    row = dataclasses.replace(row, nbytes=1 << 30)
    return _coded(row, hosts.h800(), "sdp4bit", KERNELS)


def _veomni(row: Row) -> Found:
    return _coded(row, machine("dgx-h100"), "bf16", KERNELS)


def _sdp4bit(row: Row) -> Found:
    if row.level == "step":
        return STEPS
    return "its bytes (ours) in the measured time are 13.3 GB/s over a port of 12.5"


def _nccl(row: Row) -> Found:
    name = next(
        name
        for word, name in (
            ("H100", "dgx-h100"),
            ("B200", "hgx-b200"),
            ("RTX PRO 6000", "rtx-pro-6000-pcie"),
        )
        if word in row.hardware
    )
    assert row.ranks is not None
    assert row.nbytes is not None
    of_a_rank = row.nbytes // row.ranks if row.collective == "all_gather" else row.nbytes
    return dataclasses.replace(_plain(row, machine(name)), nbytes=of_a_rank)


STEPS = "a step: batch, lengths and the rest of the model are not given"


def _because(why: str) -> Callable[[Row], Found]:
    return lambda row: why


SOURCES: dict[str, Callable[[Row], Found]] = {
    "quickreduce": _quickreduce,
    r"vllm#19744 =": _vllm,
    r"vllm#": _because("time to the first token under load: requests wait for each other"),
    "flashinfer#3759": _flashinfer,
    "flashinfer#4870": _pcie_copies,
    "b12x": _b12x,
    "perf_data": _relay,
    r"torchcomms#3996|torchcomms#4007": _coded_relay,
    "torchcomms#3437": _because("two kernels of one codec, bound by their number of blocks"),
    "COCCL": _coccl,
    "VeOmni": _veomni,
    "SDP4Bit": _sdp4bit,
    "aiconfigurator": _nccl,
    "aiter": _aiter,
    "prime-diloco": _because("neither processors nor the sharing of the link are given"),
    "TensorRT-LLM": _because("bytes are not given"),
    "dietgpu": _because("a range of rates, and another codec (rANS)"),
    "Flash": _because("ranks and bytes are not given"),
    "SparseLoCo": _because("a step between hosts of unknown networks"),
    "": _because(STEPS),
}
"""By a pattern of the source; the first that matches."""
