"""Mixtures of experts: tokens are sent to the ranks of their experts and back."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.nn.functional import silu

from scenarios.parts import Copied, world
from scenarios.scenario import Job, Results, Scenario, batches, random, train

WIDTH = 32
EVEN = [[64, 64, 64], [64, 64, 64], [64, 64, 64]]
UNEVEN = [[1, 2, 30], [4, 9, 3], [5, 1, 2]]
NOTHING_FOR_ONE = [[0, 9, 3], [0, 4, 20], [0, 0, 0]]
"""Tokens from rank i to rank j: rank 2 has none, and rank 0 gets none."""
EVEN_FOR_ONE = [[4, 4, 4], [4, 9, 3], [4, 1, 2]]
"""Rank 0 sends and gets equally many everywhere."""


class Experts(nn.Module):
    """One expert per rank; the router's weight is on every rank. Tokens are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(random(WIDTH, 1, 3) / WIDTH**0.5)
        self.expert = nn.Parameter(random(WIDTH, WIDTH, 10 + dist.get_rank()) / WIDTH**0.5)

    def forward(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        chance = torch.sigmoid(x @ Copied.apply(self.router, world()))
        tokens = x.bfloat16().sin().float()  # back to float32, as experts compute
        inbox = exchange(tokens, sent, received)
        outbox = silu(inbox @ self.expert).bfloat16().float()
        return x + exchange(outbox, received, sent) * chance


def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    return wait_tensor(all_to_all_single_autograd(rows, received, sent, dist.group.WORLD))


class Routed(Experts):
    """The number of tokens for each rank is known only when the graph runs: the ranks exchange
    it."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
        arriving = wait_tensor(all_to_all_single(counts, None, None, dist.group.WORLD))
        sent, received = numbers(counts), numbers(arriving)
        torch._check(sum(sent) == x.shape[0])
        return super().forward(x, sent, received)


def numbers(counts: Tensor) -> list[int]:
    """Return the values of a tensor, as numbers that the compiler knows to be small."""
    values = counts.tolist()
    for value in values:
        torch._check(value >= 0)
        torch._check(value <= 1000)
    return values


def fixed(matrix: list[list[int]]):
    """Experts with constant token counts: each rank's graph contains its own."""

    def run(job: Job) -> Results:
        sent, received = matrix[job.rank], [row[job.rank] for row in matrix]
        model = Experts()
        compiled = job.compile(model)
        data = batches(job.rank, sum(sent), WIDTH)
        return train(job, model, data, lambda x: compiled(x, sent, received))

    return run


def routed(matrix: list[list[int]]):
    def run(job: Job) -> Results:
        sent = matrix[job.rank]
        model = Routed()
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            compiled = job.compile(model)
            return train(
                job,
                model,
                batches(job.rank, sum(sent), WIDTH),
                lambda x: compiled(x, torch.tensor(sent)),
            )

    return run


def changing(job: Job) -> Results:
    """Different token counts in every step, through one graph."""
    model = Routed()
    found: Results = {}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = job.compile(model)
        for step, matrix in enumerate((UNEVEN, EVEN, [row[::-1] for row in UNEVEN])):
            sent = torch.tensor(matrix[job.rank])
            data = batches(10 * step + job.rank, int(sent.sum()), WIDTH, steps=1)
            found |= train(job, model, data, lambda x, sent=sent: compiled(x, sent), first=step)
    return found


experts_scenario = partial(Scenario, ranks=3, rounding=2**-6)

SCENARIOS = (
    experts_scenario(name="experts", run=fixed(EVEN), sites=4, gradients=1),
    experts_scenario(name="experts, uneven", run=fixed(UNEVEN), sites=4, gradients=1),
    experts_scenario(name="experts, no tokens", run=fixed(NOTHING_FOR_ONE), differ=True),
    experts_scenario(name="experts, even for one", run=fixed(EVEN_FOR_ONE), differ=True),
    experts_scenario(name="experts, routed", pays=False, run=routed(UNEVEN), sites=4, gradients=1),
    experts_scenario(name="experts, routed, no tokens", run=routed(NOTHING_FOR_ONE), differ=True),
    experts_scenario(name="experts, routed anew", pays=False, run=changing, sites=4, gradients=1),
)
