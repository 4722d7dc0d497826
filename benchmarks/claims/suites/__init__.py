"""The claims, one file per paper."""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.suites.equarx import equarx
from benchmarks.claims.suites.formulas import formulas
from benchmarks.claims.suites.lowbit import lowbit
from benchmarks.claims.suites.predicted import predicted
from benchmarks.claims.suites.ssfusion import ssfusion
from benchmarks.claims.suites.taco import taco
from benchmarks.claims.suites.three_d import three_d
from benchmarks.claims.suites.zipccl import zipccl


def every() -> list[Claim]:
    return [
        *taco(),
        *three_d(),
        *zipccl(),
        *lowbit(),
        *equarx(),
        *ssfusion(),
        *formulas(),
        *predicted(),
    ]
