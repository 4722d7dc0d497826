"""Collectives from torch's front ends are found and compressed: sequence parallelism, sharded
parameters, DDP, in-place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_models import FORCED, Net, close
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commpass

pytestmark = pytest.mark.xdist_group("ranks")


def run_plain_and_compressed(model: nn.Module, x: torch.Tensor, inner: str = "eager"):
    """Return outputs and gradients of one step, plain and compressed, and the kinds of sites in
    forward and backward."""
    results = []
    seen = len(commpass.plans())
    for function in (
        model,
        torch.compile(model, backend=commpass.backend(FORCED, inner=inner, strict=True)),
    ):
        model.zero_grad()
        out = function(x)
        out.square().mean().backward()
        grads = [
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
            for p in model.parameters()
        ]
        results.append((out.full_tensor() if isinstance(out, DTensor) else out.detach(), grads))
    kinds = [[site.kind for site in plan.compressed] for plan in commpass.plans()[seen:]]
    (out, grads), (got, got_grads) = results
    assert close(got, out, 0.03)
    for a, b in zip(got_grads, grads, strict=True):
        assert close(a, b, 0.05)
    return kinds


def sequence_parallel() -> list[list[str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Net(width=48, depth=1)
    plan = {
        "layers.*.up": ColwiseParallel(input_layouts=Shard(0)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh, plan)
    x = torch.randn(
        8, 48, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True
    )
    return run_plain_and_compressed(model, x)


@pytest.mark.every
def test_sequence_parallelism_gathers_and_scatters(ranks2):
    forward, backward = ranks2.run(sequence_parallel)[0]
    assert forward == ["all_gather", "reduce_scatter"]
    assert backward == ["all_gather", "reduce_scatter"]


class Sharded(nn.Module):
    """A parameter that is sharded, and gathered where it is used."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(64, 48) / 10, mesh, [Shard(0)]))

    def forward(self, x):
        gathered = self.weight.redistribute(placements=[Replicate()])
        return torch.tanh(
            x @ gathered.to_local(grad_placements=[torch.distributed.tensor.Partial()]).t()
        )


def sharded_parameters() -> list[list[str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(dist.get_rank()))
    return run_plain_and_compressed(Sharded(mesh), x)


def test_sharded_parameters_are_gathered_and_their_gradients_scattered(ranks2):
    assert ranks2.run(sharded_parameters)[0] == [["all_gather"], ["reduce_scatter"]]


def data_parallel() -> list[str]:
    """DDP's python reducer under compiled autograd: one bucketed all_reduce in the backward
    graph."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = Net(width=48, depth=1)
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()
    expected = []
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        expected.append(parameter.grad / dist.get_world_size())
    model.zero_grad()
    seen = len(commpass.plans())
    backend = commpass.backend(FORCED, inner="eager", strict=True)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        compiled = torch.compile(DistributedDataParallel(model), backend=backend)
        with torch._dynamo.compiled_autograd._enable(
            torch.compile(backend=backend, fullgraph=False)
        ):
            compiled(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert close(parameter.grad, gradient, 0.05)
    return [site.kind for plan in commpass.plans()[seen:] for site in plan.compressed]


@pytest.mark.every
def test_bucketed_gradients_of_ddp_are_compressed(ranks2):
    assert "all_reduce" in ranks2.run(data_parallel)[0]
    ranks2.stop()  # DDP leaves hooks in the process group


def in_place_calls() -> list[str]:
    size = dist.get_world_size()

    def function(x):
        summed = x * 2
        dist.all_reduce(summed)
        gathered = torch.empty(size * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(gathered, summed)
        part = torch.empty_like(x)
        dist.reduce_scatter_tensor(part, gathered)
        return part + 1

    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        got = torch.compile(
            function, backend=commpass.backend(FORCED, inner="eager", strict=True), fullgraph=True
        )(x)
        assert close(got, function(x), 0.03)
    return [site.kind for site in commpass.plans()[-1].compressed]


@pytest.mark.every
def test_calls_that_change_their_arguments(ranks2):
    assert ranks2.run(in_place_calls)[0] == ["all_reduce", "all_gather", "reduce_scatter"]
