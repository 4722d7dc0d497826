"""ZipCCL: lossless coding of bfloat16."""

from __future__ import annotations

import torch

from benchmarks.claims.cases import Case
from benchmarks.claims.claim import Claim

GATHERED = Case(
    "zipccl gather", "exponent(planes=3)", "direct", "gaussian", "all_gather", "bfloat16"
)
OURS = Case("our gather", "exponent", "direct", "gaussian", "all_gather", "bfloat16")
COVERED = (29.9, 57.2, 75.7, 85.5, 90.4, 95.0, 97.5)


def covered(k: int) -> float:
    """Percent of Gaussian bfloat16 values that the k commonest exponents hold."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    exponents = (x.view(torch.int16).to(torch.int32) >> 7) & 0xFF
    counts = torch.bincount(exponents, minlength=256).sort(descending=True).values
    return 100 * float(counts[:k].sum()) / x.numel()


def zipccl() -> list[Claim]:
    return [
        *(
            Claim(
                paper="ZipCCL",
                where="table 1",
                text=f"the {k} commonest exponents of a Gaussian hold, in percent",
                number=number,
                measure=lambda found, k=k: covered(k),
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
