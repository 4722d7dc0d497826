"""An agreed plan does not answer for another graph, even if its digest is the same.

Ranks whose graphs differ compare them, or raise at once, and none is left in a collective.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from rank_helpers import commpass_messages
from tiers import rarely

import commpass
from commpass.distributed import agreement
from commpass.errors import PlanMismatch
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
LOSSLESS = Policy.from_preset("lossless", skip=("group",))
INT8 = Policy(name="int8", rules=[Rule(codec="int8", force=True)], skip=("group",))
OWN = 3.0
"""The number by which only the last rank scales its sum."""


def ar(x: torch.Tensor) -> torch.Tensor:
    return ops.wait_tensor(ops.all_reduce(x, "sum", dist.group.WORLD.group_name))


class Summed(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ar(gradient)


def compiler(policy: Policy, inner: str = "eager", timeout: float = 20):
    torch._dynamo.reset()
    backend = commpass.backend(policy, inner=inner, timeout=timeout)
    return lambda function: torch.compile(function, backend=backend, dynamic=False)


def inputs(rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    first, second = torch.randn(2, rows, 8, generator=generator)
    return first, second


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


# --- another function -----------------------------------------------------------------------------


def first(a, b):
    return ar(a) + ar(b)


def other_operators(a, b):
    return ar(a.sin()) + (ar(b) * OWN if is_last() else ar(b))


def same_operators(a, b):
    """On all ranks but the last, its graph is that of ``first``."""
    return ar(a) + (ar(b) * OWN if is_last() else ar(b))


def rules_of(plan) -> list[str]:
    return [step.rule for step in plan.simplified]


def plans_of_another(second, late: int, inner: str) -> tuple[bool, list[str]]:
    compiled = compiler(LOSSLESS, inner)
    a, b = inputs()
    compiled(first)(a, b)
    assert rules_of(commpass.plans()[-1]) == ["sum of sums"]
    if dist.get_rank() == late:
        time.sleep(0.5)
    found, whys = compiled(second)(a, b), commpass.plans()[-1].fallback
    return torch.equal(found, torch.compile(second, backend=inner)(a, b)), [whys]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("second", [other_operators, same_operators])
def test_function_whose_graphs_differ_is_compared_though_its_plan_was_agreed_on(
    second, late, ranks2
):
    for exact, (why,) in ranks2.run(plans_of_another, second, late, "eager", timeout=60):
        assert exact
        assert "simplified is" in why
        assert "times 3.0" in why


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_function_whose_graph_differs_on_one_rank_of_three_is_compared(inner, ranks3):
    for exact, (why,) in ranks3.run(plans_of_another, other_operators, 2, inner, timeout=60):
        assert exact
        assert "times 3.0" in why


def plans_of_another_backward() -> tuple[bool, str]:
    def one(w, a, b):
        return (Summed.apply(w) * a + Summed.apply(w) * b).sum()

    def two(w, a, b):
        scale = OWN if is_last() else 1.0
        return (Summed.apply(w) * a.sin() + Summed.apply(w * scale) * b).sum()

    compiled = compiler(LOSSLESS, "aot_eager")
    for function in (one, two):
        grads = []
        for call in (compiled(function), function):
            w = torch.ones(64, 8, requires_grad=True)
            call(w, *inputs()).backward()
            grads.append(w.grad)
        plan = next(p for p in reversed(commpass.plans()) if p.direction == "backward")
        if function is one:
            assert rules_of(plan) == ["sum of sums"]
    return torch.equal(*grads), plan.fallback


@pytest.mark.slow
def test_backward_graph_that_differs_is_compared(ranks2):
    for exact, why in ranks2.run(plans_of_another_backward, timeout=60):
        assert exact
        assert "times 3.0" in why


def kept_on_one_rank() -> tuple[bool, str]:
    """The last rank keeps uncompressed what was agreed to be compressed; the other ranks' plan is
    known site by site."""

    def two(a, b):
        if is_last():
            with commpass.keep():
                return ar(a) * ar(b)
        return ar(a) * ar(b)

    compiled = compiler(INT8)
    a, b = inputs()
    compiled(lambda a, b: ar(a) * ar(b))(a, b)
    assert len(commpass.plans()[-1].compressed) == 2
    found = compiled(two)(a, b)
    return torch.equal(found, ar(a) * ar(b)), commpass.plans()[-1].fallback


@pytest.mark.slow
def test_sites_that_one_rank_keeps_are_compressed_by_none(ranks2):
    (exact, why), (other, _) = ranks2.run(kept_on_one_rank, timeout=60)
    assert exact
    assert other
    assert "rank 1 changes nothing" in why


def of_two_groups(late: int) -> tuple[list[bool], str]:
    """Ranks 0 and 1 share one group, ranks 1 and 2 the other, in which the graphs differ."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    rank = dist.get_rank()
    mine = [groups[n].group_name for n in range(2) if rank in (n, n + 1)]

    def summed(x, name):
        return ops.wait_tensor(ops.all_reduce(x, "sum", name))

    def one(a, b):
        return [summed(a, name) + summed(b, name) for name in mine]

    def two(a, b):
        scale = OWN if is_last() else 1.0
        return [summed(a.cos(), name) + summed(b, name) * scale for name in mine]

    compiled, (a, b) = compiler(LOSSLESS), inputs()
    compiled(one)(a, b)
    assert len(commpass.plans()[-1].simplified) == len(mine)
    if rank == late:
        time.sleep(0.7)
    found = compiled(two)(a, b)
    return [*map(torch.equal, found, two(a, b))], commpass.plans()[-1].fallback


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("late", [1, 2])
def test_graph_that_differs_in_one_group_is_changed_in_no_group_connected_with_it(late, ranks3):
    for exact, why in ranks3.run(of_two_groups, late, timeout=60):
        assert all(exact)
        assert "times 3.0" in why


# --- the same function ----------------------------------------------------------------------------


def by_flag(a, b, flag: bool):
    """The same code for both graphs; with the flag, the last rank uses a different number."""
    if not flag:
        return ar(a) + ar(b)
    return ar(a) + (ar(b) * OWN if is_last() else ar(b)) + 1


def compiled_again_on_all() -> str:
    compiled = compiler(LOSSLESS, timeout=3600)(by_flag)
    a, b = inputs()
    compiled(a, b, False)
    if not is_last():  # a rank that compiles the same code again goes on
        assert torch.allclose(compiled(a, b, True), ar(a + b) + 1)
        return ""
    with pytest.raises(PlanMismatch) as error:
        compiled(a, b, True)
    for _ in range(2):  # the others wait for this rank's part
        ar(a + b)
    return str(error.value)


def test_rank_that_plans_differently_than_those_that_went_on_raises_at_once(ranks2):
    _, text = ranks2.run(compiled_again_on_all)
    assert "rank 0 of group" in text
    assert "continues with plan" in text
    assert "commpass.keep" in text


def compiled_again_on_one_then_on_all() -> list[bool]:
    """What rank 0 published when it compiled alone does not hold for later calls."""

    def function(a, b, mode: int):
        if mode == 0:
            return ar(a) + ar(b)
        if mode == 1:
            return ar(a) + ar(b) + 0
        return ar(a) * ar(b) - ar(a.sin())

    compiled = compiler(LOSSLESS, timeout=30)(function)
    a, b = inputs()
    found = []
    for mode in (0, 1 - dist.get_rank(), 2):
        if mode == 2 and dist.get_rank() == 0:
            time.sleep(0.5)
        expected = function(a, b, mode)
        found.append(torch.allclose(compiled(a, b, mode), expected, rtol=1e-4, atol=1e-5))
    return found


@pytest.mark.slow
def test_note_of_a_rank_that_compiled_alone_is_no_answer_for_later_calls(ranks2):
    assert ranks2.run(compiled_again_on_one_then_on_all, timeout=60) == [[True] * 3] * 2


def new_on_one_rank(patience_s: float) -> tuple[bool, list[str]]:
    compiled = compiler(LOSSLESS)
    a, b = inputs()
    before = compiled(first)
    expected = before(a, b)
    agreement.PATIENCE_S = patience_s
    try:
        with commpass_messages() as lines:
            function = before if is_last() else compiled(lambda a, b: ar(a) + ar(b) + 0)
            return torch.equal(function(a, b), expected), lines
    finally:
        agreement.PATIENCE_S = 30.0


@pytest.mark.slow
def test_function_that_only_one_rank_compiles_goes_on_after_a_while_with_a_warning(ranks2):
    (same, (line,)), (other, none) = ranks2.run(new_on_one_rank, 0.3, timeout=60)
    assert same
    assert other
    assert "rank 1 compiled none for that call within 0.3 s" in line
    assert none == []


def new_on_all(function) -> tuple[list[str], list[str]]:
    """A second function, with the same plan on all ranks, and a time-out longer than the test."""
    compiled = compiler(INT8, timeout=600)
    agreement.PATIENCE_S = 300.0
    try:
        with commpass_messages() as lines:
            codecs = []
            for _ in range(2):
                code = function.__code__.replace(co_firstlineno=1 + len(codecs))
                other = type(function)(code, function.__globals__, function.__name__)
                compiled(other)(*inputs())
                codecs.append(commpass.plans()[-1].sites[0].codec)
        return codecs, lines
    finally:
        agreement.PATIENCE_S = 30.0


def sends(a, b):
    """Rank 0 sends to rank 1: each has different code."""
    name = dist.group.WORLD.group_name
    if dist.get_rank() == 0:
        return ops.wait_tensor(ops.isend(a * 2, 1, 7, name))
    return ops.wait_tensor(ops.irecv(torch.empty_like(b), 0, 7, name)) * 1.0


def summed(a, b):
    return ar(a * 2) + b


@pytest.mark.slow
@pytest.mark.parametrize("function", [summed, sends])
def test_new_function_with_one_plan_on_all_ranks_is_not_waited_for(function, ranks2):
    if function is sends and not hasattr(ops, "batch_p2p_ops"):
        pytest.skip("this torch has no point-to-point operators")
    for codecs, lines in ranks2.run(new_on_all, function, timeout=60):
        assert codecs == ["int8", "int8"]
        assert lines == []


# --- votes and notices of other graphs ------------------------------------------------------------


def after_one_changed_nothing(late: int) -> list[tuple[list[str], bool]]:
    """Rank 0 changes nothing of the first graph, and rank 1 would; then all change the second in
    the same way, in any order of arrival."""

    def one(a, b):
        summed = ar(a), ar(b)
        return summed if dist.get_rank() == 0 else summed[0] + summed[1]

    def two(a, b):
        return ar(a.sin()) + ar(b)

    compiled, found = compiler(LOSSLESS), []
    for function, rows in ((one, 16), (two, 32), (two, 64)):
        dist.barrier()
        if dist.get_rank() == late:
            time.sleep(0.7)
        compiled(function)(*inputs(rows))
        plan = commpass.plans()[-1]
        found.append((rules_of(plan), "rank 0 changes nothing" in plan.fallback))
    return found


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("late", [0, 1])
def test_note_about_an_unchanged_graph_does_not_hold_for_the_next(late, ranks2):
    changed = (["sum of sums"], False)
    for rank, found in enumerate(ranks2.run(after_one_changed_nothing, late, timeout=60)):
        assert found == [([], rank == 1), changed, changed]


def after_one_compiled_alone() -> str:
    """Rank 1 recompiles a graph that no rank changes; then rank 0 changes nothing of another
    one."""

    def one(a, b, more: bool):
        return (ar(a), ar(b), a + 1) if more else (ar(a), ar(b))

    def two(a, b):
        summed = ar(a), ar(b)
        return summed if dist.get_rank() == 0 else summed[0] + summed[1]

    compiled, given = compiler(LOSSLESS), inputs()
    again = compiled(one)
    again(*given, False)
    again(*given, dist.get_rank() == 1)
    compiled(two)(*given)
    return commpass.plans()[-1].fallback


def test_rank_that_compiled_alone_follows_one_that_changes_nothing(ranks2):
    assert "rank 0 changes nothing" in ranks2.run(after_one_compiled_alone, timeout=60)[1]
