"""Trains on two dimensions of 3-D parallelism at a time, without and with compressed collectives,
under one policy for all three.

    python examples/train_3d.py --mesh tp,dp
    python examples/train_3d.py --mesh tp,pp --policy taco-3d

Tensor parallelism (tp) has 2 ranks, the other dimension all the rest: with 4 ranks 2, with 8 ranks
4. With data parallelism (dp) weights are sharded within the compiled graph, so that everything is
sent from there. With pipeline parallelism (pp) each stage is compiled, and its messages go through
``compress_pipeline``. The policy knows dimensions by these names; a mesh that has others is told by
``commpass.Policy.for_mesh("balanced-3d", tp="x", dp="y")``.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from typing import Any

import meshes
import torch
from common import Transformer, loss_of, shared_options
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from train_tp import build, divide

import commpass
from commpass.parallel import compress_pipeline, shard

MICROBATCHES = 4


class Part(nn.Module):
    """The blocks of one pipeline stage, behind the embedding on the first and before the head on
    the last."""

    def __init__(self, model: Transformer, stage: int, stages: int):
        super().__init__()
        some = torch.arange(len(model.blocks)).tensor_split(stages)[stage].tolist()
        self.blocks = nn.ModuleList(model.blocks[number] for number in some)
        self.embed = model.embed if stage == 0 else nn.Identity()
        self.logits = model.logits if stage == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


def sharded(model: Transformer, mesh: DeviceMesh, backend: Any) -> meshes.Training:
    """Tensor and data parallelism, both in one graph."""
    shard(model, mesh["dp"])
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def step(batch: Tensor) -> Tensor:
        loss = compiled(batch)
        loss.backward()
        return loss

    return meshes.Training(model, step, meshes.sent)


def setup(policy: str, mesh: DeviceMesh, options: Namespace) -> meshes.Training:
    model, profile = build(options), commpass.ethernet(options.link_gbit)
    divide(model, mesh["tp"])
    backend = commpass.backend(policy, profile=profile)
    if "dp" in mesh.mesh_dim_names:
        return sharded(model, mesh, backend)
    line = mesh["pp"]
    number, stages = line.get_local_rank(), line.size()
    part = Part(model, number, stages)
    compiled = torch.compile(part, backend=backend, fullgraph=True)
    stage = PipelineStage(compiled, number, stages, torch.device("cpu"), group=line.get_group())
    compress_pipeline(stage, policy, profile=profile)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def step(batch: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (batch[:, :-1],) if stage.is_first else ()
        target = batch[:, 1:] if stage.is_last else None
        schedule.step(*inputs, target=target, losses=losses)
        return torch.stack(losses).mean() if losses else None

    def sent(plans: meshes.Plans) -> Counter[str]:
        return meshes.sent(plans, MICROBATCHES)  # plans are of one microbatch

    return meshes.Training(part, step, sent)


if __name__ == "__main__":
    parser = shared_options(
        steps=40, layers=2, width=128, ranks=4, link_gbit=0.1, policy="balanced-3d"
    )
    parser.add_argument("--mesh", choices=["tp,dp", "tp,pp"], default="tp,dp", help="dimensions")
    options = parser.parse_args()
    shape = meshes.beside_tp(options.mesh.removeprefix("tp,"), parser, options)
    if options.layers < shape.get("pp", 1):
        parser.error(f"--layers {options.layers}: must be one for each of {shape['pp']} stages")
    meshes.main(__file__, setup, parser, options, shape)
