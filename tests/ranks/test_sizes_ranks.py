"""Graphs with symbolic sizes on real ranks: all ranks switch together at the size from which codes
gain."""

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


@pytest.mark.every
@pytest.mark.parametrize("inner", ["eager", rarely("inductor")])
def test_each_size_is_sent_by_the_graph_that_is_right_for_it(inner, ranks2):
    ranks2.run(sizes_change, inner)


def summed(compiled, x, w, group) -> float:
    """Return the relative error of the ranks' sum, against float64."""
    got = compiled(x).double()
    exact = (x @ w).double()
    dist.all_reduce(exact, group=group)
    return float((got - exact).norm() / exact.norm())


class Flagged(torch.nn.Module):
    """With the flag, its graph differs but computes the same."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.w = torch.randn(256, 256, generator=generator)
        self.flag, self.group = False, dist.group.WORLD.group_name

    def forward(self, x):
        y = ops.wait_tensor(ops.all_reduce(x @ self.w, "sum", self.group))
        return y + 1 - 1 if self.flag else y


def one_compiles_again(sizes: list[int], alone: int) -> list[tuple[str, float]]:
    """Only rank 0 compiles another graph for the size at position ``alone``."""
    torch._dynamo.reset()
    model = Flagged()
    backend = commpass.backend("balanced", inner="eager", profile="ethernet-1g", timeout=20)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    found = []
    with torch.no_grad():
        for place, rows in enumerate(sizes):
            model.flag = place == alone and dist.get_rank() == 0
            x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
            off = summed(compiled, x, model.w, dist.group.WORLD)
            found.append((commpass.plans()[-1].sites[0].codec, off))
    return found


@pytest.mark.every
@pytest.mark.parametrize("sizes", [[4, 600, 4], [600, 4, 600], [4, 600, 600], [600, 4, 4]])
def test_rank_may_compile_again_alone_on_either_side(sizes, ranks2):
    for found in ranks2.run(one_compiles_again, sizes, 2):
        for rows, (_, off) in zip(sizes, found, strict=True):
            assert (off < 1e-6) == (rows == 4)
            assert off < 0.02


def another_profile() -> list[tuple[str, float]]:
    """Rank 0 would send codes at every size, rank 1 only at the larger one."""
    torch._dynamo.reset()
    slow = commpass.Profile("slow", commpass.Link(100.0, 0.0125))
    profile = (slow, "ethernet-1g")[dist.get_rank()]
    backend = commpass.backend("balanced", inner="eager", profile=profile, timeout=10)
    model = Flagged()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    found = []
    with torch.no_grad():
        for rows in (4, 600):
            off = summed(compiled, torch.randn(rows, 256), model.w, dist.group.WORLD)
            found.append((commpass.plans()[-1].sites[0].codec, off))
    return found


@pytest.mark.slow
def test_rank_does_not_take_an_old_word_for_an_answer(ranks2):
    """Rank 0 left the first graph unchanged because of rank 1, and does not compile another."""
    for found in ranks2.run(another_profile):
        assert [codec for codec, _ in found] == ["none", "none"]
        assert all(off < 1e-6 for _, off in found)


def of_two_groups() -> list[float]:
    """Rank 0 is in both groups, and has sizes of three kinds; rank 1 has one of them."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(5))

    def own(x):
        return ops.wait_tensor(ops.all_reduce(x @ w, "sum", first.group_name))

    def others(y):
        found = []
        for wide in (1, 2):
            for times in (1, 2, 3):
                part = (y @ w)[:, : 64 * wide].contiguous() * times
                found.append(ops.wait_tensor(ops.all_reduce(part, "sum", second.group_name)))
        return found

    def both(x, y):
        return own(x), others(y)

    policy = commpass.Policy.from_preset("balanced", skip=("group",))
    backend = commpass.backend(policy, inner="eager", profile="ethernet-1g", timeout=20)
    compiled = torch.compile((both, own, others)[rank], backend=backend, dynamic=True)
    found = []
    for rows in (600, 8):
        x, y = torch.randn(rows, 256), torch.randn(10, 256)
        if rank == 2:
            compiled(y)
        elif rank == 1:
            found.append(summed(compiled, x, w, first))
        else:
            found.append(summed(lambda x, y=y: compiled(x, y)[0], x, w, first))
    return found


@pytest.mark.every
def test_sizes_of_one_group_do_not_depend_on_others(ranks3):
    first, second, _ = ranks3.run(of_two_groups)
    assert first == second
    assert 1e-6 < first[0] < 0.02
    assert first[1] < 1e-6


def gains_between_two_sizes(sizes: list[int]) -> tuple[int, list[float]]:
    """The library's all_reduce is slow for some sizes only."""
    torch._dynamo.reset()
    rows = ((0, 50, 2.0), (1 << 15, 600, 1.0), (1 << 18, 10, 8.0), (1 << 24, 10, 0.05))
    of = {"all_reduce": tuple(commpass.Region(*row) for row in rows)}
    of |= dict.fromkeys(
        ("all_gather", "all_to_all", "message", "messages"), (commpass.Region(0, 60, 1.0),)
    )
    profile = commpass.Profile("measured", commpass.Link(50.0, 1.0, measured=of))
    model = Flagged()
    backend = commpass.backend("balanced", inner="eager", profile=profile, timeout=20)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    before = len(commpass.plans())
    with torch.no_grad():
        off = [
            summed(compiled, torch.randn(each, 256), model.w, dist.group.WORLD) for each in sizes
        ]
    return len(commpass.plans()) - before, off


@pytest.mark.slow
def test_sizes_between_which_codes_gain_are_not_all_compiled_anew(ranks2):
    for compiles, off in ranks2.run(gains_between_two_sizes, list(range(250, 30, -24))):
        assert compiles == 1
        assert off[0] > 1e-6
        assert all(each < 0.02 for each in off)
