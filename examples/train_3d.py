"""Train with two or all three dimensions of 3-D parallelism, without and with compressed
collectives.

    python examples/train_3d.py --mesh tp,dp
    python examples/train_3d.py --mesh tp,pp --policy taco-3d
    python examples/train_3d.py --mesh tp,dp,pp --ranks 8

One policy applies to all dimensions. Tensor parallelism (tp) has 2 ranks. The other dimensions also
have 2 ranks each, given 4 ranks, or 8 for all three dimensions. With data parallelism (dp), weights
are sharded in the compiled graph, so that all communication is in that graph. With pipeline
parallelism (pp), each stage of ``--layers`` blocks is compiled. ``compress_pipeline`` compresses
what is sent between stages.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from typing import Any

import meshes
import torch
from common import Transformer, shared_options
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from train_tp import build, divide

import commpass
from commpass.parallel import compress_pipeline, shard

MICROBATCHES = 4


class Part(nn.Module):
    """The part of the model that belongs to one pipeline stage."""

    def __init__(self, model: Transformer, stage: int, stages: int):
        super().__init__()
        own_blocks = torch.arange(len(model.blocks)).tensor_split(stages)[stage].tolist()
        self.first, self.last = stage == 0, stage == stages - 1
        self.blocks = nn.ModuleList(model.blocks[number] for number in own_blocks)
        if self.first:
            self.token, self.position = model.token, model.position
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.position.weight if self.first else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def restrict_to(policy: str, *names: str) -> commpass.Policy | str:
    """Restrict a ``*-3d`` preset to the mesh dimensions ``names``; return any other policy
    unchanged."""
    if not policy.endswith("-3d"):
        return policy
    dims = {name: name if name in names else () for name in ("tp", "dp", "pp")}
    return commpass.Policy.for_mesh(policy, **dims)


def data_parallel(
    model: Transformer, mesh: DeviceMesh, policy: str, profile: Any
) -> meshes.Training:
    """Set up data parallelism: the compiled graph gathers weights and scatters gradients."""
    shard(model, mesh["dp"])
    backend = commpass.backend(restrict_to(policy, "tp", "dp"), profile=profile)
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def step(batch: Tensor) -> Tensor:
        loss = compiled(batch)
        loss.backward()
        return loss

    return meshes.Training(model, step, meshes.bytes_by_dimension)


def pipeline_parallel(
    model: Transformer, mesh: DeviceMesh, policy: str, profile: Any
) -> meshes.Training:
    """Set up pipeline parallelism: each rank compiles one stage, and an integration compresses what
    stages send.

    If the mesh also has data parallelism, the weights of a stage are sharded as above.
    """
    number, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    part = Part(model, number, stages)
    names = [name for name in mesh.mesh_dim_names or () if name != "pp"]
    if "dp" in names:
        shard(part, mesh["dp"])
    backend = commpass.backend(restrict_to(policy, *names), profile=profile)
    compiled = torch.compile(part, backend=backend, fullgraph=True)
    stage = PipelineStage(
        compiled, number, stages, torch.device("cpu"), group=mesh["pp"].get_group()
    )
    compress_pipeline(stage, restrict_to(policy, "pp"), profile=profile)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def step(batch: Tensor) -> Tensor | None:
        text = (batch[:, :-1],) if part.first else ()
        losses: list[Tensor] = []
        schedule.step(*text, target=batch[:, 1:] if part.last else None, losses=losses)
        return torch.stack(losses).mean() if part.last else None

    def sent(plans: meshes.Plans) -> Counter[str]:
        return meshes.bytes_by_dimension(plans, MICROBATCHES)  # plans are of one microbatch

    return meshes.Training(part, step, sent)


def loss_of(logits: Tensor, text: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), text.flatten())


def setup(policy: str, mesh: DeviceMesh, options: Namespace) -> meshes.Training:
    model, profile = build(options), commpass.ethernet(options.link_gbit)
    divide(model, mesh["tp"])
    parallel = pipeline_parallel if "pp" in mesh.mesh_dim_names else data_parallel
    return parallel(model, mesh, policy, profile)


if __name__ == "__main__":
    parser = shared_options(
        steps=40, layers=1, width=128, ranks=4, link_gbit=0.1, policy="balanced-3d"
    )
    choices = ["tp,dp", "tp,pp", "tp,dp,pp"]
    about = "mesh dimensions, of 2 ranks each; all three together need --ranks 8"
    parser.add_argument("--mesh", choices=choices, default="tp,pp", help=about)
    options = parser.parse_args()
    others = options.mesh.removeprefix("tp,").split(",")
    shape = meshes.mesh_shape(others, parser, options)
    options.layers *= shape.get("pp", 1)  # per stage
    meshes.main(__file__, setup, parser, options, shape)
