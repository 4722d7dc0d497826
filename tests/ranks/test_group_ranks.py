"""group on real ranks: the bits of the ungrouped graph, and fewer collectives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from counting import counting_group
from tiers import rarely
from torch import nn

import commpass
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
wait = ops.wait_tensor
FAST = commpass.ethernet(10)


def starts(size, group):
    """Return functions by kind that start it."""
    return {
        "all_reduce": lambda x: ops.all_reduce(x, "sum", group),
        "largest": lambda x: ops.all_reduce(x, "max", group),
        "all_gather": lambda x: ops.all_gather_into_tensor(x, size, group),
        "reduce_scatter": lambda x: ops.reduce_scatter_tensor(x, "avg", size, group),
    }


def kinds(inner):
    """Return the results of every kind, plain and grouped, with the sums in float64."""
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name
    x = torch.randn(4 * size, 4 * size, generator=torch.Generator().manual_seed(rank))
    results = {}
    for kind, start in starts(size, group).items():

        def function(x, start=start):
            begun = [start(each) for each in (x * 2, x.t() * 3, x[:, :3] * 5)]
            return [wait(each) * (1 + n // 2) for n, each in enumerate(begun)] + [x + 1]

        got = []
        for policy in (Policy(group_bytes=0), Policy()):
            torch._dynamo.reset()
            backend = commpass.backend(policy, inner=inner, profile=FAST, strict=True)
            with torch.no_grad():
                got.append(torch.compile(function, backend=backend, fullgraph=True)(x))
        plan = commpass.plans()[-1]
        assert [len(each.sites) for each in plan.grouped] == [3], (kind, plan)
        with torch.no_grad():
            got.append(function(x.double()))
        results[kind] = got
    return results


@pytest.mark.every
@pytest.mark.parametrize(("size", "inner"), [(2, "inductor"), (4, "eager")])
def test_every_kind_gives_the_bits_of_the_ungrouped_graph_or_another_order_of_a_sum(
    size, inner, request
):
    everybody = request.getfixturevalue(f"ranks{size}").run(kinds, inner)
    for results in everybody:
        for kind, (plain, fused, exact) in results.items():
            for one, other, wide in zip(plain, fused, exact, strict=True):
                assert (one.shape, one.stride(), one.dtype) == (
                    other.shape,
                    other.stride(),
                    other.dtype,
                )
                if kind in ("largest", "all_gather") or size == 2:  # two addends have one order
                    assert torch.equal(one, other), kind
                # At most size roundings of sums below size * 5 * 8.
                bound = size * size * 40 * torch.finfo(torch.float32).eps
                assert (other - wide).abs().max() <= bound, kind
    for kind in ("all_reduce", "largest", "all_gather"):
        first, *others = (results[kind][1][:3] for results in everybody)
        assert all(all(map(torch.equal, first, other)) for other in others), kind


class Reduced(torch.autograd.Function):
    """A parameter whose gradient is the mean over the ranks, as in DDP."""

    @staticmethod
    def forward(ctx, parameter, group):
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        return wait(ops.all_reduce(gradient.contiguous(), "avg", ctx.group)), None


class Replica(nn.Module):
    """Many small layers, with each parameter reduced separately."""

    def __init__(self, group, depth=8, width=16):
        super().__init__()
        self.group = group
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            weight, bias = (Reduced.apply(p, self.group) for p in (layer.weight, layer.bias))
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return x


def gradients(policies, inner):
    """Return for each policy: loss and gradients of a step, executed collectives, and the plan of
    backward."""
    counting = counting_group()
    torch.manual_seed(0)
    model = Replica(counting.group_name)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for policy in policies:
        torch._dynamo.reset()
        backend = commpass.backend(policy, inner=inner, profile=FAST, strict=True)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        model.zero_grad()
        counting.seen.clear()
        loss = compiled(x).square().mean()
        loss.backward()
        given = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        found.append((given, Counter(kind for kind, *_ in counting.seen), commpass.plans()[-1]))
    return found


@pytest.mark.every
@pytest.mark.parametrize("size", [2, rarely(4)])
def test_gradients_of_many_small_layers_travel_together(size, request):
    policies = [Policy(group_bytes=0), Policy(), Policy(group_delay=99)]
    everybody = request.getfixturevalue(f"ranks{size}").run(gradients, policies, "eager")
    for found in everybody:
        (plain, alone, _), (fused, paired, plan), (_, one, _) = found
        assert alone["all_reduce"] == 16
        assert paired["all_reduce"] == len(plan.sites) <= 8
        assert one["all_reduce"] == 1
        for a, b in zip(plain, fused, strict=True):
            if size == 2:
                assert torch.equal(a, b)
            else:
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    first, *others = (found[1][0][1:] for found in everybody)
    assert all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.every
def test_grouped_gradients_are_compressed_as_their_blocks_would_be_alone(ranks2):
    rules = [Rule(codec="int8", algorithm="two_shot", force=True)]
    policies = [Policy(rules=rules, group_bytes=n) for n in (0, 1 << 18)]
    for (plain, alone, _), (fused, many, plan) in ranks2.run(gradients, policies, "eager"):
        assert sum(many.values()) < sum(alone.values())
        assert all(site.codec == "int8" for site in plan)
        assert all(map(torch.equal, plain, fused))


def disagree():
    """One rank groups and the other does not: then none may."""
    group, rank = dist.group.WORLD.group_name, dist.get_rank()
    policy = Policy(group_bytes=(1 << 18) * rank)

    def function(x):
        begun = [ops.all_reduce(x * n, "sum", group) for n in (2, 3)]
        return [wait(each) for each in begun]

    backend = commpass.backend(policy, inner="eager", profile=FAST, timeout=20)
    got = torch.compile(function, backend=backend)(torch.ones(64))
    plan = commpass.plans()[-1]
    return [float(each[0]) for each in got], plan.fallback, len(plan.grouped)


def test_graph_whose_only_change_is_a_group_is_agreed_on(ranks2):
    (first, _, none), (second, why, nothing) = ranks2.run(disagree)
    assert first == second == [4.0, 6.0]
    assert none == nothing == 0
    assert "rank 0 changes nothing" in why
