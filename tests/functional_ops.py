"""Functional collectives with their waits, on the default group unless another one is named."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

ops = torch.ops._c10d_functional


def ar(x: Tensor, op: str = "sum", group: str = "0") -> Tensor:
    """All-reduce."""
    return ops.wait_tensor(ops.all_reduce(x, op, group))


def ag(x: Tensor, ranks: int | None = None, group: str = "0") -> Tensor:
    """All-gather, by default between all ranks."""
    return ops.wait_tensor(ops.all_gather_into_tensor(x, ranks or dist.get_world_size(), group))


def rs(x: Tensor, op: str = "sum", ranks: int | None = None, group: str = "0") -> Tensor:
    """Reduce-scatter, by default between all ranks."""
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, op, ranks or dist.get_world_size(), group))
