"""Rewritten graphs of four ranks in one process: with every algorithm each rank gets its result."""

from __future__ import annotations

import pytest
import torch
from everywhere import everywhere
from graphs import ops

import commpass

RANKS = 4
KINDS = {
    "all_reduce": lambda x: ops.all_reduce(x * 2, "sum", "0"),
    "reduce_scatter": lambda x: ops.reduce_scatter_tensor(x * 2, "avg", RANKS, "0"),
    "all_gather": lambda x: ops.all_gather_into_tensor(x * 2, RANKS, "0"),
    "all_to_all": lambda x: ops.all_to_all_single(x * 2, [2] * RANKS, [2] * RANKS, "0"),
}
SUMS = ["ring", "semi_ring", "hierarchical(node=2)"]
CASES = [("all_reduce", name) for name in ("one_shot", "two_shot", "two_shot(shards=2)", *SUMS)]
CASES += [("reduce_scatter", name) for name in ("direct", *SUMS)]
CASES += [("all_gather", "direct"), ("all_to_all", "direct")]


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "algorithm"), CASES)
def test_each_rank_gets_what_is_its(kind, algorithm):
    rule = commpass.Rule(codec="int8", algorithm=algorithm, force=True)
    inputs = [
        [torch.randn(8, 320, generator=torch.Generator().manual_seed(rank))]
        for rank in range(RANKS)
    ]
    ranks = everywhere(
        lambda rank: lambda x: ops.wait_tensor(KINDS[kind](x)) + 1,
        inputs,
        commpass.Policy(rules=[rule]),
    )
    for plan in ranks.plans:
        assert [(site.codec, site.algorithm) for site in plan] == [("int8", algorithm)]
    for plain, got in ranks.pairs:
        assert (plain.shape, plain.dtype) == (got.shape, got.dtype)
        assert 0 < (got - plain).norm() <= 0.03 * plain.norm()
    if kind in ("all_reduce", "all_gather"):  # law 1
        first, *others = (results[0] for results in ranks.got)
        assert all(torch.equal(first, other) for other in others)
