"""Tensor and sequence parallelism, meshes, and the same ranks under several names."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import silu

from commpass import Rule
from scenarios.parts import Block, Copied, Net, Summed, total, world
from scenarios.scenario import Job, Results, Scenario, batches, random, train

WIDTH = 32


def tensor_parallel(job: Job) -> Results:
    mesh = init_device_mesh("cpu", (job.size,), mesh_dim_names=("tp",))
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    model = parallelize_module(Net(WIDTH), mesh, plan)
    return train(job, model, activations(0))


def activations(rank: int) -> list[Tensor]:
    """Return activations like those of an embedding: a gradient flows through them."""
    return [batch.requires_grad_() for batch in batches(rank, 8, WIDTH)]


def sequence_parallel(job: Job) -> Results:
    mesh = init_device_mesh("cpu", (job.size,), mesh_dim_names=("tp",))
    plan = {
        "layers.*.up": ColwiseParallel(input_layouts=Shard(0)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(0)),
    }
    model = parallelize_module(Net(WIDTH), mesh, plan)
    return train(job, model, activations(job.rank))


def autocast(job: Job) -> Results:
    mesh = init_device_mesh("cpu", (job.size,), mesh_dim_names=("tp",))
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    model = parallelize_module(Net(WIDTH), mesh, plan)
    compiled = job.compile(model)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(x)

    return train(job, model, activations(0), forward)


class Gate(nn.Module):
    """Scores of which every rank has a part; they route tokens, so they must be exact."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(random(width, width, 7 + dist.get_rank()) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return Summed.apply(x @ self.weight, world())


class Gated(nn.Module):
    """A gate's sum over the ranks plus an MLP's: algebra could merge the two."""

    def __init__(self, width: int):
        super().__init__()
        self.router = Gate(width)
        self.mlp = Gate(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x) + self.mlp(x)


class GatedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gated(WIDTH), Gate(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def router_kept(job: Job) -> Results:
    """The MLP gives nothing; what is left is the router's sum, which the user keeps
    uncompressed."""
    model = GatedNet()
    found = train(job, model, batches(0, 8, WIDTH))
    alone = Gated(WIDTH)
    with torch.no_grad():
        alone.mlp.weight.zero_()
        found["exact/router"] = job.compile(alone)(random(8, WIDTH, 3))
    return found


class Twice(nn.Module):
    """A sum over one group and then over another."""

    def __init__(self, first: str, second: str):
        super().__init__()
        self.weight = nn.Parameter(random(WIDTH, WIDTH, 1 + dist.get_rank()) / WIDTH)
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Summed.apply(Summed.apply(x @ self.weight, self.first), self.second))


def overlapping_meshes(job: Job) -> Results:
    """Two meshes name the same ranks tp and ep: a sum over both counts each rank twice."""
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group().group_name
    ep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))["ep"].get_group().group_name
    return train(job, Twice(tp, ep), batches(job.rank, 8, WIDTH))


def flattened_mesh(job: Job) -> Results:
    """A dimension of one rank is flattened into another: two names for one group."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    flat = mesh["pp", "dp"]._flatten("replicas").get_group().group_name
    return train(job, Twice(flat, mesh["dp"].get_group().group_name), batches(job.rank, 8, WIDTH))


class Averaged(torch.autograd.Function):
    """A weight whose gradient is summed over one group and averaged over another."""

    @staticmethod
    def forward(ctx, x: Tensor, summed: str, averaged: str) -> Tensor:
        ctx.groups = summed, averaged
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        summed, averaged = ctx.groups
        return total(total(gradient, summed), averaged, "avg"), None, None


class Layer(nn.Module):
    """Parallel over ``tp``; gradients of the weights are summed over ``dp``, that of the norm over
    both."""

    def __init__(self, tp: str, dp: str, place: int):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Parameter(random(WIDTH, WIDTH, 20 + place) / WIDTH**0.5)
        self.down = nn.Parameter(random(WIDTH, WIDTH, 40 + place) / WIDTH**0.5)
        self.tp, self.dp = tp, dp

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * Averaged.apply(self.norm, self.tp, self.dp)
        hidden = silu(scaled @ Copied.apply(self.up, self.dp))
        return x + Summed.apply(hidden @ Copied.apply(self.down, self.dp), self.tp)


def mesh_of_two(job: Job) -> Results:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = (mesh[name].get_group().group_name for name in ("tp", "dp"))
    layer = Layer(tp, dp, mesh["tp"].get_local_rank())
    return train(job, nn.Sequential(layer), batches(mesh["dp"].get_local_rank(), 8, WIDTH))


class Chain(nn.Module):
    """Each pair of neighbours sums its values: the middle rank is in both groups."""

    def __init__(self, groups: list[str]):
        super().__init__()
        self.weight = nn.Parameter(random(WIDTH, WIDTH, 1 + dist.get_rank()) / WIDTH**0.5)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = torch.tanh(Summed.apply(x @ Copied.apply(self.weight, group), group))
        return x


def chained_groups(job: Job) -> Results:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    mine = [group.group_name for group in groups if dist.get_rank(group) >= 0]
    return train(job, Chain(mine), batches(job.rank, 8, WIDTH))


def fsdp_and_tp(job: Job) -> Results:
    """Hooks gather sharded parameters between compiled blocks; the blocks contain sums over tp."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net(WIDTH)
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.compile(backend=job.backend)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return train(job, model, activations(mesh["dp"].get_local_rank()), model)


KEEP_ROUTER = (Rule(module="**.router", keep=True), Rule(module="router", keep=True))

SCENARIOS = (
    Scenario(
        name="tensor parallel",
        run=tensor_parallel,
        sites=4,
        gradients=2,
        replicated=("out", "loss"),
        inductor=True,
    ),
    Scenario(name="sequence parallel", run=sequence_parallel, sites=6),
    Scenario(
        name="autocast",
        run=autocast,
        sites=4,
        gradients=2,
        replicated=("out", "loss"),
        rounding=2**-6,
    ),
    Scenario(name="router kept", run=router_kept, sites=2, rules=KEEP_ROUTER, replicated=("out",)),
    Scenario(name="overlapping meshes", run=overlapping_meshes, ranks=4, sites=2),
    Scenario(name="flattened mesh", run=flattened_mesh, ranks=4, sites=2),
    Scenario(name="mesh of two dimensions", run=mesh_of_two, ranks=4, sites=4, gradients=3),
    Scenario(name="chained groups", run=chained_groups, ranks=3, sites=2, gradients=1),
    Scenario(name="fsdp and tensor parallel", run=fsdp_and_tp, ranks=4, sites=2, gradients=1),
)
