"""Data parallelism: gradients are summed in the graph, by DDP, by hooks; several models."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commpass
from scenarios.parts import Copied, Net, Replica, total, world
from scenarios.scenario import Job, Results, Scenario, batches, gradients, residual, train

WIDTH = 32


def replicas(job: Job) -> Results:
    return train(job, Net(WIDTH, block=Replica), batches(job.rank, 8, WIDTH))


def uneven_batches(job: Job) -> Results:
    """Every rank's batches have a different size, and one rank's last one is short."""
    data = batches(job.rank, 8 + 5 * job.rank, WIDTH, steps=4)
    if job.rank == 0:
        data[2:] = [data[2][:3], data[3][:1]]
    return train(job, Net(WIDTH, block=Replica), data)


def block_by_block(job: Job) -> Results:
    """Each block is compiled separately: three graphs that look alike."""
    model = Net(WIDTH, depth=3, block=Replica)
    for layer in model.layers:
        layer.compile(backend=job.backend)
    return train(job, model, batches(job.rank, 8, WIDTH), model)


def second_model(job: Job) -> Results:
    """Train a model after another one of the same shape was deleted."""
    first = Net(WIDTH, block=Replica)
    found = train(job, first, batches(job.rank + 50, 8, WIDTH))
    found = {f"out/first/{key}": value for key, value in found.items() if key.startswith("loss")}
    del first
    torch._dynamo.reset()
    gc.collect()
    return found | train(job, Net(WIDTH, block=Replica), batches(job.rank, 8, WIDTH))


def two_models(job: Job) -> Results:
    """Alternate between two models of one shape, like a generator and a discriminator."""
    models = {"one": Net(WIDTH, block=Replica), "two": Net(WIDTH, block=Replica)}
    compiled = {name: job.compile(model) for name, model in models.items()}
    found: Results = {}
    for step in range(3):
        for number, (name, model) in enumerate(models.items()):
            data = [batches(job.rank + 100 * number, 8, WIDTH)[step] * (1 + 2 * number)]
            some = train(job, model, data, compiled[name], first=step)
            found |= {f"{key}/{name}": value for key, value in some.items()}
    kept = [found.pop(key) for key in [f"residual/{name}" for name in models] if key in found]
    return found | ({"residual": torch.cat(kept)} if kept else {})


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small, self.large = Replica(WIDTH), Replica(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.small(x) * 3)


def resumed(job: Job) -> Results:
    """Resume training from a checkpoint. A different block is then compiled first."""
    model = Both()
    for part in (model.small, model.large):
        part.compile(backend=job.backend)
    data = batches(job.rank, 8, WIDTH, steps=4)
    found = train(job, model, data[:2], model)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    kept = {name: tensor.clone() for name, tensor in commpass.state_dict(model).items()}
    del model
    torch._dynamo.reset()
    gc.collect()
    commpass.reset_state()
    model = Both()
    model.load_state_dict(weights)
    for part in (model.large, model.small):
        part.compile(backend=job.backend)
    commpass.load_state_dict(kept, model)
    with torch.no_grad():
        model.large(data[0])  # evaluated alone, before training goes on
    return found | train(job, model, data[2:], model, first=2)


def accumulated(job: Job) -> Results:
    """Accumulate gradients of three batches on each rank, then sum them over the ranks."""
    model = Net(WIDTH, block=Local)
    compiled = job.compile(model)
    learn = torch.optim.SGD(model.parameters(), job.lr, foreach=False)
    found: Results = {}
    reduce = job.compile(Reduce())
    for step, batch in enumerate(batches(job.rank, 8, WIDTH, steps=6)):
        loss = compiled(batch).square().mean()
        loss.backward()
        found[f"loss/{step}"] = loss.detach()
        if step % 3 == 2:
            with torch.no_grad():
                weights = list(model.parameters())
                means = reduce([weight.grad for weight in weights])
                for weight, mean in zip(weights, means, strict=True):
                    weight.grad = mean
            found |= gradients(model, step)
            learn.step()
            learn.zero_grad()
    return found


class Local(nn.Module):
    """A matmul of this rank only."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Reduce(nn.Module):
    """The mean of gradients over the ranks."""

    def forward(self, grads: list[Tensor]) -> list[Tensor]:
        return [total(gradient, world(), "avg") for gradient in grads]


def no_sync(job: Job) -> Results:
    """Skip the sums for all but the last of three batches, by a switch in the model."""
    model = Net(WIDTH, block=Switched)
    compiled = job.compile(model)
    learn = torch.optim.SGD(model.parameters(), job.lr, foreach=False)
    found: Results = {}
    for step, batch in enumerate(batches(job.rank, 8, WIDTH, steps=6)):
        for layer in model.layers:
            layer.sync = step % 3 == 2
        loss = compiled(batch).square().mean()
        loss.backward()
        found[f"loss/{step}"] = loss.detach()
        if step % 3 == 2:
            found |= gradients(model, step)
            learn.step()
            learn.zero_grad()
    return found | residual(model)


class Switched(Local):
    sync = True

    def forward(self, x: Tensor) -> Tensor:
        weight = Copied.apply(self.weight, world()) if self.sync else self.weight
        return x + torch.tanh(x @ weight)


def ddp(job: Job) -> Results:
    """Unmodified DDP: its hooks sum the gradients, outside compiled graphs."""
    model = DistributedDataParallel(Net(WIDTH), process_group=dist.new_group())
    return train(job, model, batches(job.rank, 8, WIDTH))


def ddp_in_graph(job: Job) -> Results:
    """DDP's Python reducer, which compiled autograd makes a part of the backward graph."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), autograd_compiled(job):
        model = DistributedDataParallel(Net(WIDTH), process_group=dist.new_group())
        return train(job, model, batches(job.rank, 8, WIDTH))


def hooks(job: Job) -> Results:
    """Hooks on parameters sum gradients; compiled autograd makes them a part of the graph."""

    def reduce(weight: Tensor) -> None:
        weight.grad = total(weight.grad, world())

    with autograd_compiled(job):
        model = Net(WIDTH, block=Local)
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(reduce)
        return train(job, model, batches(job.rank, 8, WIDTH))


def autograd_compiled(job: Job) -> AbstractContextManager[None]:
    compiler = torch.compile(backend=job.backend, fullgraph=False)
    return torch._dynamo.compiled_autograd._enable(compiler)


class Half(nn.Module):
    """float16 weights, whose gradients are summed in float16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) / WIDTH**0.5).half())

    def forward(self, x: Tensor) -> Tensor:
        return x @ Copied.apply(self.weight, world())


def loss_scaled(job: Job) -> Results:
    """Loss scaling like GradScaler: the first scale is too large for float16, and the step is
    skipped."""
    model = Half()
    compiled = job.compile(model)
    learn = torch.optim.SGD(model.parameters(), job.lr / 10, foreach=False)
    scale, found = 2.0**16, {}
    for step, batch in enumerate(batches(0, 64, WIDTH, steps=4)):
        loss = compiled(batch.half()).float().square().mean()
        (loss * scale).backward()
        overflow = not all(weight.grad.isfinite().all() for weight in model.parameters())
        found[f"exact/overflow/{step}"] = torch.tensor(overflow)
        if overflow:
            scale /= 4
        else:
            for weight in model.parameters():
                weight.grad /= scale
            found |= gradients(model, step)
            learn.step()
        learn.zero_grad()
    return found


replicas_scenario = partial(Scenario, conserved=True, replicated=("grad",))
"""Replicas, whose gradients are sums over ranks without later steps."""

SCENARIOS = (
    replicas_scenario(name="data parallel", run=replicas, sites=2, gradients=2, inductor=True),
    replicas_scenario(name="uneven batches", run=uneven_batches, sites=2, gradients=2),
    replicas_scenario(name="block by block", run=block_by_block, sites=1, gradients=1),
    replicas_scenario(name="second model", run=second_model, sites=4, gradients=4),
    replicas_scenario(name="two models in turn", run=two_models, sites=2, gradients=2),
    replicas_scenario(name="resumed", run=resumed, sites=4, gradients=4),
    Scenario(name="accumulated", run=accumulated, sites=2, replicated=("grad",)),
    Scenario(name="no sync", run=no_sync, sites=2, gradients=2, replicated=()),
    Scenario(name="ddp", run=ddp, sites=0, replicated=("grad",)),
    replicas_scenario(name="ddp in the graph", run=ddp_in_graph, gradients=1),
    replicas_scenario(name="hooks in the graph", run=hooks, sites=2, gradients=2),
    Scenario(
        name="loss scaled",
        run=loss_scaled,
        gradients=1,
        rounding=2**-9,
        replicated=("grad",),
    ),
)
