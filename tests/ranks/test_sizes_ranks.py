"""Graphs of symbolic sizes on real ranks: all pass the size from which codes gain together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiers import rarely

import commpass
from commpass.policy import Policy

ops = torch.ops._c10d_functional
WIDTH = 64


def sizes_change(inner: str) -> None:
    from counting import counting_group

    torch._dynamo.reset()
    group = counting_group()
    rank, size, name = dist.get_rank(), dist.get_world_size(), group.group_name
    policy = Policy(codecs="int8", algorithms="two_shot", max_error=0.05)
    backend = commpass.backend(
        policy, inner=inner, profile=commpass.ethernet(1), strict=True, timeout=60
    )

    def function(x, w):
        return torch.relu(ops.wait_tensor(ops.all_reduce(x @ w, "sum", name)))

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    before = len(commpass.plans())
    for rows in (8, 2048, 12, 1024, 4, 4096):
        seeds = [torch.Generator().manual_seed(100 * rows + each) for each in range(size)]
        every = [torch.randn(rows, WIDTH, generator=seed) for seed in seeds]
        w = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
        x, weight = every[rank].clone(), w.clone().requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x, weight)
        group.seen.clear()
        got = compiled(x, weight)
        sent = {dtype for _, dtype, _ in group.seen}
        exact = torch.relu(torch.stack([each.double() @ w.double() for each in every]).sum(0))
        off = float((got.double() - exact).norm() / exact.norm())
        if rows <= 12:
            assert off < 1e-6
            assert sent == {torch.float32}
        else:
            assert 1e-6 < off < 0.02
            assert sent == {torch.uint8}
        got.sum().backward()
        assert weight.grad is not None
        assert weight.grad.isfinite().all()
    plans = commpass.plans()[before:]
    assert [(plan.direction, site.codec) for plan in plans for site in plan] == [
        ("forward", "none"),
        ("backward", "none"),
        ("forward", "int8"),
        ("backward", "int8"),
    ]


@pytest.mark.parametrize("inner", ["eager", rarely("inductor")])
def test_each_size_is_sent_by_the_graph_that_is_right_for_it(inner, ranks2):
    ranks2.run(sizes_change, inner)
