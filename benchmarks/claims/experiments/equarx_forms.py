"""Measure error and time of the six forms in EQuARX's figure 7, and of a sum of plain 8-bit floats.

Each form is an all_reduce of bfloat16 in a compiled graph on four ranks over gloo. The forms and
the plain all_reduce alternate, each call behind a barrier. A time is given as quartiles of the
slowest rank's times. Errors are those of N(0, 1), against the sum in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commpass
from benchmarks.claims.experiments.coded import coded_sites, forced
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.launch import launched
from benchmarks.claims.experiments.turns import PLAIN, turns

FORMS = {
    "full loop": ("equarx", "ring"),
    "full loop, RS only": ("equarx", "ring(stage=rs)"),
    "full loop, AG only": ("equarx", "ring(stage=ag)"),
    "semi-loop": ("equarx", "semi_ring"),
    "semi-loop, RS only": ("equarx", "semi_ring(stage=rs)"),
    "semi-loop, AG only": ("equarx", "semi_ring(stage=ag)"),
    "micro-shards": ("equarx", "ring(shards=4)"),
    "naive fp8": ("fp8(static=1.0)", "ring"),
}
RANKS, KIB, REPEATS = 4, (64, 512, 2048, 16384, 65536), 7
LINKS = (None, 1.0)
"""Loopback, and 1 Gbit/s between hosts."""
ERRORS_TO_KIB = 2048
Rows = Sequence[dict[str, Any]]


def gaussian(rank: int, kib: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(kib * 512, generator=generator).bfloat16()


def all_reduce(x: Tensor) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", "0"))


def on_rank(
    kib: list[int], forms: list[str], repeats: int, inner: str, profile: str | None
) -> list[dict[str, Any]]:
    """Return a row for each size and form, and for the plain all_reduce."""
    rows = []
    for size in kib:
        x, rank = gaussian(dist.get_rank(), size), dist.get_rank()
        torch._dynamo.reset()
        functions: dict[str, Any] = {
            PLAIN: torch.compile(all_reduce, backend="inductor" if inner == "inductor" else inner)
        }
        facts: dict[str, dict[str, Any]] = {PLAIN: {}}
        for form in forms:
            codec, algorithm = FORMS[form]
            before = len(commpass.plans())
            backend = commpass.backend(
                forced(codec, algorithm), inner=inner, profile=profile, strict=True
            )
            functions[form] = torch.compile(all_reduce, backend=backend, dynamic=False)
            functions[form](x)
            (site,) = coded_sites(commpass.plans()[before:], [codec], 1)
            facts[form] = {
                "algorithm": site.algorithm,
                "chunks": site.chunks,
                "bits": 8 * site.wire_bytes / x.numel(),
            }
        exact = _exact(size) if size <= ERRORS_TO_KIB and rank == 0 else None
        for name, function in functions.items():
            got = function(x)
            if exact is not None:
                facts[name]["mse"] = float((got.double() - exact).square().mean())
        called = {name: partial(made, x) for name, made in functions.items()}
        times = turns(called, repeats)
        rows += [{"name": name, "kib": size, "ms": times[name], **facts[name]} for name in times]
    return rows


def _exact(kib: int) -> Tensor:
    return torch.stack([gaussian(rank, kib).double() for rank in range(RANKS)]).sum(0)


# --- results from the rows ------------------------------------------------------------------------


def ms(rows: Rows, name: str, kib: int, gbit: float | None) -> float:
    """Return the median time. Raise KeyError if it was not measured."""
    for row in rows:
        if (row["name"], row["kib"], row["gbit"]) == (name, kib, gbit):
            return row["ms"][1]
    raise KeyError((name, kib, gbit))


def gain(rows: Rows, name: str, kib: int, gbit: float | None) -> float:
    """Return how many times faster than the plain all_reduce a form is."""
    return ms(rows, PLAIN, kib, gbit) / ms(rows, name, kib, gbit)


def crossover_mib(rows: Rows, name: str, gbit: float | None) -> float | None:
    """Return the least size, in MiB, from which on a form is faster than the plain all_reduce at
    every larger size.

    Return None if it is not faster even at the largest size.
    """
    sizes = sorted({row["kib"] for row in rows if row["gbit"] == gbit}, reverse=True)
    gaining = list(itertools.takewhile(lambda kib: gain(rows, name, kib, gbit) > 1, sizes))
    return gaining[-1] / 1024 if gaining else None


def mse(rows: Rows, name: str, kib: int) -> float:
    return next(
        row["mse"] for row in rows if (row["name"], row["kib"]) == (name, kib) and "mse" in row
    )


def run(
    kib: Sequence[int] = KIB,
    repeats: int = REPEATS,
    links: Sequence[float | None] = LINKS,
    inner: str = "inductor",
) -> dict[str, Any]:
    options = {"kib": list(kib), "forms": list(FORMS), "repeats": repeats, "inner": inner}
    rows = [
        row | {"gbit": gbit}
        for gbit in links
        for row in launched(
            __name__,
            RANKS,
            options | {"profile": f"ethernet-{gbit:g}g" if gbit else None},
            gbit,
        )
    ]
    crossovers = {
        f"{name}, {f'{gbit:g} Gbit/s' if gbit else 'loopback'}": crossover_mib(rows, name, gbit)
        for gbit in links
        for name in FORMS
    }
    return {"ranks": RANKS, "dtype": "bfloat16", "crossover_mib": crossovers, "rows": rows}


EXPERIMENT = Experiment(
    "equarx_forms",
    "figure 7: error and time of all forms, 64 KiB to 64 MiB, loopback and 1 Gbit/s (root)",
    20,
    run,
)
