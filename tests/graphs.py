"""Graphs for tests: trace a function as AOTAutograd would, and inspect the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from commpass.passes.fx.parse import parse
from commpass.plan.kinds import KINDS

ops = torch.ops._c10d_functional
KINDS_HERE = tuple(k for k, row in KINDS.items() if not row.pairwise or hasattr(ops, "isend"))
"""Kinds of collectives that this torch has: 2.11 has no messages between two ranks."""


def trace(
    function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False
) -> fx.GraphModule:
    """Return an aten graph with fake values, as it reaches the passes.

    If it is ``dynamic``, sizes may depend on values.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    with mode:
        return make_fx(function, decomposition_table=select_decomp_table())(*fakes)


def trace_sizes(
    function: Callable[..., Any], *inputs: torch.Tensor, all_dims: bool = False
) -> fx.GraphModule:
    """Return a graph for each number of rows of its inputs, or each size if ``all_dims``."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for x in inputs:
        rest = DimDynamic.DYNAMIC if all_dims else DimDynamic.STATIC
        sizes = [DimDynamic.DYNAMIC, *[rest] * (x.dim() - 1)]
        context = StatelessSymbolicContext(sizes, constraint_sizes=[None] * x.dim())
        fakes.append(mode.from_tensor(x, symbolic_context=context))
    with mode:
        return make_fx(function, decomposition_table=select_decomp_table())(*fakes)


def collectives(gm: fx.GraphModule) -> list[tuple[str, torch.dtype, int]]:
    """Return (kind, dtype, bytes handed over) of each collective of a graph, in order."""
    found = []
    for node in gm.graph.nodes:
        call = parse(node)
        if call is not None:
            for source in call.inputs:
                value = source.meta["val"]
                found.append((call.kind, value.dtype, value.numel() * value.itemsize))
    return found


def code(gm: fx.GraphModule) -> str:
    """Return the graph as text, to compare graphs."""
    return str(gm.graph)


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Make this process one rank of many in this context. Collectives trace, but send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Columns(torch.autograd.Function):
    """The input of a linear layer that is split by columns: summed over ranks in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ops.wait_tensor(ops.all_reduce(gradient, "sum", "0"))


class Rows(torch.autograd.Function):
    """The output of a linear layer that is split by rows: summed over ranks in forward."""

    @staticmethod
    def forward(ctx, x):
        return ops.wait_tensor(ops.all_reduce(x, "sum", "0"))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def layers(x, *weights):
    """Layers of two matmuls, of which each rank has a part of the columns, and of the rows."""
    for w, v in zip(weights[::2], weights[1::2], strict=True):
        x = x + Rows.apply((Columns.apply(x) @ w).relu() @ v)
    return x
