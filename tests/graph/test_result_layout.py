"""Results of rewritten collectives have the same memory layout as those of plain ones."""

from __future__ import annotations

import pytest
import torch
from functional_ops import ag, ar, rs
from graphs import as_rank, trace

import commpass
from commpass import Policy, Rule

SHAPES = [(6, 17), (1, 17, 1), (2, 384), (1, 1)]
"""Shapes of whole blocks, and those that a codec pads and cuts again."""


@pytest.mark.few(12)
@pytest.mark.parametrize("codec", ["int8", "rotated", "raw", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("collective", [ar, ag, rs])
def test_result_is_contiguous_so_that_a_view_may_follow(collective, shape, codec):
    rows = 2 * shape[0] if collective is rs else shape[0]
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
