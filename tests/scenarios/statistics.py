"""Tensors that are no field of like values, which no policy may change unless it names them.

They are statistics of a batch norm, metrics, positions of the largest logits, and the loads of
experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from scenarios.parts import Net, gathered, total, world
from scenarios.scenario import Job, Results, Scenario, batches, random, train

WIDTH = 256
"""Wide enough that codes would pay on the slow link, if they were allowed."""


def exact(found: Results) -> Results:
    return {f"exact/{name}": value for name, value in found.items()}


class Normalized(torch.autograd.Function):
    """A batch norm over all ranks, which gather [means, 1 / deviations, count], as in torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows, width = x.shape
        mean, invstd = x.mean(0), (x.var(0, correction=0) + 1e-5).rsqrt()
        count = torch.full((1,), float(rows))
        parts = gathered(torch.cat([mean, invstd, count]).view(1, -1), world())
        means, stds, counts = parts.split([width, width, 1], 1)
        share = counts / counts.sum()
        mean = (means * share).sum(0)
        square = ((stds**-2 - 1e-5 + (means - mean) ** 2) * share).sum(0)
        invstd = (square + 1e-5).rsqrt()
        ctx.save_for_backward(x, mean, invstd, counts.sum())
        return (x - mean) * invstd

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, mean, invstd, count = ctx.saved_tensors
        centred = (x - mean) * invstd
        sums = total(torch.cat([gradient.sum(0), (gradient * centred).sum(0)]), world())
        dy, dy_centred = (sums / count).chunk(2)
        return (gradient - dy - centred * dy_centred) * invstd


class NormalizedBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(Normalized.apply(x @ self.weight))


def batch_norm(job: Job) -> Results:
    """Every rank's batch has a different number of rows, so that counts differ."""
    model = Net(WIDTH, block=NormalizedBlock)
    return exact(train(job, model, batches(job.rank, 16 + 8 * job.rank, WIDTH)))


def metrics(job: Job) -> Results:
    """Sums, sums of squares and the count of each step, over all ranks."""

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        error = (x.sin() - x).abs()
        count = torch.full((1,), float(len(x)))
        of_channels = torch.cat([error.sum(0), error.square().sum(0), count])
        of_all = torch.stack([error.sum(), error.square().sum(), (error > 0.1).sum().float()])
        return total(of_channels, world()), total(of_all, world())

    compiled = job.compile(step)
    found = [compiled(batch) for batch in batches(job.rank, 32, WIDTH)]
    return exact({f"{n}/{i}": x for n, some in enumerate(found) for i, x in enumerate(some)})


def argmax(job: Job) -> Results:
    """Each rank has a part of the vocabulary: its largest logits, and their tokens."""
    vocabulary = 30_000

    def choose(x: Tensor, head: Tensor, first: Tensor) -> Tensor:
        largest, token = (x @ head).max(-1)
        mine = torch.stack([largest, (token + first).float()], -1).view(1, -1, 2)
        pairs = gathered(mine, world())
        best = pairs[..., 0].argmax(0)
        return pairs[..., 1].gather(0, best.unsqueeze(0)).long()

    compiled, head = job.compile(choose), random(32, vocabulary, 7 + job.rank)
    first = torch.tensor(vocabulary * job.rank)
    steps = enumerate(batches(100, WIDTH, 32))
    return exact({f"tokens/{step}": compiled(batch, head, first) for step, batch in steps})


def loads(job: Job) -> Results:
    """Count the tokens of each expert of each layer; the sign of the excess changes the expert's
    bias."""
    layers, experts = 12, 64
    routers = random(WIDTH, layers * experts, 5).view(WIDTH, layers, experts)

    def step(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("td,dle->tle", x, routers)
        chosen = (scores + bias).topk(4, -1)[1]
        counts = one_hot(chosen, experts).sum((0, 2)).float()
        counts = total(counts, world())
        return counts, bias + 1e-3 * torch.sign(counts.mean(-1, keepdim=True) - counts)

    compiled, bias, found = job.compile(step), torch.zeros(layers, experts), {}
    for number, batch in enumerate(batches(job.rank, 512, WIDTH)):
        found[f"counts/{number}"], bias = compiled(batch, bias)
        found[f"bias/{number}"] = bias
    return exact(found)


SCENARIOS = (
    Scenario(name="batch norm over ranks", run=batch_norm, sites=0, presets=True),
    Scenario(name="metrics", run=metrics, sites=0, presets=True, replicated=("exact",)),
    Scenario(name="argmax of a vocabulary", run=argmax, sites=0, presets=True),
    Scenario(name="loads of experts", run=loads, sites=0, presets=True, replicated=("exact",)),
)
