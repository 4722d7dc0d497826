"""The claims, paper by paper."""

from __future__ import annotations

import math

import torch

from benchmarks.claims.cases import Case
from benchmarks.claims.claim import Claim, Found
from benchmarks.claims.ranks import NAIVE
from benchmarks.paper_models.rows import all_rows

TRAINING = "needs training runs of the model on real text, with several seeds"
HARDWARE = "needs the paper's GPUs"


# --- TACO -----------------------------------------------------------------------------------------

TACO = {
    name: Case(f"taco {name}", spec, "two_shot", "gradients")
    for name, spec in {
        "e4m3": "taco",
        "e5m2": "taco(form=e5m2)",
        "int8": "taco(form=int8)",
        "without the rotation": "taco(rotate=False)",
        "one scale": "taco(scale=absmax)",
        "ours": "rotated",
    }.items()
} | {"naive": Case("naive fp8 of gradients", NAIVE, "", "gradients")}


def taco() -> list[Claim]:
    def ratio(one: str, other: str):
        return lambda found: found[TACO[one].name].error / found[TACO[other].name].error

    def less(one: str, other: str):
        return lambda found: found[TACO[one].name].error < found[TACO[other].name].error

    def of(*names: str) -> tuple[Case, ...]:
        return tuple(TACO[name] for name in names)

    return [
        Claim(
            paper="TACO",
            where="section 3",
            text="bits a value: 8 of codes, and two float32 scales for each 256",
            number=8.25,
            cases=of("e4m3"),
            # Both stages of the two-shot hand over all values once, the second one a rank's share.
            measure=lambda found: found[TACO["e4m3"].name].bits / 1.25,
        ),
        Claim(
            paper="TACO",
            where="figure 14",
            text="E4M3 loses less than E5M2",
            kind="order",
            cases=of("e4m3", "e5m2"),
            measure=less("e4m3", "e5m2"),
        ),
        Claim(
            paper="TACO",
            where="figure 11",
            text="fp8 without scales is no use for gradients: here its error is 10 times TACO's",
            kind="order",
            cases=of("naive", "e4m3"),
            measure=lambda found: ratio("naive", "e4m3")(found) > 10,
        ),
        Claim(
            paper="TACO",
            where="figure 14",
            text="with int8 codes training diverges: the error of a sum is larger than E4M3's",
            kind="order",
            cases=of("int8", "e4m3"),
            measure=less("e4m3", "int8"),
        ),
        Claim(
            paper="TACO",
            where="section 5.2.2",
            text="a second scale lowers the error (we found that it cancels)",
            kind="order",
            cases=of("one scale", "e4m3"),
            measure=lambda found: ratio("one scale", "e4m3")(found) > 1.01,
        ),
        Claim(
            paper="TACO",
            where="tables 1 and 2",
            text="validation loss of a 6.7B model, +0.25 % at TP 8; +0.17 % at TP 4",
            why_not=TRAINING,
        ),
    ]


# --- ZipCCL ---------------------------------------------------------------------------------------

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


# --- Low-bit tensor-parallel inference ------------------------------------------------------------

LOW = {
    how: Case(f"low-bit {how}", f"calibrated:{how}", "one_shot", "channels")
    for how in ("each", "shared", "random", "none")
} | {"int4": Case("low-bit int4", "int4", "one_shot", "channels")}


def lowbit() -> list[Claim]:
    def error(found: Found, how: str) -> float:
        return found[LOW[how].name].error

    every = tuple(LOW.values())
    return [
        Claim(
            paper="Low-bit TP",
            where="section 3",
            text="bits a value, with 1/64 of the channels in bf16",
            number=4.2,
            cases=(LOW["each"],),
            measure=lambda found: found[LOW["each"].name].bits,
        ),
        Claim(
            paper="Low-bit TP",
            where="table 1",
            text="chosen channels lower the error of int4",
            kind="order",
            cases=every,
            measure=lambda found: error(found, "each") < 0.5 * error(found, "none"),
        ),
        Claim(
            paper="Low-bit TP",
            where="table 1",
            text="channels chosen at random add nothing: within a tenth of none",
            kind="order",
            cases=every,
            measure=lambda found: error(found, "random") > 0.9 * error(found, "none"),
        ),
        Claim(
            paper="Low-bit TP",
            where="section 3",
            text="scales of each device lose no more than shared ones",
            kind="order",
            cases=every,
            measure=lambda found: error(found, "each") <= error(found, "shared"),
        ),
        Claim(
            paper="Low-bit TP",
            where="table 1",
            text="98.0, 99.5 and 97.1 % of the scores of three models of 12B to 27B",
            why_not="no weights of these models are at hand",
        ),
    ]


# --- EQuARX ---------------------------------------------------------------------------------------

EQUARX = {
    name: Case(f"equarx {name}", "equarx", how)
    for name, how in {
        "full loop": "ring",
        "semi-loop": "semi_ring",
        "RS only": "ring(stage=rs)",
        "AG only": "ring(stage=ag)",
        "two-shot": "two_shot",
    }.items()
} | {"naive": Case("naive fp8 of N(0, 1)", NAIVE, "")}


def equarx() -> list[Claim]:
    def mse(found: Found, name: str) -> float:
        return found[EQUARX[name].name].mse

    def fewer(one: str, other: str) -> Claim:
        return Claim(
            paper="EQuARX",
            where="figure 7",
            text=f"{one} has a smaller error than {other}",
            kind="order",
            cases=(EQUARX[one], EQUARX[other]),
            measure=lambda found: mse(found, one) < mse(found, other),
        )

    return [
        Claim(
            paper="EQuARX",
            where="section IV",
            text="mean square error on N(0, 1): naive fp8 by int8 in blocks, 0.13 / 0.001",
            number=130.0,
            kind="ratio",
            cases=(EQUARX["naive"], EQUARX["full loop"]),
            measure=lambda found: mse(found, "naive") / mse(found, "full loop"),
        ),
        fewer("semi-loop", "full loop"),
        fewer("AG only", "RS only"),
        fewer("AG only", "full loop"),
    ]


# --- SSFusion -------------------------------------------------------------------------------------


def ssfusion() -> list[Claim]:
    return [
        Claim(
            paper="SSFusion",
            where="table 1",
            text="accuracy 72.3 against 73.6 dense; others 62 to 68",
            why_not=TRAINING,
        ),
        Claim(
            paper="SSFusion",
            where="figure 14",
            text="throughput, +27.5 to +106.7 % over six other systems",
            why_not=HARDWARE,
        ),
    ]


def predicted() -> list[Claim]:
    """What the cost model says of the papers' times (``benchmarks/papers.py``)."""
    return [
        Claim(
            paper=row.paper,
            where="times",
            text=row.what,
            number=row.number if isinstance(row.number, str) else float(row.number),
            kind="ratio",
            predicted=row.predicted,
            assumed=row.assumed,
            fitted=row.fitted,
        )
        for row in all_rows()
        if isinstance(row.predicted, str) or math.isfinite(row.predicted)
    ]


def every() -> list[Claim]:
    return [*taco(), *zipccl(), *lowbit(), *equarx(), *ssfusion(), *predicted()]
