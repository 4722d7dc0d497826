"""vLLM's operators on real ranks, compiled by Inductor with the pass in its post-grad slot."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import commpass
from commpass.costmodel import KernelRate, Kernels, Link, Profile
from commpass.errors import CommpassError
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
SHAPE = (96, 256)
INT8 = Policy(rules=[Rule(codec="int8", force=True)], skip=("chunk", "group"))
KEPT = Policy(rules=[Rule(keep=True)])


def world(name: str) -> dist.ProcessGroup:
    return dist.group.WORLD


def brought(rank: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def compared(policies: list[Policy], salt: float, failing: int = -1) -> str:
    """Return the error of a sum for which each rank has a policy of its own, or "".

    The pass fails on rank ``failing``.
    """
    from serve_vllm import define_operators

    from commpass.parallel.vllm import SLOT, CollectivePass

    rank = dist.get_rank()
    with torch.library._scoped_library("vllm", "FRAGMENT") as library:
        define_operators(library)
        torch._dynamo.reset()
        own = CollectivePass(policies[rank], groups=world, strict=rank != failing)
        if rank == failing:
            own._rewritten = lambda *_: 1 // 0
        compiled = torch.compile(
            lambda x: torch.ops.vllm.all_reduce(x * 1.0, "tp:0") * salt, options={SLOT: own}
        )
        with torch.inference_mode():
            try:
                for _ in range(2):
                    compiled(brought(rank))
            except CommpassError as error:
                return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_ranks_with_different_policies_raise_before_they_send(ranks2):
    salt = random.random()
    one = Policy(rules=[Rule(codec="int8", force=True)], name="one", skip=("chunk", "group"))
    two = Policy(rules=[Rule(codec="int4", force=True)], name="two", skip=("chunk", "group"))
    assert ranks2.run(compared, [one, one], salt) == ["", ""]
    assert ranks2.run(compared, [one, one], salt) == ["", ""]  # from Inductor's cache
    for text in ranks2.run(compared, [one, two], random.random(), timeout=120):
        assert text.startswith("PlanMismatch")
        assert "rank 0: policy 'one'" in text
        assert "rank 1: policy 'two'" in text


@pytest.mark.slow
def test_pass_that_fails_on_one_rank_raises_on_all(ranks2):
    one = Policy(rules=[Rule(codec="int8", force=True)], name="one", skip=("chunk", "group"))
    for text in ranks2.run(compared, [one, one], random.random(), 1, timeout=60):
        assert text.startswith("PlanMismatch")
        assert "rank 0: policy 'one': 1 of 1 site compressed" in text
        assert "rank 1: policy 'one': untouched, ZeroDivisionError" in text


@pytest.mark.slow
def test_rank_that_compresses_nothing_is_compared(ranks2):
    one = Policy(rules=[Rule(codec="int8", force=True)], name="one", skip=("chunk", "group"))
    for text in ranks2.run(compared, [one, KEPT], random.random(), timeout=60):
        assert text.startswith("PlanMismatch")


def served(policies: list[Policy], salt: float) -> list[tuple]:
    """Return for each policy the results and the plans.

    The results are the sum of the ranks' inputs, and its sines, scattered and gathered. ``salt``
    distinguishes the graph from those in Inductor's cache.
    """
    from serve_vllm import define_operators

    from commpass.parallel.vllm import SLOT, CollectivePass

    ops = torch.ops.vllm

    def around(x):
        total = ops.all_reduce(x * 1.0, "tp:0")
        part = ops.reduce_scatter(total.sin(), 0, 2, "tp:0")
        return total, ops.all_gather(part * 1.0, 0, 2, "tp:0"), x * salt

    found = []
    with torch.library._scoped_library("vllm", "FRAGMENT") as library:
        define_operators(library)
        for policy in policies:
            torch._dynamo.reset()
            seen = len(commpass.plans())
            own = CollectivePass(policy, groups=world, strict=True)
            compiled = torch.compile(around, options={SLOT: own}, fullgraph=True)
            with torch.inference_mode():
                total, gathered, _ = compiled(brought(dist.get_rank()))
            found.append((total, gathered, commpass.plans()[seen:]))
    return found


@pytest.mark.every
def test_collectives_of_vllms_at_inductors_slot(ranks2):
    told = ranks2.run(served, [INT8, KEPT, INT8], random.random())
    coded, kept, again = told[0]
    for mine, other in zip(told[0], told[1], strict=True):  # replicas
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])

    total, gathered, [plan] = coded
    exact = sum(brought(rank).double() for rank in range(2))
    steps = [max(brought(rank).abs().max() for rank in range(2)) / 127, 1 / 127, 2 / 127]
    assert (total.double() - exact).abs().max() <= 2 * steps[0] / 2 + 1e-5
    # sines differ by no more than the sums do; two ranks' are coded, then the shards of their sums
    bound = 2 * steps[0] + 2 * steps[1] / 2 + steps[2] / 2 + 1e-4
    assert (gathered.double() - 2 * exact.sin()).abs().max() <= bound
    numel, block = SHAPE[0] * SHAPE[1], 256
    # one byte per value, and 4 per block's scale in a region of whole 128 bytes
    whole, part = (n + -(-4 * n // block // 128) * 128 for n in (numel, numel // 2))
    assert [(site.kind, site.bytes, site.wire_bytes) for site in plan] == [
        ("all_reduce", 4 * numel, whole),
        ("reduce_scatter", 4 * numel, part),  # to the other rank
        ("all_gather", 2 * numel, part),
    ]

    total, gathered, [plan] = kept  # vLLM's own operators
    assert torch.equal(total, brought(0) + brought(1))
    assert torch.allclose(gathered.double(), 2 * exact.sin(), rtol=1e-5, atol=1e-5)
    assert not plan.compressed

    assert torch.equal(again[0], coded[0])  # from the cache: the pass does not run
    assert torch.equal(again[1], coded[1])
    assert again[2] == []
    assert not torch.equal(coded[0], kept[0])


def served_by_tokens(counts: list[int], salt: float, tokens: list[int]) -> tuple[list, list]:
    """Return the errors of a sum and of a gather for each count of tokens, and the plans.

    The graph is compiled once for all counts.
    """
    from serve_vllm import define_operators

    from commpass.parallel.vllm import SLOT, CollectivePass

    ops, found = torch.ops.vllm, []

    def around(x):
        own = x * 1.0
        total = ops.all_reduce(own, "tp:0")
        return total * salt, ops.all_gather(x * 2.0, 0, 2, "tp:0").sin(), own

    def given(rank: int, count: int) -> torch.Tensor:
        return torch.randn(count, 256, generator=torch.Generator().manual_seed(rank + 7 * count))

    profile = Profile("far", Link(1000.0, 0.1), kernels=Kernels(600.0, KernelRate(0.1, 0.1)))
    policy = Policy(codecs="int8", max_error=1.0, skip=("chunk", "group"))
    with torch.library._scoped_library("vllm", "FRAGMENT") as library:
        define_operators(library)
        torch._dynamo.reset()
        own = CollectivePass(policy, profile=profile, groups=world, tokens=tokens, strict=True)
        compiled = torch.compile(around, options={SLOT: own}, fullgraph=True)
        with torch.inference_mode():
            for count in counts:
                inputs = [given(rank, count) for rank in range(2)]
                torch._dynamo.mark_dynamic(inputs[dist.get_rank()], 0)
                total, gathered, sent = compiled(inputs[dist.get_rank()])
                assert torch.equal(sent, inputs[dist.get_rank()])  # stays what it was
                exact = [sum(inputs) * salt, torch.cat(inputs).mul(2.0).sin()]
                pairs = zip((total, gathered), exact, strict=True)
                found.append([float((one - other).abs().max()) for one, other in pairs])
    return found, own.plans


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [[1, 512], [1, 16, 512]])
def test_steps_of_few_tokens_run_the_decisions_for_few(ranks2, tokens):
    """A kernel takes 600 us, and the bytes of 512 tokens 5,243 us. Those of 16 tokens take 164 us,
    so nothing is coded for them. The graph was compiled for 600."""
    counts = [600, 2, 22, 90, 500]
    for found, plans in ranks2.run(served_by_tokens, counts, random.random(), tokens):
        assert [len(plan.compressed) for plan in plans] == [0] * (len(tokens) - 1) + [2]
        few = 22 if len(tokens) == 2 else 90
        for count, errors in zip(counts, found, strict=True):
            assert [error > 1e-5 for error in errors] == [count > few] * 2, (count, errors)


@pytest.mark.slow
def test_equal_decisions_for_all_numbers_of_tokens_make_no_branches(ranks2):
    for found, plans in ranks2.run(served_by_tokens, [600, 2], random.random(), [400, 512]):
        assert [len(plan.compressed) for plan in plans] == [2]
        assert all(error > 1e-5 for errors in found for error in errors)


@pytest.mark.slow
def test_ranks_with_other_numbers_of_tokens_raise_before_they_send(ranks2):
    """Their decisions are the same, but a step of 30 tokens would run other branches."""
    for text in ranks2.run(mixed_tokens, random.random(), timeout=120):
        assert text.startswith("PlanMismatch")
        assert "for 2 tokens" in text


def mixed_tokens(salt: float) -> str:
    try:
        served_by_tokens([600], salt, [[1, 512], [2, 512]][dist.get_rank()])
    except CommpassError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_branches_from_inductors_cache_give_the_same(ranks2):
    salt, counts = random.random(), [600, 2, 22, 23]
    first = ranks2.run(served_by_tokens, counts, salt, [1, 512])
    again = ranks2.run(served_by_tokens, counts, salt, [1, 512])
    for (found, plans), (cached, none) in zip(first, again, strict=True):
        assert (cached, none) == (found, [])
        assert len(plans) == 2
