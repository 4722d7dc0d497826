"""ZipCCL: lossless coding of bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.claims.cases import Case
from benchmarks.claims.claim import Claim, Found
from benchmarks.claims.experiments.turns import PLAIN
from benchmarks.claims.experiments.zipccl_bits import OF, ONE_WINDOW, by_step
from benchmarks.claims.experiments.zipccl_late import ratio
from benchmarks.paper_models.hops import hops
from benchmarks.paper_models.sites import BF16, FP32, coded, fused, plain, site
from benchmarks.paper_models.zipccl import A6000, LLAMA_LAYER, ZIPPED
from commpass.costmodel import Link

GATHERED = Case(
    "zipccl gather", "exponent(planes=3)", "direct", "gaussian", "all_gather", "bfloat16"
)
OURS = Case("our gather", "exponent", "direct", "gaussian", "all_gather", "bfloat16")
COVERED = (29.9, 57.2, 75.7, 85.5, 90.4, 95.0, 97.5)
BITS, LATE = "zipccl_bits", "zipccl_late"
LATE_BY = 50.0
SMALL = (
    "the first matmul of the first MLP of a transformer of 2 layers of 256 in bfloat16, after 300"
    " steps"
)
GPUS = "needs the paper's GPUs"
LAB = f"4 ranks over gloo, links of 1 Gbit/s, one rank {LATE_BY:g} ms late, from its start on"

RATES = (1.0, 3.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)
"""Rates of links, in Gbit/s."""


def covered(k: int) -> float:
    """Return the percentage of Gaussian bfloat16 values that the k most common exponents hold."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    exponents = (x.view(torch.int16).to(torch.int32) >> 7) & 0xFF
    counts = torch.bincount(exponents, minlength=256).sort(descending=True).values
    return 100 * float(counts[:k].sum()) / x.numel()


def zipccl() -> list[Claim]:
    return [*_gaussian(), *_bits(), *_late(), *_switched(), *_not_here()]


def _gaussian() -> list[Claim]:
    return [
        *(
            Claim(
                paper="ZipCCL",
                where="table 1",
                text=f"the {k} commonest exponents of a Gaussian hold, in percent",
                number=number,
                measure=lambda found, k=k: covered(k),
                note="counted in 1,048,576 samples; nothing is sent",
            )
            for k, number in enumerate(COVERED, 1)
        ),
        Claim(
            paper="ZipCCL",
            where="section 4.1",
            text="an all_gather gives the bits that were sent",
            kind="order",
            cases=(GATHERED,),
            measure=lambda found: found[GATHERED.name].exact,
        ),
        Claim(
            paper="ZipCCL",
            where="figure 13",
            text="an all_gather is faster by the bytes that it saves, at most (measured: bytes)",
            number=1.35,
            kind="ratio",
            cases=(GATHERED,),
            measure=lambda found: 16 / found[GATHERED.name].bits,
        ),
        Claim(
            paper="ZipCCL",
            where="ours",
            text="our form of the codec sends less than the paper's",
            kind="order",
            cases=(GATHERED, OURS),
            measure=lambda found: found[OURS.name].bits < found[GATHERED.name].bits,
        ),
    ]


def _last(by_step: dict[int, float]) -> float:
    return by_step[max(by_step)]


def _by_step(found: Found, of: str, how: str) -> dict[int, float]:
    return by_step(found[BITS]["rows"], of, how)


def _bits() -> list[Claim]:
    def claim(where: str, text: str, measure: Any, **more: Any) -> Claim:
        given = {"experiments": (BITS,), "note": SMALL} | more
        return Claim(paper="ZipCCL", where=where, text=text, measure=measure, **given)

    paper, ours = "exponent(planes=3)", "exponent"
    return [
        claim(
            "figure 1",
            "bytes that an all_to_all of experts sends: plain by coded",
            lambda found: 16 / _last(_by_step(found, "activations", paper)),
            number=1.33,
            kind="ratio",
            note=f"the activations of a dense model: {SMALL}",
        ),
        claim(
            "figure 1",
            "the gain grows during training",
            lambda found: (
                _last(_by_step(found, "activations", paper))
                < _by_step(found, "activations", paper)[min(_by_step(found, "activations", paper))]
            ),
            kind="order",
        ),
        *(
            claim(
                "figure 16",
                f"the 7 commonest exponents of {of} hold as much as a Gaussian's, in percent",
                lambda found, of=of: 100 * _last(_by_step(found, of, "top share")),
                number=97.5,
            )
            for of in OF
        ),
        *(
            claim(
                "section 4.1",
                f"bits of {of} by one window for the tensor, from its deviation (equation 5)",
                lambda found, of=of: _last(_by_step(found, of, ONE_WINDOW)),
                kind="ours",
            )
            for of in OF
        ),
        *(
            claim(
                "ours",
                f"bits of {of} on the wire by {codec}",
                lambda found, of=of, codec=codec: _last(_by_step(found, of, codec)),
                kind="ours",
            )
            for of in OF
            for codec in (paper, ours)
        ),
    ]


def _late() -> list[Claim]:
    def times(one: str, other: str, even: bool) -> Any:
        return lambda found: ratio(found[LATE]["rows"], one, other, LATE_BY, even)

    def claim(text: str, measure: Any, **more: Any) -> Claim:
        given = {"experiments": (LATE,), "note": LAB} | more
        return Claim(paper="ZipCCL", where="figure 14", text=text, measure=measure, **given)

    rows = []
    for even, words in ((True, "even parts"), (False, "the late rank has half, as in figure 8")):
        rows += [
            claim(
                f"all_to_all with a late rank: design 1 by design 2, 1.40 to 1.55 ({words})",
                times("design 1", "design 2", even),
                number=1.4,
                kind="ratio",
            ),
            claim(
                f"design 1 loses the gain where a rank is late: no faster than plain ({words})",
                lambda found, even=even: times(PLAIN, "design 1", even)(found) <= 1.0,
                kind="order",
            ),
            claim(
                f"design 2 keeps it: faster than plain ({words})",
                lambda found, even=even: times(PLAIN, "design 2", even)(found) > 1.0,
                kind="order",
            ),
        ]
    return rows


def switched_up_to(dtype: str) -> float:
    """Return the highest of ``RATES``, in Gbit/s, at which a coded reduce_scatter is predicted to
    be faster than the native one in ``dtype``; 0 for none.

    It is that of a layer of Llama3-8B on 8 hosts with one GPU each.
    """
    kernels, link = fused(A6000, ZIPPED), hops("infiniband-hdr")
    values, won = LLAMA_LAYER // 8 * 8, [0.0]
    for gbit in RATES:
        at = Link(link.alpha_us, gbit / 8)
        native = plain(site("reduce_scatter", values, 8, dtype), at)
        zipped = coded(site("reduce_scatter", values, 8), "direct", ZIPPED, at, kernels)
        won += [gbit] if zipped < native else []
    return max(won)


def _switched() -> list[Claim]:
    return [
        Claim(
            paper="ZipCCL",
            where="section 5.2",
            text=f"a coded reduce_scatter beats a native one in {dtype} up to, in Gbit/s",
            predicted=switched_up_to(dtype),
            assumed=f"of {RATES[0]:g} to {RATES[-1]:g}; 8 hosts of one A6000, a port each; a layer"
            " of Llama3-8B; a Gaussian's bytes; kernels at half bandwidth",
        )
        for dtype in (FP32, BF16)
    ]


def _not_here() -> list[Claim]:
    return [
        Claim(paper="ZipCCL", where=where, text=text, why_not=why)
        for where, text, why in (
            ("figure 1", "times of all_gathers by four lossless methods", GPUS),
            ("figures 2 to 8", "collectives, formats, workflows and layouts", "drawings"),
            (
                "figures 9 and 10",
                "end to end and all_to_all of DeepSeek-V3 and Qwen3-MoE, 16 to 64 GPUs",
                f"{GPUS}; Llama3-8B is predicted below",
            ),
            (
                "figures 11 and 12",
                "1.26 to 1.83 times DietGPU's throughput, and compression times of both",
                "DietGPU needs CUDA: no GPU is at hand for this page",
            ),
            ("section 6.2", "1.13 end to end on 16 H800 GPUs", GPUS),
        )
    ]
