"""EQuARX: a quantised all_reduce in the compiler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.claims.cases import Case
from benchmarks.claims.claim import Claim, Found
from benchmarks.claims.experiments.equarx_forms import crossover_mib, gain, ms, mse
from benchmarks.claims.experiments.turns import PLAIN
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
FORMS = "equarx_forms"
KIB, GBIT = 16384, 1.0
LAB = "bfloat16, 4 ranks over gloo on two cores, links of 1 Gbit/s, medians"
LOOPBACK = "bfloat16, 4 ranks over gloo on two cores, loopback, medians"
SIX = [
    f"{loop}{stage}"
    for loop in ("full loop", "semi-loop")
    for stage in ("", ", RS only", ", AG only")
]


def equarx() -> list[Claim]:
    return [*_errors(), *_forms(), *_sizes(), *_not_here()]


def _errors() -> list[Claim]:
    def error(found: Found, name: str) -> float:
        return found[EQUARX[name].name].mse

    def fewer(one: str, other: str) -> Claim:
        return Claim(
            paper="EQuARX",
            where="figure 7",
            text=f"{one} has a smaller error than {other}",
            kind="order",
            cases=(EQUARX[one], EQUARX[other]),
            measure=lambda found: error(found, one) < error(found, other),
        )

    return [
        Claim(
            paper="EQuARX",
            where="section IV",
            text="mean square error on N(0, 1): naive fp8 by int8 in blocks, 0.13 / 0.001",
            number=130.0,
            kind="ratio",
            cases=(EQUARX["naive"], EQUARX["full loop"]),
            measure=lambda found: error(found, "naive") / error(found, "full loop"),
        ),
        fewer("semi-loop", "full loop"),
        fewer("AG only", "RS only"),
        fewer("AG only", "full loop"),
    ]


def _claim(where: str, text: str, measure: Any, **more: Any) -> Claim:
    given = {"experiments": (FORMS,), "note": LAB} | more
    return Claim(paper="EQuARX", where=where, text=text, measure=measure, **given)


def _rows(found: Found) -> Sequence[dict[str, Any]]:
    return found[FORMS]["rows"]


def _forms() -> list[Claim]:
    """Return each form of figure 7 as speed against error."""

    def faster(one: str, other: str) -> Any:
        return lambda found: ms(_rows(found), one, KIB, GBIT) < ms(_rows(found), other, KIB, GBIT)

    return [
        *(
            _claim(
                "figure 7",
                f"{name}: times as fast as the plain all_reduce, 16 MiB",
                lambda found, name=name: gain(_rows(found), name, KIB, GBIT),
                kind="ours",
            )
            for name in SIX
        ),
        *(
            _claim(
                "figure 7",
                f"{name}: mean square error on N(0, 1), 2 MiB",
                lambda found, name=name: mse(_rows(found), name, 2048),
                kind="ours",
                note="bfloat16, in which sums are rounded: 4 ranks",
            )
            for name in (*SIX, "naive fp8")
        ),
        _claim(
            "figure 7",
            "a full loop is faster than a semi-loop, 16 MiB",
            faster("full loop", "semi-loop"),
            kind="order",
        ),
        _claim(
            "figure 7",
            "both stages coded are faster than one, 16 MiB",
            lambda found: all(
                faster(loop, f"{loop}, {stage} only")(found)
                for loop in ("full loop", "semi-loop")
                for stage in ("RS", "AG")
            ),
            kind="order",
        ),
        _claim(
            "figure 2",
            "micro-shards in a pipeline are faster than none, 16 MiB",
            faster("micro-shards", "full loop"),
            kind="order",
        ),
    ]


def _sizes() -> list[Claim]:
    def crossover(gbit: float | None) -> Any:
        def measure(found: Found) -> float:
            mib = crossover_mib(_rows(found), "full loop", gbit)
            return math.inf if mib is None else mib

        return measure

    return [
        _claim(
            "section IV",
            "times as fast as a bf16 all_reduce, full loop, 16 MiB",
            lambda found: gain(_rows(found), "full loop", KIB, GBIT),
            number=1.8,
            kind="ratio",
        ),
        _claim(
            "section IV",
            "time over that of half the bytes by the plain all_reduce, full loop, 16 MiB",
            lambda found: (
                2 * ms(_rows(found), "full loop", KIB, GBIT) / ms(_rows(found), PLAIN, KIB, GBIT)
            ),
            number=1.1,
            kind="ratio",
        ),
        _claim(
            "section IV",
            "MiB from which on a full loop gains",
            crossover(GBIT),
            number=2.0,
            kind="ratio",
            note=f"{LAB}, on sizes from 1/16 to 64",
        ),
        _claim(
            "section IV",
            "MiB from which on a full loop gains on loopback, whose wire is this machine's memory",
            crossover(None),
            kind="ours",
            note=LOOPBACK,
        ),
    ]


def _not_here() -> list[Claim]:
    return [
        Claim(paper="EQuARX", where=where, text=text, why_not=why)
        for where, text, why in (
            (
                "table I",
                "scores of Gemma 3 12B and 27B in ten benchmarks, -2.58 % at most",
                "no weights of these models are at hand",
            ),
            ("section IV", "prefill 1.25 and 1.1 times as fast", "needs the paper's TPUs"),
            (
                "figures 1 and 3 to 6",
                "what else is drawn",
                "the text at hand is a summary, without these figures",
            ),
        )
    ]
