"""Measure how accurate the cost model is, with a profile that ``commpass probe`` has just measured.

For each kind and size, every candidate that is named here is measured, and so are the cost model's
choice among them (``chosen``) and the plain collective. A measured time is that of a call of a
compiled function. The time of a call that sends nothing is measured as well, and added to the
prediction. ``off`` is the prediction against the median: +0.10 means that the prediction was a
tenth longer. Predictions of plain collectives were fitted to times of the same kind, and only show
the quality of the fit. The remarks count the choices that are within 5 % of the fastest measured
candidate.
"""

from __future__ import annotations

import dataclasses
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import commpass
from commpass.costmodel import Profile
from commpass.probe import probe
from commpass.probe.kernels import measure as kernel_times

from .calls import KINDS, Contenders, compare_with_plain
from .shared import (
    LINKS,
    PATIENCE_S,
    Measurement,
    Options,
    Row,
    by,
    number,
    on_links,
    spread,
    text,
)

NAME = "predicted"
USUAL = {
    "ranks": [2, 4],
    "gbit": [0.1, 1.0, 10.0],
    "kib": [64, 1024, 16384],
    "codecs": ["bf16", "int8", "rotated"],
    "repeats": 9,
}
QUICK = {"ranks": [2], "gbit": [1.0], "kib": [64, 1024], "codecs": ["int8"], "repeats": 3}
ALGORITHMS = {
    "all_reduce": ("one_shot", "two_shot", "ring"),
    "all_gather": ("direct",),
    "reduce_scatter": ("direct",),
    "all_to_all": ("direct",),
}
CHUNKS, LARGE_KIB = 4, 4096
CHOSEN, PLAIN, CALL = "chosen", "plain", "call"
BEST, ALLOWED = 0.05, 0.03


def measured(options: Options) -> list[Row]:
    rows: list[Row] = []
    known: dict[int, Any] = {}
    for ranks, gbit in on_links(NAME, options):
        if ranks.size not in known:
            known[ranks.size] = ranks.run(kernels_now, timeout=PATIENCE_S)[0]
        profile = ranks.run(
            profile_now, f"probed-{gbit:g}g", known[ranks.size], timeout=PATIENCE_S
        )[0]
        for kind, function in KINDS.items():
            for kib in options.kib:
                contenders = _contenders(kind, function, kib, options.codecs)
                case = (ranks, gbit, kind, kib, contenders, torch.float32)
                made = compare_with_plain(*case, profile, options.repeats)
                us = profile.link.time_us(kind, kib * 1024, ranks.size)
                (call,) = (row for row in made if row["name"] == CALL)
                made.remove(call)
                for row in made:
                    row["predicted_ms"] = row.get("predicted_ms", us / 1e3) + call["ms"][1]
                    row["off"] = row["predicted_ms"] / row["ms"][1] - 1
                rows += made
    return rows


def _contenders(kind: str, function: Any, kib: int, codecs: list[str]) -> Contenders:
    found: dict[str, tuple[Any, Any]] = {PLAIN: (function, None), CALL: (nothing, None)}
    possible = []
    for codec in codecs:
        for name in ALGORITHMS[kind]:
            for chunks in (1, CHUNKS) if kib >= LARGE_KIB else (1,):
                named = {"codec": codec, "algorithm": name, "chunks": chunks, "max_error": 1.0}
                rule = commpass.Rule(force=True, **named)
                found[f"{codec} {name} x{chunks}"] = function, commpass.Policy(rules=[rule])
        possible.append(codec)
    free = commpass.Policy(codecs=tuple(possible), max_error=1.0)
    return found | {CHOSEN: (function, free)}


def nothing(x: torch.Tensor) -> torch.Tensor:
    """A compiled function that sends nothing."""
    return x[:1].neg()


def kernels_now() -> Any:
    torch._dynamo.reset()
    world = dist.group.WORLD
    return kernel_times(world, torch.device("cpu"), commpass.ethernet(1).kernels)


def profile_now(name: str, kernels: Any) -> Profile:
    return dataclasses.replace(probe(30.0, name=name).profile, kernels=kernels)


def remarks(rows: list[Row]) -> list[str]:
    ours = [row for row in rows if row["name"] not in (PLAIN, CHOSEN)]
    said = []
    for what, some in (("coded", ours), ("plain", [r for r in rows if r["name"] == PLAIN])):
        off = sorted(abs(row["off"]) for row in some)
        if off:
            said.append(f"{what}: off by {median(off):.0%} in the median, {off[-1]:.0%} at most")
    cases: dict[tuple, list[Row]] = {}
    for row in rows:
        cases.setdefault((row["ranks"], row["gbit"], row["kind"], row["KiB"]), []).append(row)
    lost, slower = [], []
    for case in cases.values():
        (chosen,) = (row for row in case if row["name"] == CHOSEN)
        (plain,) = (row for row in case if row["name"] == PLAIN)
        took = min(chosen["ms"][1], _same(case, chosen))
        best = min(row["ms"][1] for row in case)
        lost.append(took / best - 1)
        slower.append(took / plain["ms"][1] - 1)
    near = sum(loss <= BEST for loss in lost)
    said.append(f"chosen within {BEST:.0%} of the fastest: {near} of {len(lost)}")
    said.append(f"slowest choice against plain: {max(slower):+.0%} (goal {ALLOWED:+.0%})")
    return said


def _same(case: list[Row], chosen: Row) -> float:
    """Return the time of the chosen candidate, from its named row if there is one: the graph is the
    same."""
    what = (chosen.get("codec"), chosen.get("algorithm"), chosen.get("chunks"))
    for row in case:
        if row["name"] == PLAIN and chosen.get("unchanged"):
            return row["ms"][1]
        if (row.get("codec"), row.get("algorithm"), row.get("chunks")) == what:
            return row["ms"][1]
    return chosen["ms"][1]


COLUMNS = {
    **LINKS,
    "kind": text("kind"),
    "KiB": text("KiB"),
    "what": text("name"),
    "by": by,
    "ms": spread,
    "predicted": number("predicted_ms", ".2f"),
    "off": number("off", "+.2f"),
    "x plain": number("of_plain"),
}
MEASUREMENT = Measurement(NAME, "predicted and measured", USUAL, QUICK, measured, COLUMNS, remarks)
