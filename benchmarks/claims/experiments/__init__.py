"""Longer runs, each of minutes, with stored results: ``benchmarks/results/claims/*.json``.

Each file holds one ``Experiment`` and the code that it runs.
"""

from __future__ import annotations

import benchmarks.network  # noqa: F401 (finds the folders of tests and examples)
from benchmarks.claims.experiments import (
    equarx_forms,
    lowbit_perplexity,
    zipccl_bits,
    zipccl_late,
)
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.ssfusion_times import SSFUSION_TIMES
from benchmarks.claims.experiments.ssfusion_training import SSFUSION_TRAINING
from benchmarks.claims.experiments.taco_overlap import TACO_OVERLAP
from benchmarks.claims.experiments.taco_training import (
    TACO_BLOCKS,
    TACO_PARTS,
    TACO_TRAINING,
)
from benchmarks.claims.experiments.three_d_training import THREE_D_TRAINING

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        TACO_TRAINING,
        TACO_PARTS,
        TACO_BLOCKS,
        TACO_OVERLAP,
        SSFUSION_TRAINING,
        SSFUSION_TIMES,
        THREE_D_TRAINING,
        lowbit_perplexity.TRAINED,
        lowbit_perplexity.OUTLIERS,
        lowbit_perplexity.FOUR,
        zipccl_bits.EXPERIMENT,
        zipccl_late.EXPERIMENT,
        equarx_forms.EXPERIMENT,
    )
}
