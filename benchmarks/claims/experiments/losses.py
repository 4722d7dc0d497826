"""Summarize trainings of one model under several forms of exchange.

A *run* is one seed: its loss on held-out text, and the mean training loss of each tenth of its
steps. A loss that is not finite is stored as None: the run diverged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

Runs = Sequence[Mapping[str, Any]]
"""The runs of one form, one per seed."""


def run_of(
    seed: int, losses: Sequence[float], validation: float, test: float | None = None
) -> dict[str, Any]:
    """Return a run in its stored form."""
    size = max(1, len(losses) // 10)
    tenths = [fmean(losses[start : start + size]) for start in range(0, len(losses), size)]
    found = {"seed": seed, "losses": [_finite(each) for each in tenths]}
    found["validation"] = _finite(validation)
    return found if test is None else found | {"test": _finite(test)}


def percents(runs: Runs, base: Runs, part: str = "validation") -> list[float]:
    """Return by what percent each run's loss is above that of the same seed in ``base``; infinity
    if it diverged."""
    without = {run["seed"]: run[part] for run in base}
    return [
        math.inf if run[part] is None else 100 * (run[part] / without[run["seed"]] - 1)
        for run in runs
    ]


def mean_percent(runs: Runs, base: Runs, part: str = "validation") -> float:
    return fmean(percents(runs, base, part))


def spread_percent(runs: Runs, base: Runs, part: str = "validation") -> float | None:
    """Return the standard deviation over the seeds; None for one seed, or if a run diverged."""
    found = percents(runs, base, part)
    return stdev(found) if len(found) > 1 and all(map(math.isfinite, found)) else None


def _finite(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None
