"""SSFusion: sparse gradients in fused messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.claims.claim import Claim, Found, of_experiments, untestable
from benchmarks.claims.experiments.experiment import stored
from benchmarks.claims.experiments.losses import mean_percent
from benchmarks.claims.sizes import small_percents
from benchmarks.claims.suites.losses import Trained

PAPER = "SSFusion"
HARDWARE = "needs the paper's GPUs"
OTHERS = "needs the six other systems, and the paper's GPUs"
WHAT = "0.15 million parameters on bytes of English, 2 ranks, SGD"
TRAINED = Trained("ssfusion_training", "ways", "dense", WHAT)
TIMES = "ssfusion_times"
NOT_OFFLOADED = (
    "the plans offload no gradient of this model: ranks that share two processors have no idle one"
    " that could select during backward"
)
SMALL = {
    "ResNet-152": (72.38, 2.37),
    "ViT-large": (62.76, 0.11),
    "BERT-large": (62.66, 0.10),
    "GPT2-large": (66.51, 0.08),
}
MISSING = {0.2: 8.6, 0.4: 24.0, 0.6: 42.5, 0.8: 66.5, 1.0: 81.2}
"""Table I, BERT-large: percent of tensors missing by percent of tensors fused."""
PERPLEXITIES = {
    "SSFusion": 106.0,
    "OkTopk": 159.0,
    "SparDL": 121.0,
    "OMGS": 131.0,
    "Cupcake": 130.0,
}
"""Figure 12(c), an LSTM on WikiText-2; 102 without sparsification."""


def fused(degree: float) -> str:
    """Return the name of the variant with this share of fused tensors."""
    return "fused, 0.01" if degree == 1 else f"degree {degree:g}"


def ssfusion() -> list[Claim]:
    return [*small(), *missing(), *losses(), *steps(), *overhead(), *not_here()]


def small() -> list[Claim]:
    """Table II."""
    found = []
    for model, numbers in SMALL.items():
        for place, what in enumerate(("of the tensors", "of all entries")):
            found.append(
                Claim(
                    paper=PAPER,
                    where="table II",
                    text=f"{model}: small tensors, percent {what}",
                    number=numbers[place],
                    kind="exact" if place == 0 else "ratio",
                    measure=lambda found, model=model, place=place: small_percents(model)[place],
                    note="counted in the model's parameters; nothing is sent",
                )
            )
    return found


def missing() -> list[Claim]:
    """Table I: return the claims of the share of tensors of which nothing is sent."""

    def rate(found: Found, degree: float) -> float:
        return 100 * fmean(run["missing"] for run in TRAINED.runs(found, fused(degree)))

    claim = partial(
        of_experiments,
        paper=PAPER,
        experiments=(TRAINED.experiment,),
        kind="loss",
        note=TRAINED.note(),
    )

    rows = [
        claim(
            "table I",
            f"{100 * degree:g} % of the tensors fused: percent missing (the paper's: BERT-large)",
            number,
            lambda found, degree=degree: rate(found, degree),
        )
        for degree, number in MISSING.items()
    ]
    rising = sorted((0.0, *MISSING))
    return [
        claim(
            "table I",
            "no tensor is missing where each is selected from by itself",
            None,
            lambda found: rate(found, 0.0) == 0,
        ),
        *rows,
        claim(
            "table I",
            "the missing rate rises with the share that is fused",
            None,
            lambda found: (
                all(
                    rate(found, low) <= rate(found, high)
                    for low, high in itertools.pairwise(rising)
                )
                and rate(found, 1.0) > 0
            ),
        ),
    ]


def losses() -> list[Claim]:
    """Figures 2, 5(b) and 12."""

    def order(where: str, text: str, holds: Callable[[Found], bool]) -> Claim:
        return TRAINED.order(PAPER, where, text, holds)

    def perplexity(name: str) -> float:
        """Return a perplexity as a percentage of the loss, which is its logarithm."""
        return 100 * (math.log(PERPLEXITIES[name]) / math.log(102.0) - 1)

    def near(density: str) -> Callable[[Found], bool]:
        """Return whether SSFusion's loss is at most half a percent above that of per-tensor
        selection."""

        def holds(found: Found) -> bool:
            runs = TRAINED.runs(found, f"selective, {density}")
            base = TRAINED.runs(found, f"each tensor, {density}")
            return mean_percent(runs, base) < 0.5

        return holds

    found = [
        TRAINED.loss(
            PAPER,
            "figure 12(c)",
            "SSFusion, perplexity 106 of 102 dense, as percent of the loss; density 1 %",
            perplexity("SSFusion"),
            "selective, 0.01",
        ),
        *(
            TRAINED.loss(
                PAPER,
                "figure 12(c)",
                f"{name}, perplexity {PERPLEXITIES[name]:g} of 102 dense, as percent of the loss",
                perplexity(name),
                "fused, 0.01",
                note="one selection from all tensors",
            )
            for name in ("OkTopk", "SparDL", "OMGS", "Cupcake")
        ),
        order(
            "figure 12(a)",
            "accuracy 72.3 of 73.6 % dense: here SSFusion's loss is above dense, by less than 2 %",
            lambda found: 0 < TRAINED.percent(found, "selective, 0.01") < 2,
        ),
    ]
    for density in ("0.01", "0.001"):
        percent = f"density {100 * float(density):g} %"
        found += [
            order(
                "figures 5(b) and 12",
                f"a selection from all tensors at once loses more than SSFusion, {percent}",
                lambda found, density=density: TRAINED.is_above(
                    found, f"fused, {density}", f"selective, {density}"
                ),
            ),
            order(
                "figure 5(b)",
                f"SSFusion loses no more than each tensor by itself, or 0.5 % at most, {percent}",
                near(density),
            ),
        ]
    found.append(
        order(
            "figure 2",
            "the loss is highest where all tensors are fused, of 0 to 100 % in steps of 20",
            lambda found: (
                max((TRAINED.percent(found, fused(degree)), degree) for degree in (0.0, *MISSING))[
                    1
                ]
                == 1.0
            ),
        )
    )
    return found


def steps() -> list[Claim]:
    """Figures 5(a), 11, 15 and 16, as far as one machine with links of a given rate can test
    them."""
    note = "a transformer of width 256, 2 layers, 4 x 128 bytes, 2 ranks, DGC at 1 %, gloo"

    def ms(found: Found, gbit: float, way: str) -> float:
        rows: list[dict[str, Any]] = found[TIMES]["rows"]
        (row,) = (row for row in rows if (row["gbit"], row["way"]) == (gbit, way))
        return row["ms"][1]

    claim = partial(of_experiments, paper=PAPER, experiments=(TIMES,), note=note)

    def faster(gbit: float, way: str, other: str) -> Callable[[Found], float]:
        return lambda found: ms(found, gbit, other) / ms(found, gbit, way)

    found = []
    for gbit in (0.1, 1.0):
        at = f"at {gbit:g} Gbit/s"
        found += [
            claim(
                "figure 5(a)",
                f"a step with each selection by itself, by one with them fused (BERT-large), {at}",
                0.95 / 0.75,
                faster(gbit, "+ density-aware", "sparse, one by one"),
            ),
            offloading(
                gbit,
                claim(
                    "figure 11",
                    f"throughput gained by offloading, {at}",
                    1.10,
                    faster(gbit, "+ offload", "+ interleaved"),
                ),
            ),
            claim(
                "figure 11",
                f"throughput gained by interleaving (64 GPUs), {at}",
                1.59,
                faster(gbit, "+ interleaved", "+ density-aware"),
            ),
            claim(
                "figure 16",
                f"a sparse step is faster than a dense one, {at}",
                None,
                lambda found, gbit=gbit: faster(gbit, "ssfusion", "dense DDP")(found) > 1,
            ),
        ]
    found.append(
        claim(
            "figure 16",
            "it gains more where the network is slower",
            None,
            lambda found: (
                faster(0.1, "ssfusion", "dense DDP")(found)
                > faster(1.0, "ssfusion", "dense DDP")(found)
            ),
        )
    )
    return found


def offloading(gbit: float, claim: Claim, found: dict[str, Any] | None = None) -> Claim:
    """Return the claim on offloading, or that it cannot be tested.

    If no plan at this rate offloads a gradient, steps with and without offloading are the same.
    ``found`` is the stored result of the experiment, if it is not given.
    """
    found = found or stored(TIMES)
    rows = [row for row in (found or {}).get("rows", ()) if row["gbit"] == gbit]
    if not rows or any(row["offloaded"] for row in rows):
        return claim
    return replace(claim, experiments=(), measure=None, note="", why_not=NOT_OFFLOADED)


def overhead() -> list[Claim]:
    """Figures 2 and 4, and table V: the time of selecting and profiling."""

    def busy(found: Found, degree: float) -> float:
        return fmean(run["busy_share"] for run in TRAINED.runs(found, fused(degree)))

    def select(found: Found, kib: int) -> float:
        return found[TRAINED.experiment]["select_us"]["dgc"][str(kib)]

    def profiled(found: Found) -> float:
        """Return the percentage of a run."""
        runs = TRAINED.runs(found, "selective, 0.01")
        return 100 * fmean(run["overhead_s"] / run["took_s"] for run in runs)

    claim = partial(of_experiments, paper=PAPER, experiments=(TRAINED.experiment,))

    return [
        claim(
            "figure 2",
            "selection takes a smaller share of a run where all tensors are fused",
            None,
            lambda found: busy(found, 1.0) < busy(found, 0.0),
            TRAINED.note(),
        ),
        claim(
            "figure 4",
            "selecting from a tensor 100 times as large takes less than 10 times as long",
            None,
            lambda found: select(found, 1000) < 10 * select(found, 10),
            "DGC, 10 and 1,000 KiB, one core of a CPU",
        ),
        claim(
            "table III",
            "time of selection by a CPU: 1,000 KB by 10 KB",
            3.22 / 1.49,
            lambda found: select(found, 1000) / select(found, 10),
            "DGC, one core of a CPU",
        ),
        claim(
            "table III",
            "time of selection by a CPU: 10,000 KB by 10 KB",
            8.74 / 1.49,
            lambda found: select(found, 10_000) / select(found, 10),
            "DGC, one core of a CPU",
        ),
        claim(
            "table V",
            "profiling, percent of a run (0.04 to 0.09 of runs of hours)",
            0.09,
            profiled,
            TRAINED.note("of these steps alone"),
        ),
    ]


def not_here() -> list[Claim]:
    """Return the claims without a row above, and the reasons."""
    reasons = {
        ("abstract", "throughput, +27.5 to +106.7 % over six other systems"): OTHERS,
        ("figures 1, 3, 6, 7, 8, 10", "timelines and examples of the method"): (
            "drawings without a result"
        ),
        ("figure 2", "accuracy falls from 71.6 to 54.7 %, F1 from 84.7 to 66.8"): (
            "no such data sets are at hand; its order is measured by the loss, above"
        ),
        ("table III", "selection by a GPU"): HARDWARE,
        ("table IV", "models and data sets"): "a list without a result",
        ("figure 11", "throughput of four models on 16 to 64 GPUs"): OTHERS,
        ("figure 12", "accuracy of ResNet-152 and VGG-19, F1 of BERT-base"): (
            "no such data sets are at hand; the language model's row stands for them"
        ),
        ("figure 13", "parts of a step, communication 33.0 to 65.5 % shorter"): OTHERS,
        ("figure 14", "throughput by selector"): OTHERS,
        ("figure 15", "throughput at densities of 10, 5 and 1 %"): OTHERS,
        ("figure 17", "GPT2-XL and BLOOM-3B, +47.5 to +117.0 %"): OTHERS,
    }
    return untestable(PAPER, reasons)
