"""Scaled matmuls in chunks of rows: each row is scaled by its own number, or all by one."""

from __future__ import annotations

import pytest
import torch
from everywhere import everywhere
from functional_ops import ag, rs
from graphs import trace

import commpass
from commpass.passes.fx.rowwise import Axis, matmul_rows
from commpass.policy import Policy
from commpass.policy.rules import Rule

E4M3 = torch.float8_e4m3fn
M, K, N = 128, 64, 48


def inputs(rank: int, scale: torch.Tensor) -> list[torch.Tensor]:
    own, same = (torch.Generator().manual_seed(seed) for seed in (rank, 7))
    codes = torch.randn(M, K, generator=own).to(E4M3)
    weight = torch.randn(N, K, generator=same).to(E4M3)
    columns = torch.rand(1, N, generator=same) if scale.dim() else torch.tensor(0.5)
    return [codes, weight, scale, columns, torch.ones(1 << 16)]


def scattered(codes, weight, scale, columns, room):
    product = torch._scaled_mm(codes, weight.t(), scale, columns, out_dtype=torch.bfloat16)
    return rs(product), room.repeat(4)


def gathered(codes, weight, scale, columns, room):
    tokens = ag(codes.view(torch.uint8)).view(E4M3)
    scales = ag(scale) if scale.dim() else scale
    return torch._scaled_mm(tokens, weight.t(), scales, columns), room.repeat(4)


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.rand(M, 1)], ids=["one", "rows"])
def test_scaled_matmul_before_a_scatter_runs_in_chunks_with_the_same_bits(scale):
    given = [inputs(rank, scale) for rank in range(2)]
    found = everywhere(lambda rank: scattered, given, Policy(rows=2, more_memory=10.0))
    for plan in found.plans:
        assert [len(step.into) for step in plan.split] == [2]
        assert {(site.kind, site.dtype) for site in plan} == {("reduce_scatter", "bfloat16")}
        assert sum(site.wire_bytes for site in plan) == 2 * M * N
    for one, other in found.pairs:
        assert torch.equal(one, other)


def test_scaled_matmul_after_a_gather_runs_in_chunks_with_the_same_bits():
    given = [inputs(rank, torch.tensor(0.25)) for rank in range(2)]
    rules = [Rule(kind="all_gather", rows=2)]
    policy = Policy(rules=rules, more_memory=10.0)
    found = everywhere(lambda rank: gathered, given, policy)
    assert all(len(plan.split) == 1 for plan in found.plans)
    for one, other in found.pairs:
        assert torch.equal(one.float(), other.float())


def test_cost_model_sends_a_chunk_while_a_scaled_matmul_computes_the_next(fake_group):
    fake_group(2)
    given = [
        *(torch.empty(2048, 2048).to(E4M3) for _ in range(2)),
        *(torch.ones(()), torch.ones(()), torch.empty(1 << 22)),
    ]
    gm = trace(scattered, *given)
    plan = commpass.rewrite(gm, given, Policy(), profile=commpass.ethernet(0.1))
    assert len(plan.split) == 1


def test_scales_in_the_order_of_hardware_are_not_cut():
    """A block of scales of 8 bits is stored by another order than that of the rows."""
    scale, columns = (torch.full((size, 4), 127, dtype=torch.uint8) for size in (M, N))
    graph = torch.fx.Graph()
    values = {
        "codes": torch.empty(M, 4 * 32).to(E4M3),
        "weight": torch.empty(N, 4 * 32).to(E4M3).t(),
        "scale": scale.view(torch.float8_e8m0fnu),
        "columns": columns.view(torch.float8_e8m0fnu),
    }
    nodes = [graph.placeholder(name) for name in values]
    for node in nodes:
        node.meta["val"] = values[node.name]
    product = graph.call_function(torch.ops.aten._scaled_mm.default, tuple(nodes))
    product.meta["val"] = torch.empty(M, N)
    assert matmul_rows(product) is None
    values["scale"] = nodes[2].meta["val"] = torch.ones(M, 1)
    rows = matmul_rows(product)
    assert rows is not None
    assert rows.takes == (Axis(0), None, Axis(0), None)
