"""Results of rewritten collectives have the same memory layout as those of plain ones."""

from __future__ import annotations

import pytest
import torch
from graphs import as_rank, ops, trace

import commpass
from commpass import Policy, Rule

SHAPES = [(6, 17), (1, 17, 1), (2, 384), (1, 1)]
"""Shapes of whole blocks, and those that a codec pads and cuts again."""


def all_reduce(x):
    return ops.wait_tensor(ops.all_reduce(x, "sum", "0"))


def all_gather(x):
    return ops.wait_tensor(ops.all_gather_into_tensor(x, 2, "0"))


def reduce_scatter(x):
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", 2, "0"))


@pytest.mark.few(12)
@pytest.mark.parametrize("codec", ["int8", "rotated", "raw", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("collective", [all_reduce, all_gather, reduce_scatter])
def test_result_is_contiguous_so_that_a_view_may_follow(collective, shape, codec):
    rows = 2 * shape[0] if collective is reduce_scatter else shape[0]
    with as_rank(0, 2):
        x = torch.randn(rows, *shape[1:])
        gm = trace(lambda x: collective(x).view(-1), x)
        policy = Policy(rules=[Rule(codec=codec, force=True)], skip=("simplify", "group"))
        (site,) = commpass.rewrite(gm, (x,), policy, strict=True).sites
        assert site.codec == codec
        (view,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)[-1:]
        given = view.args[0].meta["val"]
        assert given.is_contiguous()
        assert gm(x).shape == (view.meta["val"].numel(),)
