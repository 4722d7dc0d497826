"""The two exchanges that every algorithm is made of, over functional collectives, on rows of bytes."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import Tensor

ops = torch.ops._c10d_functional

UNROLLED_RANKS = 16
"""Up to this many ranks a sum is a chain of additions that fuses into one kernel; above it, one reduction."""


def gather(wire: Tensor, ranks: int, group: str) -> Tensor:
    """Every rank's ``[1, n]`` to all ranks: ``[ranks, n]``, row r from rank r."""
    return ops.wait_tensor(ops.all_gather_into_tensor(wire, ranks, group))


def exchange(wire: Tensor, ranks: int, group: str) -> Tensor:
    """Row r of ``[ranks, n]`` to rank r: ``[ranks, n]``, row r from rank r."""
    return ops.wait_tensor(ops.all_to_all_single(wire, [1] * ranks, [1] * ranks, group))


def reduce_rows(rows: Tensor, op: str) -> Tensor:
    """``[ranks, n]`` to ``[1, n]``: the sum in rank order, or for ``avg`` the mean, in the dtype of ``rows`` (law 4)."""
    ranks = rows.shape[0]
    if ranks <= UNROLLED_RANKS:
        total = rows[:1]
        for rank in range(1, ranks):
            total = total + rows[rank : rank + 1]
    else:
        total = rows.sum(dim=0, keepdim=True)
    return total / ranks if op == "avg" else total
