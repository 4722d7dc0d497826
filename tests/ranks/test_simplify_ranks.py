"""simplify on real ranks: the numbers of the unsimplified graph, bit for bit if that is
guaranteed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiers import rarely

import commpass
from commpass.passes.simplify import RULES
from commpass.policy import Policy

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
wait = ops.wait_tensor


def cases(size: int, rank: int, group: str):
    """rule -> function of a tensor with ``size * 6`` rows."""

    def ar(x, op="sum"):
        return wait(ops.all_reduce(x, op, group))

    def ag(x):
        return wait(ops.all_gather_into_tensor(x, size, group))

    def rs(x, op="sum"):
        return wait(ops.reduce_scatter_tensor(x, op, size, group))

    def a2a(x):
        return wait(ops.all_to_all_single(x, [6] * size, [6] * size, group))

    def codes(x, dim=None):
        top = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
        scale = 100.0 / top.clamp(min=1e-12)
        return (x * scale).round().to(torch.int8).contiguous(), scale.reciprocal()

    def twice(x, collective):
        return collective(x) * collective(x)

    return {
        "same": lambda x: twice(x.sin(), ar) + x,
        "sum of sums": lambda x: (
            3 * ar(x.sin()) - ar(x.cos()) / 7 + ar(x.exp()).view(-1).view(size * 6, 5) + rs(ag(x))
        ),
        "scattered": lambda x: (
            ar(x.sin(), "avg")[rank * 6 : rank * 6 + 6] + 1,
            ar(x.cos()).t().chunk(size, 1)[rank] + 1,
            (ar(x.exp()[:, : size * 1]) * 3).split(1, 1)[rank] + 1,
        ),
        "gather of scatter": lambda x: ag(rs(x.sin())) + 1,
        "own part": lambda x: (
            ag(x.sin())[rank * size * 6 : (rank + 1) * size * 6] + 1,
            torch.cat(ag(x.cos()).chunk(size), 1).split(5, 1)[rank] + 1,
        ),
        "gather then narrow": lambda x: (
            ag(x.sin()).bfloat16() + 1,
            a2a(x.sin()).half() + 1,
            (ag(x.cos()) * 3).view(-1).bfloat16() + 1,
        ),
        "quantised before gather": lambda x: (
            *codes(ag(x.sin())),
            *codes(a2a(x.cos()), -1),
            *codes(ag(x.exp()).t(), 0),
        ),
        "quantised in 16 bits before gather": lambda x: codes(ag(x.sin().bfloat16()), -1),
        "widen then gather": lambda x: (
            ag((x.bfloat16() * 2).float()) + 1,
            a2a((x.half() * 2).double()) + 1,
            ag((x.bfloat16() * 2).float().t().contiguous()) + 1,
        ),
        "gather of expand": lambda x: (
            ag(x[:1].sin().expand(7, 5).contiguous()) + 1,
            ag(x[:, :1].sin().expand(size * 6, 5).contiguous()) + 1,
            ag(torch.full((3, 5), float(rank))) + 1,
        ),
        "widen then reduce": lambda x: (
            rs((x.bfloat16() * 2).float(), "avg") + 1,
            rs((x[: 2 * size, :4].bfloat16() * 2).float().t().reshape(2 * size, 4) * 0.3) + 1,
            ar((x.half() * 2).float()) + 1,
        ),
        "expand": lambda x: ar(x[:1].sin().expand(7, 5)) + 1,
        "constant": lambda x: (
            ar(torch.zeros(4, 5)) + x[:4],
            ar(torch.full((4, 5), float(rank + 1))) + x[:4],
        ),
    }


def compare() -> set[str]:
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name
    exact = {rule.name: rule.exact for rule in RULES}
    x = torch.randn(size * 6, 5, generator=torch.Generator().manual_seed(rank))
    met: set[str] = set()
    for name, function in cases(size, rank, group).items():
        results = []
        for policy in (Policy(skip="simplify"), Policy(reassociate=not exact[name])):
            torch._dynamo.reset()
            backend = commpass.backend(
                policy, inner="eager", profile=commpass.ethernet(0.001), strict=True
            )
            with torch.no_grad():
                got = torch.compile(function, backend=backend, fullgraph=True)(x)
            results.append(got if isinstance(got, tuple) else (got,))
        rules = {step.rule for step in commpass.plans()[-1].simplified}
        assert name in rules, (name, rules)
        met |= rules
        for plain, simple in zip(*results, strict=True):
            assert (plain.shape, plain.dtype) == (simple.shape, simple.dtype), name
            if exact[name]:
                assert torch.equal(plain, simple), name
            else:  # one rounding of a sum of at most 3 * size addends below 32
                assert (plain - simple).abs().max() <= 3 * size * 32 * torch.finfo(
                    torch.float32
                ).eps, name
    return met


def uneven() -> list[str]:
    """Tokens sent in narrow form (rank 0 has none), and a parameter gathered twice around a batch
    whose size differs by rank."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    sends = [[0, 0], [3000, 2]]

    def function(x, shard):
        back = [row[rank] for row in sends]
        tokens = wait(ops.all_to_all_single((x * 2).float(), back, sends[rank], group))
        weight = wait(ops.all_gather_into_tensor(shard * 1, 2, group))
        hidden = (tokens @ weight).relu()
        return hidden @ wait(ops.all_gather_into_tensor(shard * 1, 2, group)).t()

    x = torch.randn(sum(sends[rank]), 64, generator=torch.Generator().manual_seed(rank)).bfloat16()
    shard = torch.randn(32, 16, generator=torch.Generator().manual_seed(9 + rank))
    results = []
    for policy in ("off", "lossless"):
        torch._dynamo.reset()
        profile = commpass.ethernet(10)
        backend = commpass.backend(policy, inner="eager", profile=profile, strict=True)
        with torch.no_grad():
            results.append(torch.compile(function, backend=backend, fullgraph=True)(x, shard))
    assert torch.equal(*results)
    return [step.rule for step in commpass.plans()[-1].simplified]


@pytest.mark.slow
def test_ranks_with_unequal_batches_and_no_tokens_simplify_alike(ranks2):
    first, second = ranks2.run(uneven)
    assert first == second == ["same", "widen then gather"]


def own_numbers() -> None:
    """Results of collectives that each rank scales by a different number."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    k, even = 0.5 + 2.0 * rank, [4, 4]

    def function(x):
        gathered = wait(ops.all_gather_into_tensor(x, 2, group))
        sent = wait(ops.all_to_all_single(x, even, even, group))
        summed = wait(ops.all_reduce(x.sin(), "sum", group))
        return (
            (gathered * k).bfloat16(),
            -(sent.view(-1) / k).half(),
            summed * k + wait(ops.all_reduce(x.cos(), "sum", group)),
        )

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    expected = function(x)
    torch._dynamo.reset()
    backend = commpass.backend("lossless", inner="eager", profile=commpass.ethernet(0.001))
    with torch.no_grad():
        got = torch.compile(function, backend=backend, fullgraph=True)(x)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_ranks_may_scale_by_numbers_of_their_own(ranks2):
    ranks2.run(own_numbers)


@pytest.mark.every
@pytest.mark.parametrize("size", [rarely(2), 3])
def test_every_rule_gives_the_numbers_of_the_unsimplified_graph(size, request):
    (met, *rest) = request.getfixturevalue(f"ranks{size}").run(compare)
    assert all(other == met for other in rest)
    more_ranks, on_request = {"waits", "alone", "nested groups"}, {"sequence parallel"}
    elsewhere = {"as bytes"}  # gloo cannot run the other graph: test_torchao_ranks.py
    assert met >= {rule.name for rule in RULES} - more_ranks - on_request - elsewhere
