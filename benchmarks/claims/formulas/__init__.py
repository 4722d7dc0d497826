"""The equations of the papers in NumPy's float64, and how far commpass is from each. One file per
paper.

In each file the formulas come first and use neither commpass nor torch. ``EQUATIONS`` then compares
them with what a codec puts on its wire, or with the result of an algorithm or a cost model.
``SUMS`` has whole all_reduces: each maps the tensors of all ranks to the result on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.claims.formulas import equarx, lowbit, ssfusion, taco, zipccl
from benchmarks.claims.formulas.equation import Equation, Values

EQUATIONS: dict[str, tuple[Equation, ...]] = {
    "TACO": taco.EQUATIONS,
    "ZipCCL": zipccl.EQUATIONS,
    "Low-bit TP": lowbit.EQUATIONS,
    "EQuARX": equarx.EQUATIONS,
    "SSFusion": ssfusion.EQUATIONS,
}
"""By paper, in the order of the page."""
SUMS: dict[str, Callable[[Sequence[Values]], Values]] = {
    "taco": taco.two_shot,
    "low-bit": lowbit.calibrated_sum,
    "equarx": equarx.ring,
    "equarx rs": lambda ranks: equarx.ring(ranks, "rs"),
    "equarx ag": lambda ranks: equarx.ring(ranks, "ag"),
}
