"""Law 5: all ranks make the same decision, and verify it. Law 7: if one rank cannot execute its
plan, all ranks fall back."""

from __future__ import annotations

import dataclasses
import logging
import time

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from rank_helpers import commpass_messages
from tiers import rarely

import commpass
from commpass.distributed import agreement
from commpass.distributed.parts import parts
from commpass.errors import PlanMismatch, Unanswered
from commpass.lowering import kernel
from commpass.passes import manager, rewrite
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
NEVER_S = 3600.0
"""A time-out longer than the test: whatever waits for it fails."""


def model(x: torch.Tensor, group: str | None = None) -> torch.Tensor:
    group = group or dist.group.WORLD.group_name
    return ops.wait_tensor(ops.all_reduce(x * 2, "sum", group)) + 1


def forced(codec: str) -> Policy:
    return Policy(name=codec, rules=[Rule(codec=codec, force=True)])


def compiled(policy, timeout: float = 120.0, **more):
    torch._dynamo.reset()
    return torch.compile(
        model, backend=commpass.backend(policy, inner="eager", timeout=timeout, **more)
    )


def different_policies(inner: str) -> str:
    torch._dynamo.reset()
    policy = forced(["int8", "fp8"][dist.get_rank() % 2])
    function = torch.compile(model, backend=commpass.backend(policy, inner=inner, timeout=NEVER_S))
    with pytest.raises(PlanMismatch) as error:
        function(torch.ones(500))
    with pytest.raises(PlanMismatch):  # and it remains an error
        function(torch.ones(500))
    return str(error.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("inner", ["eager", "inductor", "aot_eager"])
def test_different_policies_raise_on_every_rank_and_show_the_difference(inner, ranks2):
    for rank, text in enumerate(ranks2.run(different_policies, inner)):
        mine, theirs = ["int8", "fp8"][rank], ["int8", "fp8"][1 - rank]
        assert f"codec is '{mine}' in rank {rank} and '{theirs}' in rank {1 - rank}" in text
        assert f"policy '{mine}' on rank {rank}" in text


def one_of_three() -> str:
    with pytest.raises(PlanMismatch) as error:
        compiled(forced("int8" if dist.get_rank() < 2 else "fp8"))(torch.ones(500))
    return str(error.value)


@pytest.mark.slow
def test_one_rank_of_three_that_differs_is_named(ranks3):
    for text in ranks3.run(one_of_three):
        assert "rank 0-1: plan" in text
        assert "rank 2: plan" in text


def off_on_one_rank() -> tuple[bool, str]:
    x = torch.ones(500) / 3
    got = compiled("off" if dist.get_rank() else forced("int8"))(x)
    return torch.equal(got, model(x)), commpass.plans()[-1].fallback


def test_policy_off_on_one_rank_leaves_all_graphs_alone_with_a_reason(ranks2):
    (exact, why), (other, nothing) = ranks2.run(off_on_one_rank)
    assert exact
    assert other
    assert "rank 1 changes nothing of group" in why
    assert "its policy is 'off', here it is 'int8'" in why
    assert nothing == ""


def one_stays_away() -> str:
    if dist.get_rank() == 1:
        return ""
    start = time.monotonic()
    with pytest.raises(PlanMismatch) as error:
        compiled(forced("int8"), timeout=2)(torch.ones(500))
    assert time.monotonic() - start > 2
    return str(error.value)


@pytest.mark.slow
def test_rank_that_does_not_answer_is_an_error_within_the_time_out(ranks2):
    text = ranks2.run(one_stays_away)[0]
    assert "rank 1 of group" in text
    assert "within 2 s" in text
    assert "timeout=" in text


def first_stays_away() -> str:
    if dist.get_rank() == 0:
        return ""
    with pytest.raises(PlanMismatch) as error:
        compiled(forced("int8"), timeout=1)(torch.ones(500))
    return str(error.value)


@pytest.mark.every
def test_first_rank_may_be_the_silent_one(ranks2):
    assert "rank 0 of group" in ranks2.run(first_stays_away)[1]


def too_late() -> str:
    """Rank 1 arrives when rank 0 has given up: it learns this at once, and the next agreement is a
    new round."""
    rank = dist.get_rank()
    if rank == 1:
        dist.barrier()
    with pytest.raises(PlanMismatch) as error:
        compiled(forced("int8"), timeout=NEVER_S if rank else 1)(torch.ones(490))
    if rank == 0:
        dist.barrier()
    got = compiled(forced("int8"), timeout=120)(torch.ones(480))
    assert commpass.plans()[-1].sites[0].codec == "int8"
    assert torch.allclose(got, torch.full((480,), 5.0), atol=0.05)
    return str(error.value)


@pytest.mark.slow
def test_rank_that_is_late_gets_an_error_and_the_next_round_is_not_mixed_up_with_it(ranks2):
    silent, late = ranks2.run(too_late)
    assert "rank 1 of group" in silent
    assert "rank 0 of group" in late
    assert "gave up" in late


def asks_again() -> float:
    """Nothing is cached for a graph whose plan got no answer: the next call compiles it again."""
    torch._dynamo.reset()
    backend = commpass.backend(forced("int8"), inner="eager", timeout=2)
    function = torch.compile(model, backend=backend)
    for rank, said in enumerate(("published no plan", "gave up")):
        if dist.get_rank() == rank:
            with pytest.raises(Unanswered, match=said):
                function(torch.ones(460))
        dist.barrier()
    backend.timeout = 120  # a rank's first compilation can take longer than two seconds
    got = float(function(torch.ones(460))[0])
    assert commpass.plans()[-1].sites[0].codec == "int8"
    return got


@pytest.mark.slow
def test_rank_that_waited_in_vain_asks_again_with_the_next_call(ranks2):
    assert ranks2.run(asks_again) == pytest.approx([5.0, 5.0], abs=0.05)


def anew(folder: str) -> list[float]:
    """As after a restart in the same processes: the groups are created anew, and the same compiled
    function is called."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    torch._dynamo.reset()
    backend = commpass.backend(forced("int8"), inner="eager", timeout=2)
    function = torch.compile(lambda x: model(x, name), backend=backend)
    if rank == 0:
        with pytest.raises(PlanMismatch, match="published no plan"):
            function(torch.ones(450))
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD.group_name == name  # or Dynamo would recompile anyway
    backend.timeout = 120  # this is rank 1's first compilation, which can take longer
    got = [float(function(torch.ones(450))[0]) for _ in range(2)]
    assert commpass.plans()[-1].sites[0].codec == "int8"
    return got


@pytest.mark.slow
def test_function_goes_on_after_a_failure_with_groups_that_were_made_anew(tmp_path):
    ranks = Ranks(2)
    try:
        for got in ranks.run(anew, str(tmp_path)):
            assert got == pytest.approx([5.0, 5.0], abs=0.05)
    finally:
        ranks.stop()


def waits_with_a_line() -> tuple[list[str], float]:
    """Rank 1 arrives after rank 0 has logged that it waits, and had time to log it again."""
    lines: list[str] = []
    store = dist.distributed_c10d._get_default_store()  # a barrier would be traced

    def emit(entry: logging.LogRecord) -> None:
        if "waited" in entry.getMessage():
            lines.append(entry.getMessage())
            store.set("rank 0 waits", "")

    handler = logging.Handler()
    handler.emit = emit
    logging.getLogger("commpass").addHandler(handler)
    try:
        if dist.get_rank() == 1:
            store.wait(["rank 0 waits"])
            time.sleep(1)
        else:
            agreement.PATIENCE_S = 0.3
        compiled(forced("int8"), timeout=None)(torch.ones(470))
    finally:
        logging.getLogger("commpass").removeHandler(handler)
        agreement.PATIENCE_S = 30.0
    (part,) = parts(commpass.plans()[-1], commpass.plans()[-1].sites, ())
    return lines, agreement._timeout([part])


@pytest.mark.slow
def test_rank_that_waits_long_says_for_whom_and_waits_as_long_as_its_group_would(ranks2):
    (line, timeout), (none, _) = ranks2.run(waits_with_a_line)
    assert "for the plans of rank 1 of group" in line[0]
    assert len(line) == 1
    assert none == []
    assert timeout == 1800  # torch's default for gloo: an ordinary skew of a minute is no error


def a_late_rank() -> None:
    if dist.get_rank() == 1:
        time.sleep(3)
    assert torch.allclose(
        compiled(forced("int8"), timeout=30)(torch.ones(500)), torch.full((500,), 5.0), atol=0.05
    )


@pytest.mark.every
def test_late_rank_is_waited_for(ranks2):
    ranks2.run(a_late_rank)


def recompiles_alone() -> None:
    """A rank that compiles the same decision again does not wait for the others."""
    x = torch.ones(500)
    backend = commpass.backend(forced("int8"), inner="eager", timeout=120)
    function = torch.compile(model, backend=backend)
    expected = function(x)
    backend.timeout = 0.5  # rank 0 waits this long in vain for the other to compile it as well
    if dist.get_rank() == 0:
        function = torch.compile(lambda x: model(x) + 0, backend=backend)
    assert torch.equal(function(x), expected)


@pytest.mark.slow
def test_rank_may_recompile_alone_what_was_agreed_on(ranks2):
    ranks2.run(recompiles_alone)


MATMUL = 2 * 64**3
SLOW = commpass.Profile(  # 10 ms for the exchange, 20 ms for a matmul
    "slow",
    commpass.Link(0.0, 64 * 64 * 4 / 10_000 / 1e3),
    kernels=commpass.Kernels(0, commpass.KernelRate(100, 100), gflops=MATMUL / 20_000 / 1e3),
)


def behind(x: torch.Tensor, many: int) -> torch.Tensor:
    """A sum, and some matmuls that do not depend on it."""
    summed = ops.wait_tensor(ops.all_reduce(x * 2, "sum", dist.group.WORLD.group_name))
    for _ in range(many):
        x = x @ x
    return summed[:1, 0] + x[:1, 0] * 0


def hides(matmuls: tuple[int, ...], then: int, inner: str) -> list[tuple[str, bool]]:
    """Return the decision on a sum on a rank that computes some matmuls meanwhile.

    Return it also after the last rank compiles again, alone, with a different number of them.
    """
    torch._dynamo.reset()
    policy = Policy(name=f"{matmuls}", codecs="int8", skip=["group", "chunk"])
    backend = commpass.backend(policy, inner=inner, profile=SLOW, timeout=20)
    function = torch.compile(behind, backend=backend, dynamic=False)
    x, rank = torch.ones(64, 64) / 3, dist.get_rank()
    found = []
    for many in (matmuls[rank], then if rank == 1 else matmuls[rank]):
        expected = torch.full((1,), 2 / 3 * dist.get_world_size())
        torch.testing.assert_close(function(x, many), expected, rtol=0.02, atol=0)
        (site,) = commpass.plans()[-1]
        found.append((site.codec, site.hidden))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("inner", ["eager", rarely("inductor")])
@pytest.mark.parametrize(
    ("matmuls", "then", "decided"),
    [
        ((3, 3), 0, ("none", True)),
        ((0, 0), 3, ("int8", False)),
        ((3, 0), 3, ("int8", False)),  # all plan again, and leave no site uncompressed for overlap
        ((0, 3), 0, ("int8", False)),
    ],
)
def test_site_hidden_on_one_rank_alone_is_compressed_and_stays_so(
    matmuls, then, decided, inner, ranks2
):
    for found in ranks2.run(hides, matmuls, then, inner):
        assert found == [decided, decided]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("matmuls", [(3, 0, 3), (0, 3, 0), (0, 0, 3), (3, 3, 0)])
def test_site_exposed_on_one_rank_of_three_is_compressed_on_all(matmuls, ranks3):
    for found in ranks3.run(hides, matmuls, 0, "eager"):
        assert found == [("int8", False)] * 2


def part_of_gather(first: bool) -> tuple[list[str], list[str], str]:
    """A sum, and a gather of which each rank uses its own part, or all use that of rank 0."""
    torch._dynamo.reset()
    own = 0 if first else dist.get_rank()

    def function(x: torch.Tensor) -> torch.Tensor:
        name, ranks = dist.group.WORLD.group_name, dist.get_world_size()
        whole = ops.wait_tensor(ops.all_gather_into_tensor(x + own, ranks, name))
        return model(x), whole[own * len(x) : (own + 1) * len(x)]

    policy = Policy(rules=[Rule(kind="all_reduce", codec="int8", force=True)])
    backend = commpass.backend(policy, inner="eager", profile=SLOW, timeout=20)
    x = torch.full((700,), 1 / 3) + dist.get_rank()
    summed, part = torch.compile(function, backend=backend, dynamic=False)(x)
    torch.testing.assert_close(summed, model(x), rtol=0.02, atol=0)
    torch.testing.assert_close(part, torch.full((700,), 1 / 3 + 2 * own))
    plan = commpass.plans()[-1]
    rules = [step.rule for step in plan.simplified]
    return [site.codec for site in plan], rules, plan.fallback


@pytest.mark.slow
def test_part_that_only_one_rank_owns_leaves_the_rest_compressed_on_all(ranks3):
    for found in ranks3.run(part_of_gather, True):
        assert found == (["none", "int8"], [], "")


@pytest.mark.slow
def test_gather_goes_where_each_rank_takes_its_own_part(ranks3):
    for found in ranks3.run(part_of_gather, False):
        assert found == (["int8"], ["own part"], "")


def breaks_on_one_rank(strict: bool) -> tuple[bool, str, str]:
    """A pass that fails on rank 1 only, half-way through."""

    def fail(road):
        rewrite.run(road)
        if dist.get_rank() == 1:
            raise RuntimeError("injected")

    kept = manager.PASSES
    manager.PASSES = tuple(
        dataclasses.replace(p, run=fail) if p.name == "rewrite" else p for p in kept
    )
    try:
        x = torch.ones(700 + strict) / 3  # a plan that these ranks have not agreed on before
        with commpass_messages() as messages:
            result = compiled(forced("int8"), strict=strict)(x)
        return torch.equal(result, model(x)), commpass.plans()[-1].fallback, " ".join(messages)
    finally:
        manager.PASSES = kept


def test_pass_that_fails_on_one_rank_makes_all_compile_the_untouched_graph_and_say_why(ranks2):
    for exact, fallback, warning in ranks2.run(breaks_on_one_rank, False):
        assert exact
        assert "injected" in fallback
        assert "compiled untouched" in warning
        assert "injected" in warning


def kernel_breaks_on_one_rank() -> tuple[bool, str, str]:
    """Inductor fails on rank 1 only, at a kernel that three sites share."""

    def compile_kernel(body, inputs):
        if dist.get_rank() == 1:
            raise RuntimeError("injected")
        return lambda given: body(*given)

    def three(x):
        return model(model(model(x)))

    kept, kernel._compile = kernel._compile, compile_kernel
    try:
        torch._dynamo.reset()
        x = torch.ones(904) / 3
        policy = Policy(rules=[Rule(codec="int8", algorithm="two_shot", force=True)])
        with commpass_messages() as messages:
            result = torch.compile(three, backend=commpass.backend(policy, timeout=120))(x)
        return torch.equal(result, three(x)), commpass.plans()[-1].fallback, " ".join(messages)
    finally:
        kernel._compile = kept


@pytest.mark.slow
def test_kernel_that_fails_on_one_rank_makes_all_compile_the_untouched_graph(ranks2):
    (exact, fallback, warning), (other, nothing, own) = ranks2.run(kernel_breaks_on_one_rank)
    why = "uncompressed: pass 'lower' failed: RuntimeError: injected"
    assert exact
    assert f"rank 1: {why}" in fallback
    assert "compiled untouched" in warning
    assert other
    assert not nothing  # its own plan compresses no site
    assert f"all_reduce is {why}" in own


def strict_raises() -> str:
    with pytest.raises(Exception, match="injected") as error:
        breaks_on_one_rank(True)
    return str(error.value)


def test_strict_raises_on_every_rank(ranks2):
    assert all("injected" in text for text in ranks2.run(strict_raises))


def breaks_in_discovery() -> bool:
    def fail(road):
        raise RuntimeError("injected")

    kept = manager.PASSES
    if dist.get_rank() == 1:
        manager.PASSES = (dataclasses.replace(kept[0], run=fail), *kept[1:])
    try:
        x = torch.ones(800) / 3
        return torch.equal(compiled(forced("int8"))(x), model(x))
    finally:
        manager.PASSES = kept


def test_rank_without_sites_takes_the_others_along(ranks2):
    assert ranks2.run(breaks_in_discovery) == [True, True]


def groups_agree_on_their_own() -> None:
    """Ranks of different groups may compile different models: only those that share a group must
    agree."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    codec = ["int8", "fp8"][mine]
    torch._dynamo.reset()
    function = torch.compile(
        model, backend=commpass.backend(forced(codec), inner="eager", timeout=120)
    )
    got = function(torch.ones(500), groups[mine].group_name)
    assert torch.allclose(got, torch.full((500,), 5.0), atol=0.1)


@pytest.mark.every
def test_groups_agree_each_on_their_own(ranks4):
    ranks4.run(groups_agree_on_their_own)


EVEN_TO_ONE = [[1, 1, 1], [1, 2000, 10], [1, 10, 2000]]
"""Entries from rank i to rank j: on rank 0 they look even."""
UNEVEN = [[1, 2, 3], [4, 2000, 10], [5, 10, 2000]]


def exchanges(matrix: list[list[int]], codec: str, strict: bool = False) -> tuple[bool, str]:
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    sent, received = matrix[rank], [row[rank] for row in matrix]

    def exchange(x):
        return ops.wait_tensor(ops.all_to_all_single(x * 2, received, sent, group)) + 1

    torch._dynamo.reset()
    link = commpass.ethernet(
        0.05
    )  # no codec pays for an empty exchange, and one does for 1,024 entries
    backend = commpass.backend(
        Policy(codecs=codec), profile=link, inner="eager", timeout=120, strict=strict
    )
    x = torch.randn(sum(sent), 64, generator=torch.Generator().manual_seed(rank))
    result = torch.compile(exchange, backend=backend)(x)
    return torch.equal(result, exchange(x)), commpass.plans()[-1].fallback


@pytest.mark.slow
def test_splits_that_look_even_to_one_rank_alone_are_left_alone_with_a_reason(
    ranks3,
):
    (first, _), *others = ranks3.run(exchanges, EVEN_TO_ONE, "int8")
    assert first
    for exact, fallback in others:
        assert exact
        assert "rank 0 changes nothing" in fallback


def strictly_even_to_one() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    if rank == 0:
        assert exchanges(EVEN_TO_ONE, "int8", strict=True)[0]
        return
    with pytest.raises(Exception, match="rank 0 changes nothing"):
        exchanges(EVEN_TO_ONE, "int8", strict=True)
    sent, received = EVEN_TO_ONE[rank], [row[rank] for row in EVEN_TO_ONE]
    for _ in range(2):  # rank 0 goes on, and waits for what was not sent
        ops.wait_tensor(ops.all_to_all_single(torch.ones(sum(sent), 64), received, sent, group))


@pytest.mark.slow
def test_splits_that_look_even_to_one_rank_alone_raise_under_strict(ranks3):
    ranks3.run(strictly_even_to_one)


def even_to_one_and_another_sum() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    sent, received = EVEN_TO_ONE[rank], [row[rank] for row in EVEN_TO_ONE]

    def both(x, y):
        return ops.wait_tensor(ops.all_to_all_single(x * 2, received, sent, group)) + 1, model(y)

    torch._dynamo.reset()
    rules = [
        Rule(kind="all_reduce", codec="fp8" if rank == 2 else "int8", force=True),
        Rule(codec="int8"),
    ]
    backend = commpass.backend(
        Policy(rules=rules), profile=commpass.ethernet(0.05), inner="eager", timeout=120
    )
    with pytest.raises(PlanMismatch, match="codec is"):
        torch.compile(both, backend=backend)(torch.ones(sum(sent), 64), torch.ones(500))


@pytest.mark.slow
def test_splits_that_look_even_excuse_no_other_difference(ranks3):
    ranks3.run(even_to_one_and_another_sum)


def uneven_and_differ() -> None:
    with pytest.raises(PlanMismatch, match="codec is"):
        exchanges(UNEVEN, ["int8", "int8", "fp8"][dist.get_rank()])


@pytest.mark.slow
def test_other_policies_for_uneven_splits_are_a_mismatch_like_any_other(ranks3):
    ranks3.run(uneven_and_differ)


def uneven_and_alike() -> None:
    assert exchanges(UNEVEN, "int8") == (False, "")


@pytest.mark.slow
def test_uneven_splits_that_all_ranks_see_are_compressed(ranks3):
    ranks3.run(uneven_and_alike)


def scaled_by_rank(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name
    first, second = (ops.wait_tensor(ops.all_reduce(value * 2, "sum", group)) for value in (x, y))
    return first * (dist.get_rank() + 2.0) + second


def numbers_that_differ() -> tuple[str, bool, bool]:
    """A sum of sums would move the rank's own number across the collective: then all ranks fall
    back."""
    x, y = torch.ones(500) * (dist.get_rank() + 1), torch.ones(500)
    exact = []
    for policy in ("lossless", Policy(reassociate=False)):
        torch._dynamo.reset()
        function = torch.compile(
            scaled_by_rank, backend=commpass.backend(policy, inner="eager", timeout=120)
        )
        exact.append(torch.equal(function(x, y), scaled_by_rank(x, y)))
    return commpass.plans()[-2].fallback, *exact


def test_numbers_that_differ_between_ranks_are_not_moved_across_a_collective(ranks2):
    for why, exact, apart in ranks2.run(numbers_that_differ):
        assert "simplified is" in why
        assert "times 3.0" in why
        assert "times 2.0" in why
        assert exact
        assert apart


def graphs_of_two_groups() -> list[torch.Tensor]:
    """Ranks 0 and 1 compile different graphs for their group; in the other group, a sum overlaps on
    rank 0 only."""
    torch._dynamo.reset()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 2])

    def sums(x):
        return ops.wait_tensor(ops.all_reduce(x * 2, "sum", first.group_name))[:1, 0] + 0

    def hiding(x, many):
        summed = ops.wait_tensor(ops.all_reduce(x * 2, "sum", second.group_name))
        for _ in range(many):
            x = x @ x
        return summed[:1, 0] + x[:1, 0] * 0

    def breaking(x):
        once = sums(x)
        torch._dynamo.graph_break()
        return once, sums(x * 3)

    def whole(x):
        return hiding(x, 3), sums(x), sums(x * 3)

    function = (whole, breaking, lambda x: (hiding(x, 0),))[dist.get_rank()]
    policy = Policy(codecs="int8", skip=["group", "chunk", "simplify"])
    backend = commpass.backend(policy, inner="eager", profile=SLOW, timeout=20)
    compiled = torch.compile(function, backend=backend, dynamic=False)
    for _ in range(2):
        found = compiled(torch.ones(64, 64) / 3)
    return list(found)


@pytest.mark.every
def test_all_that_hang_together_plan_again_or_none(ranks3):
    every = ranks3.run(graphs_of_two_groups)
    once, thrice = torch.tensor([4 / 3]), torch.tensor([4.0])
    for found, expected in zip(every, ([once, once, thrice], [once, thrice], [once]), strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)  # exactly: nothing of it is changed
