"""Agreement of ranks that are connected through several groups.

They reach one verdict. A rank that changes nothing waits for no other. A run is not confused with
an older one.
"""

from __future__ import annotations

import dataclasses
import socket
import time

import pytest
import torch
import torch.distributed as dist
from rank_helpers import commpass_messages
from torch import nn

import commpass
from commpass.distributed import plan_store
from commpass.errors import PlanMismatch
from commpass.passes import manager, rewrite
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional


def forced(codec: str) -> Policy:
    return Policy(name=codec, rules=[Rule(codec=codec, force=True)])


def compiled(function, policy, timeout: float | None = 120.0, **more):
    torch._dynamo.reset()
    return torch.compile(
        function, backend=commpass.backend(policy, inner="eager", timeout=timeout, **more)
    )


def summed(x, group):
    return ops.wait_tensor(ops.all_reduce(x * 2, "sum", group))


# --- a chain of groups: {0, 1} and {1, 2} ---------------------------------------------------------


def chain():
    """Return a function that sums over both groups of this rank, and the exact result for ones."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    mine = [
        group.group_name
        for group in groups
        if dist.get_rank() in dist.get_process_group_ranks(group)
    ]

    def function(x):
        return [summed(x, name) + 1 for name in mine]

    return function, mine


def a_pass_fails_on_rank(broken: int):
    def fail(road):
        rewrite.run(road)
        if dist.get_rank() == broken:
            raise RuntimeError("injected")

    function, _ = chain()
    kept = manager.PASSES
    manager.PASSES = tuple(
        dataclasses.replace(p, run=fail) if p.name == "rewrite" else p for p in kept
    )
    try:
        x = torch.rand(600, generator=torch.Generator().manual_seed(dist.get_rank()))
        got = compiled(function, forced("int8"))(x)
        plan = commpass.plans()[-1]
        return all(map(torch.equal, got, function(x))), plan.fallback, len(plan.compressed)
    finally:
        manager.PASSES = kept


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_failure_travels_across_groups(broken, ranks3):
    for exact, why, compressed in ranks3.run(a_pass_fails_on_rank, broken):
        assert exact
        assert "injected" in why
        assert compressed == 0


def two_differ():
    function, _ = chain()
    codec = "int8" if dist.get_rank() < 2 else "fp8"
    with pytest.raises(PlanMismatch) as error:
        # the time-out is not waited for
        compiled(function, forced(codec), timeout=3600)(torch.ones(600))
    return str(error.value)


@pytest.mark.slow
def test_difference_in_one_group_raises_on_all_who_hang_together_with_it(ranks3):
    for text in ranks3.run(two_differ):
        assert "(ranks 1-2) planned differently" in text
        assert "'int8'" in text
        assert "'fp8'" in text


def all_alike():
    function, mine = chain()
    x = torch.ones(600)
    got = compiled(function, forced("int8"))(x)
    assert len(commpass.plans()[-1].compressed) == len(mine)
    assert all(torch.allclose(each, torch.full((600,), 5.0), atol=0.05) for each in got)


@pytest.mark.slow
def test_chain_of_groups_that_agrees_is_compressed(ranks3):
    ranks3.run(all_alike)


def the_last_group_changes_nothing():
    """The sum over {1, 2} is of whole numbers: rank 0 depends on {0, 1} only, and rank 2 on
    nothing."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    rank = dist.get_rank()

    def function(x):
        found = []
        if rank < 2:
            found.append(summed(x, groups[0].group_name))
        if rank > 0:
            found.append(summed(x.int(), groups[1].group_name))
        return found

    got = compiled(function, forced("int8"))(torch.ones(600))
    assert all(torch.allclose(each.float(), torch.full((600,), 4.0), atol=0.05) for each in got)
    return [site.codec for site in commpass.plans()[-1]]


def test_group_in_which_nothing_is_changed_connects_no_ranks(ranks3):
    assert ranks3.run(the_last_group_changes_nothing) == [["int8"], ["int8", "none"], ["none"]]


# --- ranks whose graphs differ --------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, group: str, when: int):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.group, self.when = group, when

    def forward(self, x, step: int):
        y = summed(self.first(x), self.group)
        if dist.get_rank() == 0 and step == self.when:
            print(f"mean {y.mean().item():.3f}")
        return summed(self.second(y.tanh()), self.group)


def prints_on_rank_0(policy, when: int):
    dist.barrier()
    group = dist.new_group()
    model = Net(group.group_name, when)
    function = compiled(model, policy)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    errors = []
    with torch.no_grad():
        for step in range(4):
            got, expected = function(x, step), model(x, step)
            errors.append(((got - expected).norm() / expected.norm()).item())
    return errors


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("policy", ["off", "lossless"])
def test_print_on_one_rank_is_no_error_where_nothing_is_changed(policy, when, ranks2):
    assert ranks2.run(prints_on_rank_0, policy, when) == [[0.0] * 4] * 2


@pytest.mark.slow
def test_print_on_one_rank_from_the_start_leaves_its_group_alone(ranks2):
    assert ranks2.run(prints_on_rank_0, forced("int8"), 0) == [[0.0] * 4] * 2


@pytest.mark.slow
def test_rank_that_breaks_its_graph_later_goes_on_with_what_was_agreed_on_site_by_site(ranks2):
    errors = ranks2.run(prints_on_rank_0, forced("int8"), 2)
    assert errors[0] == errors[1]
    assert all(0 < error < 0.03 for error in errors[0])


def one_is_not_compiled(policy):
    """Rank 1 runs eagerly: as in torch, where nothing is changed."""
    group = dist.new_group().group_name
    function = (
        (lambda x: summed(x, group))
        if dist.get_rank()
        else compiled(lambda x: summed(x, group), policy)
    )
    return torch.equal(function(torch.ones(50)), torch.full((50,), 4.0))


@pytest.mark.parametrize("policy", ["off", "lossless"])
def test_eager_rank_is_not_waited_for_where_nothing_is_changed(policy, ranks2):
    assert ranks2.run(one_is_not_compiled, policy) == [True, True]


# --- the store ------------------------------------------------------------------------------------


class Gone:
    def __getattr__(self, name):
        def fail(*_):
            raise RuntimeError("Broken pipe")

        return fail


def without_a_store():
    group = dist.new_group().group_name
    x = torch.rand(70)
    kept = plan_store.PlanStore.torch_store
    plan_store.PlanStore.torch_store = property(lambda self: Gone())
    try:
        assert torch.equal(compiled(lambda x: summed(x, group), "lossless")(x), summed(x, group))
        with pytest.raises(PlanMismatch, match="does not answer") as error:
            compiled(lambda x: summed(x, group), forced("int8"))(x)
        assert "Broken pipe" in str(error.value)
    finally:
        plan_store.PlanStore.torch_store = kept
    dist.barrier()
    got = compiled(lambda x: summed(x, group), forced("int8"))(x)
    return commpass.plans()[-1].sites[0].codec, got.shape


@pytest.mark.slow
def test_store_that_is_gone_is_an_error_only_for_who_needs_it(ranks2):
    assert ranks2.run(without_a_store) == [("int8", (70,))] * 2


def begins_again(store, run: int) -> None:
    """Create the process groups anew on a store that older ones have used, as within one launch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store.set(f"ended/{run}/{rank}", "")
    store.wait([f"ended/{run}/{other}" for other in range(size)])
    if rank == 0:
        for key in store.list_keys():
            if "/cpu/" in key:
                store.delete_key(key)  # else gloo may connect to a process that no longer exists
    store.set(f"ready/{run}/{rank}", "")
    store.wait([f"ready/{run}/{other}" for other in range(size)])
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("run", store), rank=rank, world_size=size
    )


def several_runs(port: int):
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
    rows = []
    x = torch.ones(333) / 3
    runs = [("int8", "int8"), ("int8", "fp8"), ("fp8", "fp8"), ("off", "off"), ("int8", "int8")]
    for number, names in enumerate(runs):
        begins_again(store, number)
        policy = names[rank] if names[rank] == "off" else forced(names[rank])
        group = dist.group.WORLD.group_name
        function = compiled(lambda x, group=group: summed(x, group), policy)
        if rank == number % size:
            time.sleep(0.5)
        try:
            got = function(x)
            rows.append(
                (
                    commpass.plans()[-1].sites[0].codec,
                    bool(torch.allclose(got, x * 2 * size, rtol=0.1)),
                )
            )
        except PlanMismatch as error:
            rows.append("planned differently" in str(error))
    return rows


@pytest.mark.slow
def test_process_groups_made_anew_in_one_launch_agree_anew(ranks2):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        for rows in ranks2.run(several_runs, port):
            assert rows[:3] == [("int8", True), True, ("fp8", True)]
            assert rows[3:] == [("none", True), ("int8", True)]
    finally:
        ranks2.stop()  # their groups differ from those that they started with


# --- reports --------------------------------------------------------------------------------------


def leaves_apart():
    group = dist.new_group().group_name
    rank = dist.get_rank()
    with commpass_messages() as lines:
        two = compiled(lambda x: summed(x.cos(), group) * summed(x, group), forced("int8"))
        one = compiled(lambda x: summed(x, group), forced("int8"))
        second = compiled(lambda x: summed(x.sin(), group), forced("int8"))
        got = one(torch.zeros(80)) if rank else two(torch.zeros(80))
        if rank:
            summed(torch.zeros(80), group)
        second(torch.zeros(80))
    return got.shape, [plan.fallback for plan in commpass.plans()[-2:]], lines


@pytest.mark.slow
def test_ranks_whose_graphs_differ_leave_their_group_alone_from_then_on_and_say_so(ranks2):
    for _, (first, second), lines in ranks2.run(leaves_apart):
        assert "compile different graphs" in first
        assert "compile different graphs" in second
        assert sum("compiled untouched" in line for line in lines) == 2


# --- one process, several policies ----------------------------------------------------------------


def one_policy_after_another(names: list[str]) -> list[tuple[float, str]]:
    """Rank 0 breaks its graph under each policy; then all compile the same model without a
    break."""
    group = dist.new_group().group_name
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for number, name in enumerate(names):
        policy = name if name in ("off", "lossless") else forced(name)
        if dist.get_rank() == number % 2:
            time.sleep(1)  # the other rank sees what this one published under the last policy
        for when in (0, 9) if name == "off" else (9,):
            model = Net(group, when)
            with torch.no_grad():
                got, expected = compiled(model, policy)(x, 0), model(x, 0)
        error = ((got - expected).norm() / expected.norm()).item()
        found.append((error, commpass.plans()[-1].fallback))
    return found


@pytest.mark.slow
def test_records_of_a_former_policy_are_not_taken_for_present_ones(ranks2):
    names = ["off", "int8", "off", "fp8", "int8"]
    for rows in ranks2.run(one_policy_after_another, names):
        assert [why for _, why in rows] == [""] * 5
        assert [error > 0 for error, _ in rows] == [name != "off" for name in names]


def models_in_another_order() -> str:
    group = dist.new_group().group_name
    policies = [forced("int8"), forced("fp8")]  # the first graphs that each would compile
    policy = policies[dist.get_rank()]
    with pytest.raises(PlanMismatch) as error:
        compiled(lambda x: summed(x, group), policy)(torch.ones(60))
    return str(error.value)


@pytest.mark.slow
def test_ranks_that_compile_under_two_policies_in_another_order_are_reported(ranks2):
    ranks2.run(one_policy_after_another, ["off", "int8"])
    first, second = ranks2.run(models_in_another_order, timeout=60)
    assert "codec is 'int8' in rank 0 and 'fp8' in rank 1" in first
    assert "codec is 'fp8' in rank 1 and 'int8' in rank 0" in second


def one_goes_back_to_an_older_policy(reset: bool) -> str:
    """Both have had int8; then rank 0 has it again, and rank 1 has fp8."""
    group = dist.new_group().group_name
    torch._dynamo.reset()
    first = commpass.backend(forced("int8"), inner="eager", timeout=60)
    torch.compile(lambda x: summed(x, group), backend=first)(torch.ones(60))
    if reset:
        torch._dynamo.reset()
    if dist.get_rank():
        second = commpass.backend(forced("fp8"), inner="eager", timeout=60)
    else:
        second = first if reset else commpass.backend(forced("int8"), inner="eager", timeout=60)
        time.sleep(1)
    with pytest.raises(PlanMismatch) as error:
        torch.compile(lambda x: summed(x, group) + 1, backend=second)(torch.ones(60))
    return str(error.value)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("reset", [False, True])
def test_agreement_of_one_backend_counts_for_no_other_nor_after_a_reset(reset, ranks2):
    for text in ranks2.run(one_goes_back_to_an_older_policy, reset, timeout=100):
        assert "planned differently" in text
        assert "'int8'" in text
        assert "'fp8'" in text


class Kept(nn.Module):
    """Two equal layers, of which one is kept; rank 0 later breaks its graph between them."""

    def __init__(self, group: str):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Summing(group), Summing(group)])

    def forward(self, x, step: int):
        x = self.layers[0](x)
        if dist.get_rank() == 0 and step == 2:
            print(f"mean {x.mean().item():.3f}")
        return self.layers[1](x)


class Summing(nn.Module):
    def __init__(self, group: str):
        super().__init__()
        self.linear, self.group = nn.Linear(32, 32), group

    def forward(self, x):
        return summed(self.linear(x), self.group)


def like_sites_treated_differently() -> list[float]:
    group = dist.new_group()
    policy = Policy(rules=[Rule(module="layers.0", keep=True), Rule(codec="int8", force=True)])
    model = Kept(group.group_name)
    function = compiled(model, policy, timeout=20)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = [
            ((function(x, step) - model(x, step)).norm() / model(x, step).norm()).item()
            for step in range(4)
        ]
    return found


@pytest.mark.slow
def test_lone_graph_break_between_like_sites_that_are_treated_differently(ranks2):
    first, second = ranks2.run(like_sites_treated_differently, timeout=60)
    assert first == second
    assert all(0 < error < 0.03 for error in first)
