"""The named policies: presets of commpass and of papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commpass.policy.rules import Rule

DIMENSIONS = {
    "tp": ("tp", "tensor*", "model", "model_parallel", "mp"),
    "dp": ("dp", "dp_*", "*fsdp", "hsdp", "ddp", "data*", "shard", "replicate"),
    "pp": ("pp", "pipe*", "stage*"),
}
"""The usual names of mesh dimensions (torch's tutorials, torchtitan, Accelerate, Lightning,
Megatron), as globs by role."""
SDP4BIT = (
    Rule(
        kind="all_gather",
        direction="forward",
        codec="difference(inner=sdp4bit(part=weight))",
        max_error=0.2,  # of the difference, not of the weight
    ),
    Rule(
        kind=("reduce_scatter", "all_reduce"),
        direction="backward",
        codec="sdp4bit(bits=8)",
        algorithm=("direct", "two_shot", "hierarchical(between=sdp4bit)"),
        max_error=0.2,  # of an all_reduce between hosts, in which the 4-bit error occurs twice
    ),
)
# Gradients are sent as in the published scripts: plain 6-bit integers in tiles of 32.
TAHQUANT = (
    Rule(kind=("send", "recv"), direction="forward", codec="tahquant", max_error=0.15),
    Rule(
        kind=("send", "recv"),
        direction="backward",
        codec="int6(block=32, stored=bf16)",
        max_error=0.15,
    ),
)
SUMS_OF_LAYERS = ("all_reduce", "all_gather", "reduce_scatter")
"""The collectives of tensor parallelism, with or without sequence parallelism."""
THREE_D: dict[str, dict[str, tuple[Rule, ...]]] = {
    # TACO, section 5: tensor parallelism by TACO, data parallelism by SDP4Bit, pipeline parallelism
    # by TahQuant.
    "taco-3d": {
        "tp": (
            Rule(
                kind=SUMS_OF_LAYERS,
                codec="taco",
                algorithm=("two_shot", "direct"),
                max_error=0.04,
            ),
        ),
        "dp": SDP4BIT,
        "pp": TAHQUANT,
    },
    # Of commpass: at each of these sites no more bytes and a smaller error (benchmarks/three_d.py).
    "balanced-3d": {
        "tp": (
            Rule(
                kind=SUMS_OF_LAYERS,
                codec="rotated",
                algorithm=("two_shot", "direct"),
                max_error=0.04,
            ),
        ),
        "dp": (
            Rule(
                kind="all_gather",
                direction="forward",
                codec="difference(inner=rotated(bits=4, block=2048))",
                max_error=0.2,
            ),
            Rule(
                kind=("reduce_scatter", "all_reduce"),
                direction="backward",
                codec="rotated",
                algorithm=("direct", "two_shot", "hierarchical(between=rotated(bits=4))"),
                max_error=0.2,
            ),
        ),
        "pp": (
            Rule(
                kind=("send", "recv"),
                direction="forward",
                codec="tahquant(form=companded)",
                max_error=0.15,
            ),
            Rule(
                kind=("send", "recv"),
                direction="backward",
                codec="rotated(bits=6, block=32, scale=lsq)",
                max_error=0.15,
            ),
        ),
    },
}
"""Presets of three dimensions: the rules of tensor, data and pipeline parallelism."""


def rules_over(
    roles: Mapping[str, Sequence[Rule]], over: Mapping[str, Sequence[str]]
) -> Iterator[Rule]:
    """Yield the rules of all roles for their dimensions, in the order of ``over``."""
    for role, names in over.items():
        for rule in roles[role] if names else ():
            yield dataclasses.replace(rule, group=tuple(names))


PRESETS: dict[str, dict[str, Any]] = {
    "off": {"off": True},
    "lossless": {},
    # bf16 costs almost nothing. It wins where coding takes longer than it saves.
    "balanced": {"codecs": ("rotated", "int8", "bf16"), "max_error": 0.02},
    "aggressive": {"codecs": ("rotated(bits=4)", "rotated", "int8", "bf16"), "max_error": 0.25},
    # TACO, sections 4.2 to 4.4: the all_reduces of tensor parallelism, forward and backward. Better
    # at the same bits: "balanced", a quarter of the error at 8.06 bits instead of 8.25.
    "taco": {
        "rules": (Rule(kind="all_reduce", codec="taco", algorithm="two_shot"),),
        "max_error": 0.04,
    },
    # EQuARX, section III: all_reduces of inference by one of its two rings, with both stages
    # encoded. Better at the same bits: "balanced".
    "equarx": {
        "rules": (
            Rule(
                kind="all_reduce",
                direction="forward",
                codec="equarx",
                algorithm=("ring", "semi_ring"),
            ),
        ),
        "max_error": 0.04,
    },
    # ZipCCL, sections 3 and 4: lossless. An all_reduce is a reduce_scatter, then an all_gather.
    # Better at the same error: Policy(codecs="exponent"), half a bit less.
    "zipccl": {
        "rules": (
            Rule(
                kind=("all_gather", "all_to_all", "reduce_scatter", "all_reduce"),
                codec="exponent(planes=3)",
                algorithm=("direct", "two_shot"),
            ),
        ),
    },
    # Low-bit tensor-parallel inference, section 3, without its calibrated channels. These are data
    # of a model, which a rule can name. Better at the same bits: "aggressive".
    "lowbit-tp": {
        "rules": (
            Rule(kind="all_reduce", direction="forward", codec="int4", algorithm="one_shot"),
        ),
        "max_error": 0.15,
    },
    # SSFusion, gradients of data parallelism: one entry in a hundred is sent, and the remainder is
    # accumulated for later steps. The smallest gradients of a fusion are sent whole.
    # commpass.parallel.ssfusion adds measured times.
    "ssfusion": {
        "selective": True,
        "rules": (
            Rule(
                kind="all_reduce",
                direction="backward",
                codec="dgc(density=0.01)",
                algorithm="sparse",
            ),
        ),
        "max_error": 1.0,
    },
    # SDP4Bit, sharded data parallelism: weights as 4 bits of their difference to what receivers
    # hold. Gradients have 8 bits inside a host and 4 bits between hosts. Better at the same bits:
    # the data parallelism of "balanced-3d".
    "sdp4bit": {"rules": SDP4BIT, "max_error": 0.2},
    # TahQuant: activations from one pipeline stage to the next, and their gradients back. Better at
    # the same bits: the pipeline parallelism of "balanced-3d".
    "tahquant": {"rules": TAHQUANT, "max_error": 0.15},
    **{name: {"rules": tuple(rules_over(roles, DIMENSIONS))} for name, roles in THREE_D.items()},
}
"""The fields of each named policy.

``lossless`` is the default and keeps every bit of what is sent; lossy presets are opt-in. Presets
named after papers follow the publication as far as rules can express it. They touch only the
collectives that the paper touches. docs/policies.md lists what is missing and compares them with
the presets of commpass. None names a module, so lossy codecs apply only to fields of similar values
(passes/provenance).
"""
