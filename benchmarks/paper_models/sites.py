"""Sites, kernels and times that the papers' set-ups are made of.

Nothing here is a result. What a paper says of its set-up, and what makers state of hardware, goes
into ``Link``, ``Kernels`` and ``Site``; times come from ``plain_us`` and ``coded_us``, as those of
any plan do. ``benchmarks/papers.py`` lays them beside what the papers measured.
"""

from __future__ import annotations

import dataclasses

import torch

from commpass.codecs import codec
from commpass.collectives import algorithm
from commpass.costmodel import KernelRate, Kernels, Link, Profile
from commpass.costmodel.interconnects import Card
from commpass.passes.candidates import coded_us, plain_us
from commpass.plan import Site

BF16, FP32 = "bfloat16", "float32"
FREE = Kernels(launch_us=0.0, other=KernelRate(0.0, 0.0))
MANY = 1 << 20


def site(kind: str, values: int, ranks: int, dtype: str = BF16) -> Site:
    """A collective to which each rank hands so many values."""
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


def fused(card: Card, code: str, reached: float = 0.5) -> Kernels:
    """A card with a codec whose encode and decode of bf16 values are one kernel each, bound by
    memory: values are read and the wire written, or the other way round, at a share of the stated
    bandwidth: half, as ``Card`` assumes."""
    wire = codec(code).expected_bytes(MANY, torch.bfloat16) / MANY
    ns = (torch.bfloat16.itemsize + wire) / (card.gbytes_per_s * reached)
    return dataclasses.replace(card.kernels, other=KernelRate(ns, ns))


def coded(of: Site, spec: str, code: str, link: Link, kernels: Kernels) -> float:
    """Microseconds of a site by an algorithm with a codec."""
    profile = Profile("paper", link, kernels=kernels)
    return coded_us(of, algorithm(of.kind, spec), codec(code), profile)


def plain(of: Site, link: Link) -> float:
    """Microseconds of a site that is left alone."""
    return plain_us(of, Profile("paper", link))


def gain(of: Site, spec: str, code: str, link: Link, kernels: Kernels) -> float:
    """How many times faster a site is with a codec."""
    return plain(of, link) / coded(of, spec, code, link, kernels)
