"""Other assumptions than those of ``rows``, and their results: none of these counts."""

from __future__ import annotations

from typing import Any

from commpass.costmodel import Link

from . import equarx, ssfusion, taco, zipccl
from .hops import HOP_US, hops
from .rows import (
    A6000,
    CHIPS,
    CLUSTER,
    CROSSOVER,
    GAINS,
    GPT,
    H100,
    MODELS,
    SWITCHED,
    TACO,
    UNFUSED,
    ZIP,
    Row,
    equarx_of,
    grown,
    machine,
)
from .sites import fused, halved


def taco_tried() -> list[Row]:
    rows = []
    named = taco.Fitted(machine().compute_us, hops("nvlink-4"))
    for ranks, number in GAINS.items():
        what = f"throughput, TP {ranks}"
        gain = taco.taco_gain(GPT, named, ranks, H100)
        rows.append(Row(TACO, what, number, gain, "the link is NVLink 4 as stated", speedup=True))
        gain = taco.taco_gain(GPT, machine(), ranks, H100, "two_shot(chunks=4)")
        rows.append(Row(TACO, what, number, gain, "four chunks that overlap", speedup=True))
    for tokens, by_peer in ((GPT.tokens, True), (2048, False), (2048, True)):
        model = taco.TensorParallel(tokens=tokens)
        how = f"{tokens:,} tokens" + (", what each rank gets coded by calls of its own" * by_peer)
        for ranks, number in UNFUSED.items():
            gain = taco.unfused_gain(model, machine(model), ranks, H100, by_peer=by_peer)
            rows.append(Row(TACO, f"unfused, TP {ranks}", number, gain, how, speedup=True))
    return rows


STATED: dict[str, Any] = {"hop": None, "sockets": 1}
GAUSSIAN: dict[str, Any] = {"code": zipccl.ZIPPED, "margin": 0.0}


def zipccl_tried() -> list[Row]:
    rows = []
    ways = (
        ("kernels at 0.8 of the bandwidth", fused(zipccl.A6000, zipccl.ZIPPED, 0.8)),
        ("kernels as Card has them, 5 bytes a value", halved(zipccl.A6000)),
    )
    for how, kernels in ways:
        gain = zipccl.zipped_gain("all_gather", zipccl.LLAMA_MIB, 64, CLUSTER, kernels)
        rows.append(Row(ZIP, "all_gather, Llama3-8B", 1.35, gain, how, speedup=True))
        before, after, reduce = zipccl.layer_us(64, CLUSTER, kernels)
        step = [zipccl.fsdp_step_us(us, reduce, kernels) for us in (before, after)]
        rows.append(
            Row(ZIP, "Llama3-8B end to end, 64 GPUs", 1.18, step[0] / step[1], how, speedup=True)
        )
    for kind, number in (("all_gather", 1.31), ("all_to_all", 1.36)):
        sizes = (64, 256, 1024)
        gains = [zipccl.zipped_gain(kind, mib, 64, CLUSTER, A6000) for mib in sizes]
        mean, how = sum(gains) / len(gains), "mean of 64, 256 and 1,024 MiB"
        rows.append(Row(ZIP, f"{kind}, mean of volumes", number, mean, how, speedup=True))
    before, after, reduce = zipccl.layer_us(64, CLUSTER, A6000)
    step = [zipccl.fsdp_step_us(us, reduce / 2, A6000) for us in (before, after)]
    what = "Llama3-8B end to end, 64 GPUs"
    rows.append(Row(ZIP, what, 1.18, step[0] / step[1], "reduce_scatter of bf16", speedup=True))
    step = [zipccl.serial_step_us(us, reduce, A6000) for us in (before, after)]
    rows.append(Row(ZIP, what, 1.18, step[0] / step[1], "nothing overlaps", speedup=True))
    return rows + switched_tried()


SWITCHERS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("the library's of bf16", {}, {"dtype": "bfloat16"}),
    ("PCIe as stated, one socket, a Gaussian's bytes, any gain", STATED, GAUSSIAN),
    ("PCIe as stated, one socket", STATED, {}),
    ("PCIe as stated", {"hop": None}, {}),
    ("one socket", {"sockets": 1}, {}),
    ("a Gaussian's bytes", {}, {"code": zipccl.ZIPPED}),
    ("any gain", {}, {"margin": 0.0}),
    *((f"{hop:g} GB/s from GPU to GPU", {"hop": hop}, {}) for hop in (9.0, 10.0, 12.0, 14.0)),
)
"""The choices under one different assumption each: of links, and of the choice."""


def switched_tried() -> list[Row]:
    rows = []
    for how, of_link, of_choice in SWITCHERS:
        for (hosts, gpus), number in SWITCHED.items():
            link = zipccl.hosts_link(hosts, gpus, **of_link)
            chosen = zipccl.switched(link, hosts * gpus, A6000, **of_choice)
            rows.append(Row(ZIP, f"reduce_scatter, {hosts} x {gpus} GPUs", number, chosen, how))
    return rows


def equarx_tried() -> list[Row]:
    several = [us / 10 for us in range(11)]
    fit = equarx.fit_launch_us(CHIPS, equarx.ring_link(), CROSSOVER, several)
    return [
        *equarx_of(4, equarx.HOP_US, 0.0),
        *equarx_of(CHIPS, HOP_US["nvlink-4"], 0.0),
        *equarx_of(CHIPS, equarx.HOP_US, fit, fit=True),
    ]


def ssfusion_tried() -> list[Row]:
    stated = hops("infiniband-hdr")
    bare = Link(0.0, stated.gbytes_per_s)
    fused_models = tuple((name, ssfusion.in_buffers(of, 64)) for name, of in MODELS)
    ways = (
        (bare, MODELS, "bytes alone (equations 3 and 4 without alpha)"),
        (stated, fused_models, "buffers of 64 MiB, 15 us to start"),
        (stated, MODELS, "each tensor by itself, 15 us to start"),
    )
    return [row for way in ways for row in grown(*way) if row.what.startswith("all_reduce")]


def all_tried() -> list[Row]:
    """Return every other variant, paper by paper."""
    return [*taco_tried(), *zipccl_tried(), *equarx_tried(), *ssfusion_tried()]
