"""Simulate all parts in two processes, and combine them into rows."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
from datetime import date
from typing import Any

import torch

from . import whole
from .cases import CASES, Case
from .steps import POLICIES, Part, averaged, part_of, send_ms, simulated, step

WORKERS = 2


def job(given: Part | Case) -> dict[str, Any]:
    """Return what a worker predicts: of a part its simulation, of a case its averages."""
    return simulated(given) if isinstance(given, Part) else averaged(given)


def run() -> dict[str, Any]:
    """Return the content of ``benchmarks/results/clusters.json``."""
    parts = list(dict.fromkeys([*whole.PARTS, *map(part_of, CASES)]))
    jobs = [*parts, *CASES, whole.CASE]
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:  # torch is imported once
        found = dict(zip(jobs, pool.map(job, jobs, chunksize=1), strict=True))
        pool.close()
        pool.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [
        {
            "model": case.model.name,
            "parameters": case.model.parameters,
            "machine": case.machine,
            "gpus": case.gpus,
            "mesh_text": case.text,
            "micro_batches": case.micro_batches,
            "send_ms": round(send_ms(case), 4),
            "policies": {
                name: step(case, found[part_of(case)][name], found[case][name], send_ms(case))
                for name in POLICIES
            },
        }
        for case in CASES
    ]
    return {
        "date": date.today().isoformat(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "seconds": round((used.ru_utime + used.ru_stime) / WORKERS),
        "whole": whole.compared(found, found[whole.CASE]),
        "rows": rows,
    }
