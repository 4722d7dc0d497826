"""Activation checkpointing: backward runs parts of forward again, collectives included."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from scenarios.parts import Net, Replica, RowParallel, ops, world
from scenarios.scenario import Job, Results, Scenario, batches, train

WIDTH = 32


class Whole(nn.Module):
    """Keep only the input of each block."""

    def __init__(self, block: type):
        super().__init__()
        self.net = Net(WIDTH, block=block)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net.layers:
            x = checkpoint(partial(sine, layer), x, use_reentrant=False)
        return x


def sine(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sin()


class Selective(Whole):
    """Keep the results of matmuls (and of ``also``), and recompute everything else."""

    def __init__(self, block: type, also: tuple = ()):
        super().__init__(block)
        self.saved = (torch.ops.aten.mm.default, *also)

    def forward(self, x: Tensor) -> Tensor:
        saved = self.saved

        def keep(context: object, op: object, *args: object, **options: object) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

        for layer in self.net.layers:
            contexts = partial(create_selective_checkpoint_contexts, keep)
            run = partial(sine, layer)
            x = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
        return x


class Mixed(nn.Module):
    """Backward has its own collective, for a replicated weight, beside the recomputed ones."""

    def __init__(self, width: int):
        super().__init__()
        self.data, self.tensor = Replica(width, world()), RowParallel(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.tensor(self.data(x))


def whole(job: Job) -> Results:
    return train(job, Whole(RowParallel), batches(0, 8, WIDTH))


def selective(job: Job) -> Results:
    return train(job, Selective(RowParallel), batches(0, 8, WIDTH))


def collectives_saved(job: Job) -> Results:
    also = (ops.all_reduce.default, ops.wait_tensor.default)
    return train(job, Selective(RowParallel, also), batches(0, 8, WIDTH))


def mixed(job: Job) -> Results:
    return train(job, Whole(Mixed), batches(0, 8, WIDTH))


def of_one_block(job: Job) -> Results:
    """Checkpointing around compiled blocks: backward calls forward's graph again."""
    net = Net(WIDTH, block=RowParallel)
    for layer in net.layers:
        layer.compile(backend=job.backend)

    def forward(x: Tensor) -> Tensor:
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    return train(job, net, [batch.requires_grad_() for batch in batches(0, 8, WIDTH)], forward)


SCENARIOS = (
    Scenario(
        name="checkpointed",
        run=whole,
        sites=4,
        replicated=("out",),
        inductor=True,
        torch=(2, 12),  # earlier versions keep what is summed
    ),
    Scenario(name="checkpointed selectively", run=selective, sites=4, replicated=("out",)),
    Scenario(
        name="checkpointed, collectives saved",
        run=collectives_saved,
        sites=2,
        replicated=("out",),
    ),
    Scenario(
        name="checkpointed with gradients",
        run=mixed,
        sites=4,
        gradients=2,
        conserved=True,
        replicated=("out",),
    ),
    Scenario(name="checkpointed around blocks", run=of_one_block, sites=1, replicated=("out",)),
)
