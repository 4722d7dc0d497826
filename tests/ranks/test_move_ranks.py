"""Graphs with moved exchanges on real ranks: the same bits as in the program's order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from graphs import layers, ops

import commpass

pytestmark = pytest.mark.xdist_group("ranks")
wait = ops.wait_tensor


def gradients(policy: commpass.Policy, rows: int = 512) -> tuple[list[torch.Tensor], list]:
    """Return the result and all gradients of two layers, and the plans of their graphs."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(dist.get_rank())
    same = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 256, generator=same, requires_grad=True)
    weights = [
        torch.randn(256, 256, generator=generator).div_(16).requires_grad_() for _ in range(4)
    ]
    known = len(commpass.plans())
    backend = commpass.backend(policy, profile="ethernet-1g", strict=True)
    y = torch.compile(layers, backend=backend, dynamic=False)(x, *weights)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(w.grad for w in weights)], commpass.plans()[known:]


def check_bits(rule: dict) -> None:
    rules = (commpass.Rule(**rule),) if rule else ()
    found, plans = gradients(commpass.Policy(rules=rules, more_memory=2.0))
    expected, still = gradients(commpass.Policy(rules=rules, skip=("move",)))
    assert all(map(torch.equal, found, expected))
    (backward,) = (plan for plan in plans if plan.direction == "backward")
    assert sum(s.exposed_us for s in backward) < sum(s.unmoved_us for s in backward)
    assert not any(site.unmoved_us for plan in still for site in plan)


@pytest.mark.every
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({}, marks=pytest.mark.every),
        {"codec": "int8", "algorithm": "two_shot", "force": True, "chunks": 2},
    ],
    ids=["plain", "int8"],
)
def test_moved_exchanges_give_the_same_bits(rule, ranks2):
    ranks2.run(check_bits, rule, timeout=280)


def buckets(*inputs):
    """Gradients, each summed over ranks as soon as it is available."""
    return [wait(ops.all_reduce(x.t() @ x, "sum", "0")) for x in inputs]


def check_alone() -> None:
    """One rank recompiles for another batch, and starts exchanges in the agreed order."""
    rule = commpass.Rule(codec="int8", algorithm="two_shot", force=True, chunks=1)
    backend = commpass.backend(
        commpass.Policy(rules=(rule,), more_memory=2.0), profile="ethernet-1g", strict=True
    )
    compiled = torch.compile(buckets, backend=backend, dynamic=False)
    rank = dist.get_rank()
    for rows in (64, 64 + 64 * rank, 64):
        generator = torch.Generator().manual_seed(rank)
        inputs = [torch.randn(rows, 256, generator=generator) for _ in range(3)]
        with torch.no_grad():
            found = compiled(*inputs)
        assert commpass.plans()[-1].reordered
        for own, summed in zip(inputs, found, strict=True):
            every = own.double().t() @ own.double()
            dist.all_reduce(every)
            assert (summed - every).norm() < 0.05 * every.norm()


def test_rank_that_compiles_alone_keeps_the_order(ranks2):
    ranks2.run(check_alone, timeout=280)
