"""A small model as a whole, beside a step computed from one of its layers."""

from __future__ import annotations

from typing import Any

from .averages import Average
from .cases import case
from .models import SMALL
from .steps import POLICIES, Layers, Part, part_of, step

CASE = case(SMALL, "p4d.24xlarge", 1, dp=8, tp=8)
MICRO_BATCH = Part(SMALL, CASE.machine, CASE.inner, SMALL.layers)
LAST = Part(SMALL, CASE.machine, CASE.mesh, SMALL.layers, averages=True)
"""All layers, without and with the averages of gradients."""
PARTS = (part_of(CASE), MICRO_BATCH, LAST)


def compared(found: dict[Part, dict[str, Layers]], gradients: dict[str, Average]) -> dict[str, Any]:
    """Return milliseconds of the whole model and of one layer times the number of layers."""
    one, micro_batch, last = (found[part] for part in PARTS)
    return {
        "layers": SMALL.layers,
        "machine": CASE.machine,
        "mesh_text": CASE.text,
        "policies": {
            policy: {
                "micro_batch_ms": micro_batch[policy].step_ms,
                "by_layers_ms": round(SMALL.layers * one[policy].step_ms, 3),
                "last_ms": last[policy].step_ms,
                "last_by_layers_ms": step(CASE, one[policy], gradients[policy], 0.0)["step_ms"],
            }
            for policy in POLICIES
        },
    }
