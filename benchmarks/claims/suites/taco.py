"""TACO: fp8 for the activations and gradients of tensor-parallel training."""

from __future__ import annotations

from benchmarks.claims.cases import Case
from benchmarks.claims.claim import Claim
from benchmarks.claims.ranks import NAIVE

TRAINING = "needs training runs of the model on real text, with several seeds"

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
