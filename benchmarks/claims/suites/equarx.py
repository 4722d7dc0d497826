"""EQuARX: a quantised all_reduce in the compiler."""

from __future__ import annotations

from benchmarks.claims.cases import Case
from benchmarks.claims.claim import Claim, Found
from benchmarks.claims.ranks import NAIVE

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
