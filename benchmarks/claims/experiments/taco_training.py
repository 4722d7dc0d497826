"""Train with tensor parallelism and the sums of all layers coded: TACO, its parts, formats and
block sizes, other codecs and ours.

A byte-level transformer (``examples/common.py``) on two ranks learns English text. All seeds train
at the same time, each on its own two ranks. The graphs are compiled by ``torch.compile`` with
``commpass.backend``. Every all_reduce, forward and backward, is coded by the same codec and carried
out by ``two_shot``. All forms of one seed start with the same weights and use the same batches.
Held-out losses are those of the coded model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from processes import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import commpass
from benchmarks.claims.experiments.english import english
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.losses import run_of
from commpass.codecs import codec

TP = 2
WHOLE = 16384
"""The number of values that one rank encodes for the other, so that all of them share one scale."""
FORMATS: dict[str, str | None] = {
    "off": None,
    "TACO": "taco",
    "naive fp8": "fp8(static=1.0)",
    "TACO E5M2": "taco(form=e5m2)",
    "TahQuant": "tahquant",
    "TACO int8": "taco(form=int8)",
    "rotated": "rotated",
}
"""The codec by name; None leaves all collectives uncompressed."""
PARTS: dict[str, str | None] = {
    "DS alone": "taco(rotate=False)",
    "ASH alone": "rotated(form=e4m3, scale=rms, stored=fp32)",
    "Hadamard": "taco(scale=absmax)",
    "fp8, one scale": f"fp8(block={WHOLE})",
    "int8, one scale": f"int8(block={WHOLE})",
    "rotated, 6 bits": "rotated(bits=6)",
}
BLOCKS: dict[str, str | None] = {
    f"TACO, block {size}": f"taco(block={size})" for size in (32, 64, 128, 512)
}
"""256 is the block size of codecs that name none."""


@dataclass(frozen=True)
class Setup:
    """The settings of the trainings.

    A batch is ``sequences`` of 128 bytes. Held-out losses are means of ``held_out`` batches.
    ``inner`` compiles the rewritten graphs.
    """

    layers: int = 2
    width: int = 64
    sequences: int = 4
    steps: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)
    rate: float = 2e-3
    held_out: int = 32
    inner: str = "eager"


def trained(setup: Setup, forms: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the results of each form."""
    found = {}
    ranks = Ranks(TP * len(setup.seeds))
    try:
        for name, spec in forms.items():
            rows = ranks.run(train_form, spec, setup, timeout=3600)
            runs = [row["run"] for row in rows[::TP]]
            found[name] = {"codec": spec, "bytes": rows[0]["bytes"], "runs": runs}
    finally:
        ranks.stop()
    return {"tp": TP, "setup": vars(setup), "forms": found}


def train_form(spec: str | None, setup: Setup) -> dict[str, Any]:
    """Return the run of a rank's seed, and the bytes that it sends in a step.

    Raise RuntimeError if a plan is not the requested one.
    """
    mesh = init_device_mesh("cpu", (len(setup.seeds), TP), mesh_dim_names=("seed", "tp"))
    seed = setup.seeds[mesh["seed"].get_local_rank()]
    model, before = divided(seed, setup, mesh["tp"]), len(commpass.plans())
    backend = commpass.backend(
        policy_of(spec), inner=setup.inner, profile=commpass.ethernet(0.1), strict=True
    )
    loss_of = torch.compile(model, backend=backend, fullgraph=True)
    run = train(model, loss_of, seed, setup)
    plans = commpass.plans()[before:]
    check(plans, spec, 4 * setup.layers)
    return {"run": run, "bytes": sum(site.wire_bytes for plan in plans for site in plan)}


def policy_of(spec: str | None) -> commpass.Policy | str:
    if spec is None:
        return "off"
    rule = commpass.Rule(
        kind="all_reduce", codec=spec, algorithm="two_shot", chunks=1, rows=1, force=True
    )
    return commpass.Policy(rules=[rule], lowering="kernel")


def check(plans: Sequence[commpass.Plan], spec: str | None, sites: int) -> None:
    """Raise RuntimeError unless all collectives are coded by ``spec`` and have the expected
    number."""
    wanted = "none" if spec is None else codec(spec).spec
    if fallen := [plan.fallback for plan in plans if plan.fallback]:
        raise RuntimeError(f"{spec}: {fallen[0]}")
    found = [site for plan in plans for site in plan]
    if len(found) != sites:
        raise RuntimeError(f"{spec}: {len(found)} collectives, and not {sites}")
    for site in found:
        if site.codec != wanted:
            raise RuntimeError(f"{spec}: {site.codec} for {site.name}: {site.reason}")


def divided(seed: int, setup: Setup, mesh: DeviceMesh) -> nn.Module:
    """Return a new model of a seed, its layers sharded over the ranks."""
    import common
    import train_tp

    torch.manual_seed(seed)
    model = common.Transformer(setup.layers, setup.width)
    train_tp.divide(model, mesh)
    return model


def train(
    model: nn.Module, loss_of: Callable[[Tensor], Tensor], seed: int, setup: Setup
) -> dict[str, Any]:
    """Return a run with AdamW, whose learning rate falls to a tenth along a cosine."""
    import common

    text, losses = english(), []
    # One fused update cannot take both kinds of tensors.
    groups = [
        {"params": [each for each in model.parameters() if isinstance(each, DTensor) is kind]}
        for kind in (True, False)
    ]
    learn = torch.optim.AdamW(groups, lr=setup.rate, fused=True)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(learn, setup.steps, setup.rate / 10)
    for batch in common.batches(text.train, setup.steps, seed):
        loss = loss_of(batch[: setup.sequences])
        loss.backward()
        learn.step()
        learn.zero_grad()
        slower.step()
        losses.append(loss.item())

    def held_out(part: Tensor) -> float:
        """Return the held-out loss, in grad mode and with batches of the training shape, which
        avoids another compilation."""
        unseen = common.batches(part, setup.held_out, 0)
        return fmean(loss_of(batch[: setup.sequences]).item() for batch in unseen)

    return run_of(seed, losses, held_out(text.validation), held_out(text.test))


TACO_TRAINING = Experiment(
    "taco_training",
    "losses of tensor-parallel training by format",
    6,
    partial(trained, Setup(), FORMATS),
)
TACO_PARTS = Experiment(
    "taco_parts", "the same with parts of TACO alone", 6, partial(trained, Setup(), PARTS)
)
TACO_BLOCKS = Experiment(
    "taco_blocks", "the same with other block sizes", 4, partial(trained, Setup(), BLOCKS)
)
