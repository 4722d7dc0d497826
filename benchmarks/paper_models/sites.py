"""Sites, kernels and times from which the papers' set-ups are built.

Nothing here is a result. What a paper states of its set-up, and what vendors state of hardware,
goes into ``Link``, ``Kernels`` and ``Site``; times come from ``plain_us`` and ``coded_us``, like
those of any plan. ``benchmarks/papers.py`` compares them with the papers' measurements.
"""

from __future__ import annotations

import dataclasses

import torch

from commpass.codecs import codec
from commpass.collectives import algorithm
from commpass.costmodel import KernelRate, Kernels, Link, Profile
from commpass.costmodel.cards import Card
from commpass.passes.candidates import coded_us, plain_us
from commpass.plan import Site

BF16, FP32 = "bfloat16", "float32"
FREE = Kernels(launch_us=0.0, other=KernelRate(0.0, 0.0))
MANY = 1 << 20


def site(kind: str, values: int, ranks: int, dtype: str = BF16) -> Site:
    """Return a collective to which each rank passes this many values."""
    return Site(
        name="site",
        kind=kind,
        group="group",
        group_size=ranks,
        reduce_op="sum" if "reduce" in kind else None,
        dtype=dtype,
        shape=(values,),
        bytes=values * getattr(torch, dtype).itemsize,
        group_label="ranks",
        direction="forward",
        stateless="",
    )


def halved(card: Card) -> Kernels:
    """Return a GPU whose kernels run at half of the stated bandwidth, and matmuls at half of the
    stated rate: an assumption for cards of the papers, which were not measured here. Encoding
    float32 values reads 4 bytes and writes one."""
    ns = 5.0 / (card.gbytes_per_s * 0.5)
    return Kernels(
        launch_us=5.0,
        other=KernelRate(ns, ns),
        gflops=card.tflops * 500.0,
        gbytes_per_s=card.gbytes_per_s * 0.5,
    )


def fused(card: Card, code: str, reached: float = 0.5) -> Kernels:
    """Return a GPU with a codec whose encode and decode of bf16 values are one kernel each, bound
    by memory.

    A kernel reads the values and writes the wire, or the other way round, at half of the stated
    bandwidth (``halved``).
    """
    wire = codec(code).expected_bytes(MANY, torch.bfloat16) / MANY
    ns = (torch.bfloat16.itemsize + wire) / (card.gbytes_per_s * reached)
    return dataclasses.replace(halved(card), other=KernelRate(ns, ns))


def coded(of: Site, spec: str, code: str, link: Link, kernels: Kernels) -> float:
    """Return the microseconds of a site by an algorithm with a codec."""
    profile = Profile("paper", link, kernels=kernels)
    return coded_us(of, algorithm(of.kind, spec), codec(code), profile)


def plain(of: Site, link: Link) -> float:
    """Return the microseconds of an uncompressed site."""
    return plain_us(of, Profile("paper", link))


def gain(of: Site, spec: str, code: str, link: Link, kernels: Kernels) -> float:
    """Return how many times faster a site is with a codec."""
    return plain(of, link) / coded(of, spec, code, link, kernels)
