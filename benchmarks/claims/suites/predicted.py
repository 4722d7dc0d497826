"""The papers' times by the cost model."""

from __future__ import annotations

import math

from benchmarks.claims.claim import Claim
from benchmarks.paper_models.rows import all_rows


def predicted() -> list[Claim]:
    """What the cost model says of the papers' times (``benchmarks/papers.py``)."""
    return [
        Claim(
            paper=row.paper,
            where="times",
            text=row.what,
            number=row.number if isinstance(row.number, str) else float(row.number),
            kind="ratio",
            predicted=row.predicted,
            assumed=row.assumed,
            fitted=row.fitted,
        )
        for row in all_rows()
        if isinstance(row.predicted, str) or math.isfinite(row.predicted)
    ]
