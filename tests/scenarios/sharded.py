"""Parameters that are sharded, and gathered where they are used: explicitly, tied, cast; FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import silu

from scenarios.parts import Net
from scenarios.scenario import Job, Results, Scenario, batches, random, train

WIDTH = 32


class Sharded(nn.Module):
    """Layers with sharded weights; ``tied`` uses the first again at the end."""

    def __init__(self, depth: int = 2, tied: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        weights = [random(WIDTH, WIDTH, 5 + layer) / WIDTH**0.5 for layer in range(depth)]
        shards = [distribute_tensor(weight, mesh, [Shard(0)]) for weight in weights]
        self.weights = nn.ParameterList([nn.Parameter(shard) for shard in shards])
        self.tied, self.dtype = tied, dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        for weight in list(self.weights) + ([self.weights[0]] if self.tied else []):
            x = x + silu(x @ self.whole(weight))
        return x

    def whole(self, weight: DTensor) -> Tensor:
        gathered = weight.redistribute(placements=[Replicate()])
        return gathered.to_local(grad_placements=[Partial()]).to(self.dtype).t()


def by_hand(job: Job) -> Results:
    return train(job, Sharded(), batches(job.rank, 8, WIDTH))


def tied(job: Job) -> Results:
    return train(job, Sharded(depth=3, tied=True), batches(job.rank, 8, WIDTH))


def cast(job: Job) -> Results:
    return train(job, Sharded(tied=True, dtype=torch.bfloat16), batches(job.rank, 8, WIDTH))


def uneven_batches(job: Job) -> Results:
    """Batch sizes differ by rank; what is gathered must not."""
    rows = (2, 700, 40)[job.rank]
    model = Sharded(depth=3, tied=True, dtype=torch.bfloat16)
    return train(job, model, batches(job.rank, rows, WIDTH))


def short_last_batch(job: Job) -> Results:
    """The last batch of an epoch is short on one rank, which recompiles."""
    data = batches(job.rank, 256, WIDTH, steps=4)
    if job.rank == job.size - 1:
        data[2:] = [data[2][:3], data[3]]
    return train(job, Sharded(depth=3, tied=True), data)


def fsdp(job: Job) -> Results:
    """FSDP2 gathers in hooks, outside compiled graphs, so that the backend sees no collective."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (job.size,), mesh_dim_names=("dp",))
    model = Net(WIDTH)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(job, model, batches(job.rank, 8, WIDTH))


SCENARIOS = (
    Scenario(name="sharded by hand", run=by_hand, sites=4, inductor=True),
    Scenario(name="sharded, tied weights", run=tied, ranks=3, sites=4, differ=True),
    Scenario(name="sharded, cast after gathering", run=cast, sites=2, rounding=2**-6),
    Scenario(
        name="sharded, uneven batches",
        run=uneven_batches,
        ranks=3,
        sites=4,
        rounding=2**-6,
        differ=True,
    ),
    Scenario(name="sharded, short last batch", run=short_last_batch, sites=6),
    Scenario(name="fsdp", run=fsdp, sites=0),
)
