"""SSFusion: sparse gradients that are fused."""

from __future__ import annotations

from benchmarks.claims.claim import Claim

TRAINING = "needs training runs of the model on real text, with several seeds"
HARDWARE = "needs the paper's GPUs"


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
