"""Train in three dimensions, tensor 2 x data 2 x pipeline 2, with several sets of coded dimensions.

The settings are: nothing coded, two dimensions coded (SDP4Bit and TahQuant), all three (also TACO),
and ours. The model and the pipeline are those of ``examples/train_3d.py``: weights are sharded over
data parallelism in the compiled graph, and stages send through ``compress_pipeline``. The link is
so slow that everything that a preset allows is coded, so that losses do not depend on it. All
settings of one seed start with the same weights and use the same batches; each data-parallel rank
has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from processes import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import commpass
from benchmarks.claims.experiments.english import english
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.losses import run_of
from commpass.costmodel import Link, Profile
from commpass.parallel import compress_pipeline, shard
from commpass.policy.presets import DIMENSIONS

MESH = {"dp": 2, "pp": 2, "tp": 2}
RANKS = 8
SLOW = Profile("slow", Link(60.0, 1e-4))
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "off": ("off", ()),
    "2D": ("taco-3d", ("dp", "pp")),
    "taco-3d": ("taco-3d", ("tp", "dp", "pp")),
    "balanced-3d": ("balanced-3d", ("tp", "dp", "pp")),
}
"""By name, a preset and the dimensions that are coded."""


@dataclass(frozen=True)
class Setup:
    """The settings of the trainings.

    The batch of a data-parallel rank is ``sequences`` of 128 bytes, in the given number of
    microbatches. ``inner`` compiles the rewritten graphs.
    """

    layers: int = 2
    width: int = 64
    sequences: int = 4
    microbatches: int = 2
    steps: int = 150
    seeds: tuple[int, ...] = (0, 1, 2)
    rate: float = 2e-3
    held_out: int = 16
    inner: str = "eager"


def run() -> dict[str, Any]:
    return trained(Setup(), SETTINGS)


def trained(setup: Setup, settings: dict[str, tuple[str, tuple[str, ...]]]) -> dict[str, Any]:
    found = {}
    ranks = Ranks(RANKS)
    try:
        for name, (preset, roles) in settings.items():
            rows = ranks.run(train_setting, preset, roles, setup, timeout=3600)
            known = next(row for row in rows if row["runs"])  # of a last stage
            sent = Counter[str]()
            for row in rows:
                sent.update(row["sent"])
            found[name] = {"preset": preset, "roles": roles, "runs": known["runs"]}
            found[name]["bytes"] = dict(sent)
    finally:
        ranks.stop()
    return {"mesh": MESH, "setup": vars(setup), "settings": found}


def policy_for(preset: str, roles: Sequence[str], seen: Sequence[str]) -> commpass.Policy | str:
    """Return a preset restricted to the dimensions ``roles``, for an integration that has the
    dimensions ``seen``."""
    if preset == "off":
        return preset
    names = {role: role if role in roles and role in seen else () for role in DIMENSIONS}
    return commpass.Policy.for_mesh(preset, **names)


def part_of(seed: int, setup: Setup, mesh: DeviceMesh) -> nn.Module:
    """Return this rank's stage of a new model of a seed, its layers and weights sharded."""
    import common
    import train_3d
    import train_tp

    torch.manual_seed(seed)
    model = common.Transformer(setup.layers, setup.width)
    train_tp.divide(model, mesh["tp"])
    part = train_3d.Part(model, mesh["pp"].get_local_rank(), mesh["pp"].size())
    shard(part, mesh["dp"])
    return part


def fill(model: nn.Module, like: nn.Module) -> None:
    """Copy the weights of another model into a model, so that it need not be compiled again."""
    with torch.no_grad():
        for mine, its in zip(model.parameters(), like.parameters(), strict=True):
            mine.copy_(its)


def train_setting(preset: str, roles: Sequence[str], setup: Setup) -> dict[str, Any]:
    """Return all runs of a setting on a rank, and the bytes that it sends in a step by dimension.

    Only ranks of a last stage have runs. Raise RuntimeError if a plan is not the requested one.
    """
    import train_3d

    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    part, before = part_of(setup.seeds[0], setup, mesh), len(commpass.plans())
    backend = commpass.backend(
        policy_for(preset, roles, ("tp", "dp")), inner=setup.inner, profile=SLOW, strict=True
    )
    compiled = torch.compile(part, backend=backend, fullgraph=True)
    number, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    stage = PipelineStage(
        compiled, number, stages, torch.device("cpu"), group=mesh["pp"].get_group()
    )
    compress_pipeline(stage, policy_for(preset, roles, ("pp",)), profile=SLOW)
    schedule = Schedule1F1B(stage, setup.microbatches, loss_fn=train_3d.loss_of)
    runs = []
    for seed in setup.seeds:
        fill(part, part_of(seed, setup, mesh))
        commpass.reset_state()
        found = train(part, schedule, mesh, seed, setup)
        runs += [found] if part.last else []
    plans = commpass.plans()[before:]
    check(plans, roles)
    return {"runs": runs, "sent": sent_by(plans, setup.microbatches)}


def train(
    part: nn.Module, schedule: Schedule1F1B, mesh: DeviceMesh, seed: int, setup: Setup
) -> dict[str, Any]:
    """Return a run with AdamW, whose learning rate falls to a tenth along a cosine.

    Losses are means over the data-parallel ranks, and NaN on a first stage.
    """
    import common

    text, losses = english(), []
    learn = torch.optim.AdamW(part.parameters(), lr=setup.rate, foreach=False)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(learn, setup.steps, setup.rate / 10)
    own = mesh["dp"].get_local_rank()

    def step(batch: Tensor) -> float:
        batch = batch[: setup.sequences]
        given = (batch[:, :-1],) if part.first else ()
        found: list[Tensor] = []
        schedule.step(*given, target=batch[:, 1:] if part.last else None, losses=found)
        return torch.stack(found).mean().item() if part.last else float("nan")

    for batch in common.batches(text.train, setup.steps, seed, own):
        losses.append(step(batch))
        learn.step()
        learn.zero_grad()
        slower.step()
    # A step without an update: it uses the schedule and graphs of the training.
    unseen = [step(batch) for batch in common.batches(text.validation, setup.held_out, 0, own)]
    learn.zero_grad()
    means = mean_over(mesh["dp"], [*losses, fmean(unseen)])
    return run_of(seed, means[:-1], means[-1]) if not isnan(means[-1]) else {}


def mean_over(mesh: DeviceMesh, values: Sequence[float]) -> list[float]:
    """Return means over the ranks of a dimension."""
    row = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(row, group=mesh.get_group())
    return (row / mesh.size()).tolist()


def check(plans: Sequence[commpass.Plan], roles: Sequence[str]) -> None:
    """Raise RuntimeError unless exactly these dimensions have coded sites."""
    if fallen := [plan.fallback for plan in plans if plan.fallback]:
        raise RuntimeError(fallen[0])
    coded = {site.group_label for plan in plans for site in plan.compressed}
    if coded != set(roles):
        raise RuntimeError(f"coded are {sorted(coded)}, and not {sorted(roles)}")


def sent_by(plans: Sequence[commpass.Plan], microbatches: int) -> Counter[str]:
    """Return what this rank sends in a step, by dimension; each plan is of one microbatch."""
    found = Counter[str]()
    for plan in plans:
        for site in plan:
            if site.kind != "recv":  # the sending rank counts these bytes
                found[site.group_label] += microbatches * site.wire_bytes
    return found


THREE_D_TRAINING = Experiment(
    "three_d_training", "losses and bytes of training on a mesh of 2 x 2 x 2", 25, run
)
