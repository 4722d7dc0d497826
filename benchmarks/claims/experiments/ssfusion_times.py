"""Measure steps of data-parallel training on real links: dense, and with each part of SSFusion
added (``benchmarks/ssfusion.py``)."""

from __future__ import annotations

from typing import Any

from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.lab import in_lab

OPTIONS = ("--ranks", "2", "--gbit", "0.1", "1")
KEPT = ("ranks", "gbit", "way", "ms", "kib", "buffers", "sparse", "offloaded", "overhead_s")


def run() -> dict[str, Any]:
    found = in_lab("benchmarks.ssfusion", *OPTIONS)
    rows = [{key: row.get(key) for key in KEPT} for row in found["rows"][""]]
    return {"setup": found["asked"], "rows": rows}


SSFUSION_TIMES = Experiment(
    "ssfusion_times", "a data-parallel step at 0.1 and 1 Gbit/s, by the parts of SSFusion", 8, run
)
