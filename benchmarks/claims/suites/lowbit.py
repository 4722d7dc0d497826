"""Low-bit tensor-parallel inference."""

from __future__ import annotations

from typing import Any

from benchmarks.claims.cases import Case
from benchmarks.claims.claim import Claim, Found
from benchmarks.claims.experiments.lowbit_perplexity import (
    HOWS,
    loss_percent,
    mean_percent,
    spread_percent,
)

LOW = {
    how: Case(f"low-bit {how}", f"calibrated:{how}", "one_shot", "channels")
    for how in ("each", "shared", "random", "none")
} | {"int4": Case("low-bit int4", "int4", "one_shot", "channels")}
TRAINED, PLANTED, FOUR = "lowbit_perplexity", "lowbit_planted", "lowbit_four_ranks"
NAMES = {TRAINED: "2 ranks", PLANTED: "outliers planted, 2 ranks", FOUR: "4 ranks"}
KEPT = 1 / 64
SMALL = (
    "perplexity of a byte, a transformer of 2 layers of 256 on held-out text; three calibrations;"
    " a percent of perplexity is no percent of a score"
)
FAR = 10.0
"""The ratio to the median channel's range from which a range counts as enormous; in the paper's
figure a few channels exceed it."""


def lowbit() -> list[Claim]:
    return [*_errors(), *_perplexities(), *_orders(), *_not_here()]


def _errors() -> list[Claim]:
    def error(found: Found, how: str) -> float:
        return found[LOW[how].name].error

    every = tuple(LOW.values())
    planted = "one sum of synthetic values: one channel in 64 is 30 times as large"
    return [
        Claim(
            paper="Low-bit TP",
            where="section 3",
            text="bits a value, with 1/64 of the channels in bf16",
            number=4.2,
            cases=(LOW["each"],),
            measure=lambda found: found[LOW["each"].name].bits,
            note=planted,
        ),
        Claim(
            paper="Low-bit TP",
            where="table 1",
            text="chosen channels lower the error of int4",
            kind="order",
            cases=every,
            measure=lambda found: error(found, "each") < 0.5 * error(found, "none"),
            note=planted,
        ),
        Claim(
            paper="Low-bit TP",
            where="table 1",
            text="channels chosen at random add nothing: within a tenth of none",
            kind="order",
            cases=every,
            measure=lambda found: error(found, "random") > 0.9 * error(found, "none"),
            note=planted,
        ),
        Claim(
            paper="Low-bit TP",
            where="section 3",
            text="scales of each device lose no more than shared ones",
            kind="order",
            cases=every,
            measure=lambda found: error(found, "each") <= error(found, "shared"),
            note=planted,
        ),
    ]


def _up(part: str, how: str, share: float, bits: int, words: str) -> Claim:
    return Claim(
        paper="Low-bit TP",
        where="table 1" if bits == 4 else "figure 3",
        text=f"perplexity up by, in percent: int{bits}, {words} ({NAMES[part]})",
        kind="ours",
        experiments=(part,),
        measure=lambda found: mean_percent(found[part], how, share, bits),
        spread=(
            (lambda found: spread_percent(found[part], how, share, bits))
            if part == TRAINED
            else None
        ),
        note=SMALL if part == TRAINED else f"{SMALL}, here one",
    )


def _perplexities() -> list[Claim]:
    kept = f"1/{round(1 / KEPT)} of the channels in bf16"
    ways = {
        "selected": "chosen by range",
        "random": "chosen at random",
        "dynamic": "chosen by range, scales measured each time",
    }
    rows = []
    for bits in (4, 2, 6):
        rows.append(_up(TRAINED, "selected", 0.0, bits, "no channel kept"))
        rows.append(_up(TRAINED, "dynamic", 0.0, bits, "no channel kept, scales measured"))
        rows += [_up(TRAINED, how, KEPT, bits, f"{kept}, {ways[how]}") for how in HOWS]
    rows.append(_up(PLANTED, "dynamic", 0.0, 4, "no channel kept, scales measured"))
    rows += [_up(PLANTED, how, KEPT, 4, f"{kept}, {ways[how]}") for how in HOWS]
    rows.append(_up(FOUR, "selected", 0.0, 4, "no channel kept"))
    rows.append(_up(FOUR, "selected", KEPT, 4, f"{kept}, {ways['selected']}"))
    return rows


def _orders() -> list[Claim]:
    def order(where: str, text: str, measure: Any, *more: str) -> Claim:
        return Claim(
            paper="Low-bit TP",
            where=where,
            text=text,
            kind="order",
            experiments=(TRAINED, *more),
            measure=measure,
            note=SMALL,
        )

    def less(part: str, one: tuple[str, float, int], other: tuple[str, float, int]) -> Any:
        """Return a test: whether one loss is below the other by more than the spread of both."""

        def measure(found: Found) -> bool:
            a, b = (mean_percent(found[part], *each) for each in (one, other))
            noise = max(spread_percent(found[part], *each) for each in (one, other))
            return a + noise < b

        return measure

    def random_adds_nothing(found: Found) -> bool:
        part = found[TRAINED]
        return mean_percent(part, "random", KEPT, 4) > 0.9 * mean_percent(part, "selected", 0.0, 4)

    def planted_change_nothing(found: Found) -> bool:
        """Return whether planted channels change nothing, with the first calibration, which both
        models had."""
        one, other = (
            loss_percent(found[part], "selected", 0.0, 4)[0] for part in (PLANTED, TRAINED)
        )
        return abs(one - other) < 0.1

    chosen = {
        bits: less(TRAINED, ("selected", KEPT, bits), ("selected", 0.0, bits)) for bits in (2, 4, 6)
    }
    return [
        order(
            "table 1", "perplexity: chosen channels in bf16 lose less than int4 alone", chosen[4]
        ),
        order("figure 3", "perplexity: so they do at lower precision, int2", chosen[2]),
        order("figure 3", "perplexity: and at higher precision, int6", chosen[6]),
        order(
            "table 1",
            "perplexity: channels at random add nothing: within a tenth of int4 alone",
            random_adds_nothing,
        ),
        order(
            "section 4",
            "perplexity: more kept channels lose less: 1/16 less than 1/128",
            less(TRAINED, ("selected", 1 / 16, 4), ("selected", 1 / 128, 4)),
        ),
        order(
            "figure 1",
            f"a few channels reach more than {FAR:g} times as far as the median one",
            lambda found: max(map(max, found[TRAINED]["widest_by_median"])) > FAR,
        ),
        order(
            "ours",
            "planted outlier channels: kept in bf16 they cost less where scales are of blocks",
            less(PLANTED, ("dynamic", KEPT, 4), ("dynamic", 0.0, 4)),
            PLANTED,
        ),
        order(
            "ours",
            "planted outlier channels change nothing where each channel has a scale: 1/10 percent",
            planted_change_nothing,
            PLANTED,
        ),
    ]


def _not_here() -> list[Claim]:
    return [
        Claim(
            paper="Low-bit TP",
            where="table 1",
            text="98.0, 99.5 and 97.1 % of the scores of three models of 12B to 27B",
            why_not="no weights of these models are at hand",
        ),
        Claim(
            paper="Low-bit TP",
            where="figure 2",
            text="how channels are divided and sent",
            why_not="a drawing of the method: nothing is measured in it",
        ),
    ]
