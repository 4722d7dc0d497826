"""Small modules, and collectives with gradients, from which the scenarios are built."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu

ops = torch.ops._c10d_functional


def world() -> str:
    """Return the name of the group of all ranks."""
    return dist.group.WORLD.group_name


def total(x: Tensor, group: str, op: str = "sum") -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), op, group))


def gathered(x: Tensor, group: str) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension."""
    return ops.wait_tensor(ops.all_gather_into_tensor(x, dist.get_world_size(), group))


class Summed(torch.autograd.Function):
    """The sum over ranks, as after a row-parallel matmul; each rank gets the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Copied(torch.autograd.Function):
    """The unchanged value; its gradient is summed over ranks.

    It is for a replicated weight, or before a column-parallel matmul.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return total(gradient, ctx.group), None


class Block(nn.Module):
    """A residual MLP of ``width``, not sharded."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(silu(self.up(x)))


class Net(nn.Module):
    """Blocks in sequence."""

    def __init__(self, width: int = 32, depth: int = 2, block: Any = Block):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([block(width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Replica(nn.Module):
    """A matmul with a replicated weight, whose gradient is summed over ranks in the graph."""

    def __init__(self, width: int = 32, group: str | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.group = group or world()

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(x @ Copied.apply(self.weight, self.group))


class RowParallel(nn.Module):
    """An MLP whose second matmul is sharded by rows. There is no collective in backward."""

    def __init__(self, width: int = 32, group: str | None = None):
        super().__init__()
        mine = torch.Generator().manual_seed(100 + dist.get_rank())
        self.up = nn.Parameter(torch.randn(width, width, generator=mine) / width**0.5)
        self.down = nn.Parameter(torch.randn(width, width, generator=mine) / width**0.5)
        self.group = group or world()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + Summed.apply(silu(x @ self.up) @ self.down, self.group))
