"""ZipCCL: lossless collectives among hosts whose ranks share a network card."""

from __future__ import annotations

import dataclasses

from commpass.costmodel import HOST, Kernels, Link, Profile, Task, finished_us
from commpass.costmodel.cards import Card
from commpass.costmodel.links import sharing

from .hops import hops
from .sites import FP32, coded, gain, plain, site

A6000 = Card(768.0, 154.8, "NVIDIA RTX A6000 data sheet")
ZIPPED = "exponent(planes=3)"
TRAINED = "exponent(planes=3, bits=12.03)"
"""With the bits of the paper's training: 16 / 1.33 (figure 1a, over 40,000 iterations)."""
HOP_GBYTES_PER_S = 11.0
"""The rate of a hop of a ring between GPUs of a host, through PCIe and the host's memory. It is
reported for 3 and 4 GPUs on hosts with a port of 25 GB/s (NVIDIA/nccl, issue 1195). The paper has
none."""
SOCKETS, MARGIN = 2, 0.1
"""Sockets of a host of 8 GPUs, an assumption; and the share that a plan must gain (``Profile``)."""
LLAMA_LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
LLAMA_LAYERS, LLAMA_TOKENS = 32, 1024
"""Values of a layer of Llama3-8B, as published; layers; tokens of a step (ZipCCL, section 6.1)."""
LLAMA_MIB = LLAMA_LAYER / (1 << 19)
QWEN_MIB = 1024 * 8 * 4096 / (1 << 19)
"""What a rank passes to an all_to_all in Qwen3-MoE: 1,024 tokens, each to 8 experts, 4,096 wide."""


def hosts_link(
    hosts: int, gpus: int, *, hop: float | None = HOP_GBYTES_PER_S, sockets: int = SOCKETS
) -> Link:
    """Return hosts with one 200 Gbit/s port each (ZipCCL, section 6.1).

    A ring crosses each port once and is as fast as its slowest link: ``hop`` GB/s between GPUs
    inside a host (None: as fast as PCIe is stated to be). The start-up time of its steps is the
    mean of those inside a host and those between hosts. In an all_to_all, everything that ``gpus``
    ranks send to other hosts goes through one port. Inside one host, everything that the ranks of
    one socket send to the other goes through the link between the two.
    """
    inside, between = hops("pcie-4"), hops("infiniband-hdr")
    rate = hop or inside.gbytes_per_s
    if hosts == 1:
        of_socket = gpus // sockets
        shared = sharing(gpus, of_socket, of_socket) if sockets > 1 else {}
        return dataclasses.replace(inside, gbytes_per_s=rate, sharing=shared)
    ranks = hosts * gpus
    alpha = ((gpus - 1) * inside.alpha_us + between.alpha_us) / gpus
    slower = max(1.0, between.gbytes_per_s / rate) if gpus > 1 else 1.0
    factor = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), slower)
    link = dataclasses.replace(between, alpha_us=alpha, factor=factor)
    return Profile("one port", link, ranks_per_host=gpus, ports=1).link_of(
        "ranks", ranks=range(ranks)
    )


def zipped_gain(kind: str, mib: float, ranks: int, link: Link, kernels: Kernels) -> float:
    """Return how many times faster a collective is.

    ``mib`` is the result of an all_gather, or what a rank passes to an all_to_all.
    """
    values = int(mib * (1 << 19)) // (ranks if kind == "all_gather" else 1)
    return gain(site(kind, values, ranks), "direct", ZIPPED, link, kernels)


def switched(
    link: Link,
    ranks: int,
    kernels: Kernels,
    *,
    dtype: str = FP32,
    code: str = TRAINED,
    margin: float = MARGIN,
) -> str:
    """Return the choice for a reduce_scatter of a layer's gradients.

    It is the library's in ``dtype``, or an all_to_all of coded bf16 and a local sum (ZipCCL,
    section 5.2, equations 6 and 7) if that is faster by more than the ``margin``. The sum reads the
    decoded values once more.
    """
    values = LLAMA_LAYER // ranks * ranks
    native = plain(site("reduce_scatter", values, ranks, dtype), link)
    zipped = coded(site("reduce_scatter", values, ranks), "direct", code, link, kernels)
    zipped += kernels.copies_us(1, 2 * values)
    return "zipped" if native - zipped > margin * native else "native"


def fsdp_step_us(gather_us: float, reduce_us: float, kernels: Kernels) -> float:
    """Return the time of a step of ZipCCL's Llama (section 6.1) by FSDP.

    Each layer is gathered for forward and again for backward, one layer ahead, and its gradients
    are scattered. Backward computes twice as much.
    """
    compute, many = _compute_us(kernels), 2 * LLAMA_LAYERS
    tasks, gathered = [Task("link", gather_us)], 0
    for number in range(many):
        ready, backward = gathered, number >= LLAMA_LAYERS
        if number + 1 < many:
            tasks.append(Task("link", gather_us))
            gathered = len(tasks) - 1
        tasks.append(Task(HOST, compute * (2 if backward else 1), after=(ready,)))
        if backward:
            tasks.append(Task("link", reduce_us, after=(len(tasks) - 1,)))
    return finished_us(tasks)


def serial_step_us(gather_us: float, reduce_us: float, kernels: Kernels) -> float:
    """Return the same time without any overlap."""
    return LLAMA_LAYERS * (2 * gather_us + reduce_us + 3 * _compute_us(kernels))


def _compute_us(kernels: Kernels) -> float:
    """Return the time of a layer's forward: two operations per parameter and token."""
    return kernels.compute_us(2 * LLAMA_LAYER * LLAMA_TOKENS, 0)


def layer_us(ranks: int, link: Link, kernels: Kernels) -> tuple[float, float, float]:
    """Return the times of a layer: its gather plain and coded, and the library's reduce_scatter in
    fp32.

    The latter was faster than a coded one (section 6.3).
    """
    gather = site("all_gather", LLAMA_LAYER // ranks, ranks)
    scatter = site("reduce_scatter", LLAMA_LAYER // ranks * ranks, ranks, FP32)
    return (
        plain(gather, link),
        coded(gather, "direct", ZIPPED, link, kernels),
        plain(scatter, link),
    )
