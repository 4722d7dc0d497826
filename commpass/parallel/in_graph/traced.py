"""The exchange of one parameter: gathered for forward, its gradient reduced in backward.

All code here is traced into the graph of the module that reads a parameter. It consists of plain
functional collectives, one for each read, which commpass's passes then merge, join and compress.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

ops: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class ParameterSpec:
    """How the ``size`` ranks of ``group`` exchange one parameter of ``shape``.

    Each rank has the full parameter, or it is ``sharded`` along its first dimension. Values are
    sent in ``param_dtype``, gradients in ``reduce_dtype``; ``dtype`` is the parameter's. ``op`` is
    how gradients are reduced, "avg" or "sum".
    """

    group: str
    rank: int
    size: int
    sharded: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    op: str

    @property
    def rows(self) -> int:
        """Rows of a rank's part; the last ranks may have fewer, or none."""
        return -(-self.shape[0] // self.size)

    @property
    def uneven(self) -> bool:
        """Whether the last ranks have fewer rows than the first."""
        return self.rows * self.size > self.shape[0]

    @property
    def start(self) -> int:
        return min(self.rank * self.rows, self.shape[0])

    @property
    def length(self) -> int:
        """Rows of this rank's part."""
        return min(self.rows, self.shape[0] - self.start)


def gather(part: Tensor, how: ParameterSpec) -> Tensor:
    """Return the full parameter, in ``param_dtype``, from this rank's part."""
    part = part.to(how.param_dtype)
    if how.size == 1 or not how.sharded or 0 in how.shape:
        return part.view_as(part)
    part = _of_rows(part, how.rows) if how.uneven else part
    whole = ops.wait_tensor(ops.all_gather_into_tensor(part, how.size, how.group))
    return whole.narrow(0, 0, how.shape[0]) if how.uneven else whole


def reduce(gradient: Tensor, how: ParameterSpec) -> Tensor:
    """Return this rank's part of the reduced gradient, in the parameter's dtype."""
    gradient = gradient.to(how.reduce_dtype)
    if how.size == 1 or 0 in how.shape:
        pass
    elif how.sharded:
        if how.uneven:
            missing = how.rows * how.size - how.shape[0]
            gradient = pad(gradient, (0, 0) * (gradient.dim() - 1) + (0, missing))
        sent = ops.reduce_scatter_tensor(gradient.contiguous(), how.op, how.size, how.group)
        gradient = ops.wait_tensor(sent)
        gradient = _of_rows(gradient, how.length) if how.uneven else gradient
    else:
        gradient = ops.wait_tensor(ops.all_reduce(gradient.contiguous(), how.op, how.group))
    return gradient.to(how.dtype)


def _of_rows(part: Tensor, rows: int) -> Tensor:
    """Return the first rows of a tensor, padded with zeros.

    Ranks cut off, or add, different numbers of rows, and some none. All must do it by the same
    operators, which no pass removes even if they do nothing. Each rank decides about its
    collectives by its own graph, and the decisions must be the same.
    """
    line = torch.cat([part, part.new_zeros(1, *part.shape[1:])])
    return line.index_select(0, torch.arange(rows, device=part.device).clamp(max=part.shape[0]))


class Exchanged(torch.autograd.Function):
    """Return the full parameter; backward reduces its gradient and the accumulated one.

    ``pending`` is cleared there, so that it is sent once even if a parameter is read several times.
    It is not a saved tensor: what is accumulated between forward and backward counts as well.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, pending: Tensor | None, how: ParameterSpec) -> Tensor:
        ctx.pending, ctx.how = pending, how
        return gather(part, how)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.pending is not None:
            gradient = gradient + ctx.pending
            ctx.pending.zero_()
        return reduce(gradient, ctx.how), None, None


class LocalGradient(torch.autograd.Function):
    """Return the full parameter; its gradient goes to this rank's ``leaf`` and no further."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, leaf: Tensor) -> Tensor:
        ctx.dtype = leaf.dtype
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.to(ctx.dtype)
