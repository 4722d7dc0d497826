"""The time of a step, from a simulated layer and the averages of its gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import commpass
from commpass.costmodel import prices, profile_named
from commpass.policy import policy_named

from .averages import BACKWARD, Average, average, exposed_ms
from .cases import Case
from .models import Model, builder

POLICIES = ("off", "lossless", "balanced", "aggressive")


@dataclass(frozen=True)
class Part:
    """One simulation: layers of a model, forward and backward, on a mesh. ``per_layer``: its result
    is divided by the number of layers."""

    model: Model
    machine: str
    mesh: tuple[tuple[str, int], ...]
    layers: int = 1
    averages: bool = False
    per_layer: bool = False


@dataclass(frozen=True)
class Layers:
    """Predicted milliseconds of a simulation under one policy."""

    step_ms: float
    exposed_ms: float
    compressed: int
    sites: int


def part_of(case: Case) -> Part:
    """Return the simulation of a layer and one micro-batch of a case.

    It is half of two layers: the norm of a layer is fused with the residual of the one before.
    """
    return Part(case.model, case.machine, case.inner, layers=2, per_layer=True)


def simulated(part: Part) -> dict[str, Layers]:
    """Simulate a part under each policy.

    Exchanges may move as far as in a stage of many layers, of whose memory one layer's gradients
    are a small share (``more_memory``).
    """
    build = builder(part.model, averages=part.averages, layers=part.layers)
    policies = [dataclasses.replace(policy_named(name), more_memory=1.0) for name in POLICIES]
    found = commpass.simulate(build, part.machine, dict(part.mesh), policies)
    if remarks := [remark for each in found for remark in each.remarks]:
        raise RuntimeError(f"{part}: {remarks}")
    n = part.layers if part.per_layer else 1
    return {
        name: Layers(each.step_ms / n, each.exposed_ms / n, each.compressed // n, each.sites // n)
        for name, each in zip(POLICIES, found, strict=True)
    }


def averaged(case: Case) -> dict[str, Average]:
    """Return the averages of a layer's gradients under each policy."""
    return {name: average(case, name) for name in POLICIES}


def send_ms(case: Case) -> float:
    """Return the milliseconds in which a stage sends one micro-batch to the next, uncompressed.

    With tensor parallelism each rank sends its share of the activations.
    """
    if case.stages == 1:
        return 0.0
    nbytes = case.model.tokens * case.model.width * 2 / case.sizes.get("tp", 1)
    pair = (0, case.next_stage)
    return prices(profile_named(case.machine), 2, ("pp",), pair).time_us("send", nbytes) / 1e3


def step(case: Case, layer: Layers, gradients: Average, sent_ms: float) -> dict[str, Any]:
    """Return the times of a step in milliseconds, on the longest stage of the pipeline.

    A pipeline of p stages runs m micro-batches in the time of m + p - 1 (1F1B). Each sends its
    activations and their gradients, without overlap. Gradients are averaged once, while backward
    of the last micro-batch runs.
    """
    batch_ms = case.layers * layer.step_ms + 2 * sent_ms
    waiting_ms = case.layers * layer.exposed_ms + 2 * sent_ms
    gradients_ms = exposed_ms(case.layers, BACKWARD * layer.step_ms, gradients.ms)
    batches = case.micro_batches
    return {
        "step_ms": round((batches + case.stages - 1) * batch_ms + gradients_ms, 2),
        "exposed_ms": round(batches * waiting_ms + gradients_ms, 2),
        "gradients_ms": round(gradients_ms, 2),
        "bubble_ms": round((case.stages - 1) * batch_ms, 2),
        "layer_ms": layer.step_ms,
        "compressed": layer.compressed + gradients.compressed,
        "sites": layer.sites + gradients.sites,
    }
