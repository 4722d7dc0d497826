"""Measure how accurate the cost model is for whole steps, with a profile just measured on the same
link, kernels included.

The models are those of ``steps``. ``predicted`` is the sum of the cost model's times of the
compiled graphs, forward and backward. ``step ms`` is the whole step, with the time of Python and of
zeroing the gradients. ``off`` compares the two: +0.10 means that the prediction was a tenth longer.
``graphs`` are the milliseconds of the graphs alone on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import commpass
from commpass.costmodel import Profile

from . import predicted as one_by_one
from . import steps
from .shared import (
    LINKS,
    PATIENCE_S,
    Measurement,
    Options,
    Row,
    forced,
    number,
    on_links,
    slowest,
    spread,
    take_turns,
    text,
)

NAME = "wholes"
POLICIES: dict[str, commpass.Policy | str] = {
    "plain": "off",
    "bf16": forced("bf16", algorithm="two_shot"),
    "int8": forced("int8"),
    "balanced": "balanced",
}
USUAL = {**steps.USUAL, "policies": list(POLICIES)}
QUICK = {**steps.QUICK, "repeats": 7}


def measured(options: Options) -> list[Row]:
    rows: list[Row] = []
    known: dict[int, Any] = {}
    for ranks, gbit in on_links(NAME, options):
        if ranks.size not in known:
            known[ranks.size] = ranks.run(one_by_one.kernels_now, timeout=PATIENCE_S)[0]
        job = (f"probed-{gbit:g}g", known[ranks.size])
        profile = ranks.run(one_by_one.profile_now, *job, timeout=PATIENCE_S)[0]
        for model in options.models:
            found = ranks.run(train, model, options, profile, timeout=PATIENCE_S)
            rows += _rows(found, {"model": model, "ranks": ranks.size, "gbit": gbit})
    return rows


def train(name: str, options: Options, profile: Profile) -> dict[str, Row]:
    """Return, on a rank, the times of a step under each policy, and on rank 0 the predictions."""
    torch._dynamo.reset()
    model, loss = steps.MODELS[name](options)
    each: dict[str, Callable[[], None]] = {}
    backends: dict[str, Callable[..., object]] = {}
    for policy in options.policies:
        backends[policy] = commpass.backend(POLICIES[policy], profile=profile, strict=True)
        made = torch.compile(model, backend=backends[policy], dynamic=False)

        def step(made: Any = made) -> None:
            model.zero_grad()
            loss(made).backward()

        step()
        each[policy] = step
    found = take_turns(each, options.repeats)
    for policy, backend in backends.items():
        graphs = backend.step_timer.graphs
        found[policy] |= {
            "graphs": len(graphs),
            "predicted_ms": sum(graph.predicted_us for graph in graphs) / 1e3,
            "graphs_ms": sum(graph.measured_us for graph in graphs if graph.times_us) / 1e3,
        }
    return found


def _rows(found: list[dict[str, Row]], known: Row) -> list[Row]:
    made = []
    for policy, first in found[0].items():
        ms = slowest([each[policy]["ms"] for each in found])
        row = {**known, "policy": policy, "ms": ms}
        row |= {name: first[name] for name in ("graphs", "predicted_ms", "graphs_ms")}
        made.append(row | {"off": first["predicted_ms"] / ms[1] - 1})
    return made


def remarks(rows: list[Row]) -> list[str]:
    off = sorted(abs(row["off"]) for row in rows)
    near = sum(each <= GOAL for each in off)
    return [
        f"off by {median(off):.0%} in the median, {off[-1]:.0%} at most;"
        f" {near} of {len(off)} within {GOAL:.0%}"
    ]


GOAL = 0.15
COLUMNS = {
    "model": text("model"),
    **LINKS,
    "policy": text("policy"),
    "step ms": spread,
    "graphs": number("graphs_ms", ".1f"),
    "predicted": number("predicted_ms", ".1f"),
    "off": number("off", "+.2f"),
}
MEASUREMENT = Measurement(
    NAME, "whole steps, predicted and measured", USUAL, QUICK, measured, COLUMNS, remarks
)
