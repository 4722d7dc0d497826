"""The papers' equations: how far commpass is from each, computed in float64 from the formula."""

from __future__ import annotations

from benchmarks.claims.cases import Case
from benchmarks.claims.claim import Claim
from benchmarks.claims.formulas import EQUATIONS
from benchmarks.claims.formulas.equation import Equation

BOUND = 1e-12
"""Bound of a sum over ranks in float64."""


def summed(reference: str, codec: str, algorithm: str, data: str) -> Case:
    """Return the claim of an all_reduce in float64 that is compared with
    ``formulas.SUMS[reference]``."""
    return Case(
        f"formula {reference}", codec, algorithm, data, dtype="float64", reference=reference
    )


SUMS = {
    "TACO": [
        (
            "equations 5 to 13",
            "a two-shot sum over four ranks",
            summed("taco", "taco", "two_shot", "gradients"),
        )
    ],
    "Low-bit TP": [
        (
            "section 2",
            "a one-shot sum over four ranks, each with scales of its own",
            summed("low-bit", "calibrated:each", "one_shot", "channels"),
        )
    ],
    "EQuARX": [
        (
            "section III.C",
            f"a full loop over four ranks, {stages}",
            summed(name, "equarx", how, "gaussian"),
        )
        for name, how, stages in (
            ("equarx", "ring", "both stages coded"),
            ("equarx rs", "ring(stage=rs)", "the reduce-scatter coded"),
            ("equarx ag", "ring(stage=ag)", "the all-gather coded"),
        )
    ],
}
"""By paper: whole sums in compiled graphs."""


def formulas() -> list[Claim]:
    """Return a claim for each equation, and one for each whole sum in a compiled graph."""
    found = []
    for paper, equations in EQUATIONS.items():
        found += [_of(paper, equation) for equation in equations]
        found += [_sum(paper, where, text, case) for where, text, case in SUMS.get(paper, [])]
    return found


def _of(paper: str, equation: Equation) -> Claim:
    return Claim(
        paper=paper,
        where=equation.where,
        text=f"formula: {equation.text}",
        bound=equation.bound,
        measure=lambda found: equation.deviation(),
        note=equation.note,
    )


def _sum(paper: str, where: str, text: str, case: Case) -> Claim:
    return Claim(
        paper=paper,
        where=where,
        text=f"formula: {text}, in a compiled graph",
        bound=BOUND,
        cases=(case,),
        measure=lambda found: found[case.name].deviation,
        note="float64",
    )
