"""The papers' times, as predicted by the cost model."""

from __future__ import annotations

import math

from benchmarks.claims.claim import Claim
from benchmarks.paper_models.rows import Row, all_rows

BY_BASELINE = "by that without compression"
PLACES = {
    ("TACO", "TFLOPS without"): ("section 5.4.2", "TFLOPS without compression"),
    ("TACO", "throughput"): ("section 5.4.1", f"throughput {BY_BASELINE}"),
    ("TACO", "unfused"): (
        "section 5.4.2",
        f"throughput {BY_BASELINE}, each operator of the codec a kernel of its own",
    ),
    ("ZipCCL", "Llama3-8B end to end"): ("figure 9", "speedup of training Llama3-8B"),
    ("ZipCCL", "all_gather, Llama3-8B"): ("figure 10", "speedup of an all_gather, Llama3-8B"),
    ("ZipCCL", "all_gather"): ("figure 13", "speedup of an all_gather"),
    ("ZipCCL", "all_to_all"): ("figure 13", "speedup of an all_to_all"),
    ("ZipCCL", "reduce_scatter"): ("figure 15", "which reduce_scatter the switcher takes"),
    ("EQuARX", "all_reduce"): ("section IV", "speedup of an all_reduce"),
    ("EQuARX", "MiB from which it gains"): ("section IV", "MiB from which an all_reduce gains"),
    ("SSFusion", "all_gather"): ("section IV.D", "growth of the time of an all_gather"),
    ("SSFusion", "all_reduce"): ("section IV.D", "growth of the time of an all_reduce"),
}
"""By paper and beginning of a row of ``paper_models``: the place in the paper, and the page's text
in place of that beginning. The first match counts."""


def place(row: Row) -> tuple[str, str]:
    """Return where the paper has a row's number, and the claim in words. Raise KeyError for a row
    that is not in ``PLACES``."""
    for (paper, begin), (where, text) in PLACES.items():
        if row.paper == paper and row.what.startswith(begin):
            return where, text + row.what.removeprefix(begin)
    raise KeyError(f"{row.paper}: {row.what}: say in PLACES where the paper has it")


def predicted() -> list[Claim]:
    """Return the claims of the papers' times, with the cost model's predictions
    (``benchmarks/papers.py``)."""
    return [
        _claim(row)
        for row in all_rows()
        if isinstance(row.predicted, str) or math.isfinite(row.predicted)
    ]


def _claim(row: Row) -> Claim:
    where, text = place(row)
    return Claim(
        paper=row.paper,
        where=where,
        text=text,
        number=row.number if isinstance(row.number, str) else float(row.number),
        kind="ratio",
        predicted=row.predicted,
        assumed=row.assumed,
        fitted=row.fitted,
    )
