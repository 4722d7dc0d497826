"""Low-bit tensor-parallel inference."""

from __future__ import annotations

from benchmarks.claims.cases import Case
from benchmarks.claims.claim import Claim, Found

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
