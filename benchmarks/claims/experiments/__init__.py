"""Longer runs, each of minutes, whose results are stored: ``benchmarks/results/claims/*.json``.

A file an experiment, which holds an ``Experiment`` and what it runs.
"""

from __future__ import annotations

from benchmarks.claims.experiments import (
    equarx_forms,
    lowbit_perplexity,
    zipccl_bits,
    zipccl_late,
)
from benchmarks.claims.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        lowbit_perplexity.TRAINED,
        lowbit_perplexity.OUTLIERS,
        lowbit_perplexity.FOUR,
        zipccl_bits.EXPERIMENT,
        zipccl_late.EXPERIMENT,
        equarx_forms.EXPERIMENT,
    )
}
