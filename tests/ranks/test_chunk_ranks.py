"""Sums in chunks of rows on real ranks: the same values as without chunks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from graphs import layers, ops
from tiers import rarely

import commpass

pytestmark = pytest.mark.xdist_group("ranks")
wait = ops.wait_tensor


def block(x, w, residual, weight, w2, scale=1.0):
    """The end of one half of a tensor-parallel layer, and the beginning of the next."""
    h = residual + wait(ops.all_reduce(x @ w, "sum", "0"))
    return h, (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + scale) * weight) @ w2


def whole(*shape, seed):
    """Return values whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def inputs(m: int = 512, n: int = 128) -> list[torch.Tensor]:
    rank = dist.get_rank()
    shapes = [(m, n), (n, n), (m, n), (n,), (n, n)]
    seeds = [10 + rank, 20 + rank, 30, 40, 50]
    return [whole(*shape, seed=seed) for shape, seed in zip(shapes, seeds, strict=True)]


def shards(x, w, residual, weight, w2):
    """Like ``block``, but each rank has some of the rows between the halves."""
    y = wait(ops.reduce_scatter_tensor(x @ w, "sum", 2, "0"))
    h = residual[: y.shape[0]] + y
    normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1.0) * weight
    later = x.repeat(16, 1)  # a higher peak, compared with which chunks do not count
    return h, wait(ops.all_gather_into_tensor(normed, 2, "0")) @ w2, later


def results(rows: int, function=block, **rule) -> tuple[list[torch.Tensor], commpass.Plan]:
    torch._dynamo.reset()
    policy = commpass.Policy(rules=[commpass.Rule(rows=rows, **rule)], more_memory=1.0)
    backend = commpass.backend(policy, profile="ethernet-1g", strict=True)
    with torch.no_grad():
        found = torch.compile(function, backend=backend, dynamic=False)(*inputs())
    return list(found), commpass.plans()[-1]


def check_shards(rule: dict) -> None:
    expected, _ = results(1, shards, **rule)
    found, plan = results(2, shards, **rule)
    kinds = [site.kind for site in plan]
    assert kinds == ["reduce_scatter"] * 2 + ["all_gather"] * 2, [site.reason for site in plan]
    assert {site.codec for site in plan} == {rule.get("codec", "none")}
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def check_values(rule: dict) -> None:
    expected, plan = results(1, **rule)
    assert not plan.split
    for rows in (2, 4):
        found, plan = results(rows, **rule)
        assert not plan.fallback
        assert [len(step.into) for step in plan.split] == [rows]
        assert {site.codec for site in plan} == {rule.get("codec", "none")}
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
    own = inputs()
    total = (own[0] @ own[1]).double()
    dist.all_reduce(total)
    error = (found[0] - own[2] - total).norm() / total.norm()
    assert error == 0 if not rule else error < 0.02


INT8 = {"codec": "int8", "algorithm": "two_shot", "force": True, "chunks": 1}
FORMS = [rarely({**INT8, "lowering": form}, id=f"int8-{form}") for form in ("inline", "kernel")]
"""The form is part of the rule, since a norm in the kernel that decodes rounds differently than
Inductor's."""


@pytest.mark.parametrize("rule", [rarely({}, id="plain"), *FORMS])
def test_chunks_of_rows_give_the_same_bits(rule, ranks2):
    ranks2.run(check_values, rule, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [pytest.param({}, id="plain"), rarely(INT8, id="int8")])
def test_shards_in_chunks_give_the_same_bits(rule, ranks2):
    rule = {key: value for key, value in rule.items() if key != "algorithm"}
    ranks2.run(check_shards, rule, timeout=280)


def check_alone() -> None:
    """One rank recompiles, for another number in its program, and goes on alone."""
    policy = commpass.Policy(rows=2)
    backend = commpass.backend(policy, profile="ethernet-1g", strict=True)
    compiled = torch.compile(block, backend=backend, dynamic=False)
    rank = dist.get_rank()
    for scale in (1.0, 1.0 + rank, 1.0):
        with torch.no_grad():
            h, _ = compiled(*inputs(), scale)
        (step,) = commpass.plans()[-1].split
        assert step.rows == (256, 256)
        own = inputs()
        total = own[0] @ own[1]
        dist.all_reduce(total)
        assert torch.equal(h, own[2] + total)


@pytest.mark.slow
def test_rank_that_compiles_alone_keeps_the_chunks(ranks2):
    ranks2.run(check_alone, timeout=280)


def check_differently() -> None:
    """Ranks with different policies report it."""
    rows = 2 + 2 * dist.get_rank()
    backend = commpass.backend(commpass.Policy(rows=rows), profile="ethernet-1g", strict=True)
    compiled = torch.compile(block, backend=backend, dynamic=False)
    with torch.no_grad(), pytest.raises(commpass.PlanMismatch, match="rows 256"):
        compiled(*inputs())


def test_ranks_that_split_differently_say_so(ranks2):
    ranks2.run(check_differently, timeout=280)


def gradients(rows: int) -> tuple[list[torch.Tensor], list[commpass.Plan]]:
    """Return the result and all gradients of two layers, and the plans of their graphs."""
    torch._dynamo.reset()
    rank, known = dist.get_rank(), len(commpass.plans())
    x = whole(512, 128, seed=1).requires_grad_()
    weights = [whole(128, 128, seed=10 * n + rank).div_(64).requires_grad_() for n in range(4)]
    backend = commpass.backend(commpass.Policy(rows=rows), profile="ethernet-1g", strict=True)
    y = torch.compile(layers, backend=backend, dynamic=False)(x, *weights)
    y.sum().backward()
    return [y.detach(), x.grad, *(w.grad for w in weights)], commpass.plans()[known:]


def check_training() -> None:
    expected, plain = gradients(1)
    found, plans = gradients(2)
    assert not any(plan.split for plan in plain)
    split = {plan.direction: len(plan.split) for plan in plans}
    assert split == {"forward": 2, "backward": 2}
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.every
def test_training_step_in_chunks_of_rows(ranks2):
    ranks2.run(check_training, timeout=280)
