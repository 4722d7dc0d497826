"""Collectives in flight: the input may be changed once the call returns, and a handle reports
errors."""

from __future__ import annotations

import gc
import itertools
import os
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks, RanksFailed
from tiers import rarely

import commpass
from commpass.collectives import Handle, algorithm, messages, request, steps
from commpass.collectives.steps import ops

ours = messages.ops

STAGES = ("", "(stage=rs)", "(stage=ag)")
STAGED = [f"{name}{stage}" for name in ("two_shot", "ring", "semi_ring") for stage in STAGES]
OTHERS = ["one_shot", "one_shot(shards=3)", "ring(shards=2)", "two_shot(first=sizes)"]
WAYS = [("all_reduce", name) for name in (*STAGED, *OTHERS, "two_shot(shards=2, stage=ag)")]
WAYS += [("reduce_scatter", name) for name in ("direct", "direct(shards=2)", "ring", "semi_ring")]
MOVES = ("direct", "direct(shards=2)")
WAYS += [(kind, name) for kind in ("all_gather", "all_to_all") for name in MOVES]
NODES = ["node=2", "between=int4, node=2", "node=2, stage=ag"]
NODES = [("all_reduce", f"hierarchical({given})") for given in NODES]
NODES += [("reduce_scatter", "hierarchical(node=2)")]
CODECS = ["int8", "raw", "rotated", "int8(rounding=stochastic)"]


def call(kind: str, name: str, x: torch.Tensor, *, codec: str, **more):
    return getattr(commpass, kind)(x, codec=codec, algorithm=name, **more)


def uneven(x: torch.Tensor, *, codec: str, **more):
    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = [[2 * rank + 3 * to for to in range(size - 1)] for rank in range(size)]
    matrix = [[*row, x.shape[0] - sum(row)] for row in matrix]
    return commpass.all_to_all(x, [row[rank] for row in matrix], matrix[rank], codec=codec, **more)


class Late:
    """Collectives that read their input as late as possible: in the wait."""

    def __init__(self, space: Any):
        self.space = space

    def __getattr__(self, name: str):
        if name == "wait_tensor":
            return lambda started: ops.wait_tensor(started())
        return lambda *args: lambda: getattr(self.space, name)(*args)


def check_input_is_free(ways) -> int:
    rank, size, checked = dist.get_rank(), dist.get_world_size(), 0
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    cases = [(way, codec) for way, codec in itertools.product(ways, CODECS)]
    cases += [(way, "exponent") for way in ways if "ring(" not in way[1]]
    cases += [(None, codec) for codec in (*CODECS, "exponent")]
    for (way, codec), dtype in itertools.product(cases, dtypes):
        shape = (size * 16, 8) if way else (40, 24)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
        run = partial(call, *way, codec=codec) if way else partial(uneven, codec=codec)
        expected = run(x)
        request.ops = steps.ops = Late(ops)
        messages.ops = Late(ours)
        try:
            handle = run(x, async_op=True)
            x.fill_(torch.nan)
            result = handle.wait()
        finally:
            request.ops = steps.ops = ops
            messages.ops = ours
        assert torch.equal(result, expected), (way, codec, dtype)
        result.zero_()
        assert x.isnan().all(), (way, codec, dtype)  # nor is the result a view of the input
        checked += 1
    return checked


@pytest.mark.every
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("size", "ways"), [(3, WAYS), rarely(4, NODES)])
def test_input_may_be_changed_as_soon_as_the_call_is_back(size, ways, request):
    checked = request.getfixturevalue(f"ranks{size}").run(check_input_is_free, ways, timeout=280)
    assert checked[0] > 3 * len(ways) * len(CODECS)


def test_inputs_read_later_alone_are_copied():
    names = dict.fromkeys(("ring", "semi_ring", "two_shot(stage=ag)"), True)
    names |= dict.fromkeys(("two_shot", "one_shot", "two_shot(stage=rs)"), False)
    for name, keeps in names.items():
        assert algorithm("all_reduce", name).keeps_input(commpass.codec("int8")) == keeps
        assert algorithm("all_reduce", name).keeps_input(commpass.codec("raw"))


def check_alone() -> None:
    """In a group of one rank nothing is exchanged; the result is still not a view of the input."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    dtypes = [torch.float32, torch.float64]
    for (kind, name), codec, dtype in itertools.product(WAYS, ["int8", "raw"], dtypes):
        x = torch.linspace(-1, 1, 512).to(dtype)
        for more in ({}, {"async_op": True}):
            result = call(kind, name, x, codec=codec, group=group, **more)
            if more:
                held, x[:] = x.clone(), 7.0
                result = result.wait()
                x = held
            assert (result - x).abs().max() <= 0.01, (kind, name, codec)
            before = x.clone()
            result.zero_()
            assert torch.equal(x, before), (kind, name, codec, more)


@pytest.mark.xdist_group("ranks")
def test_group_of_one_rank(ranks2):
    ranks2.run(check_alone)


def check_several() -> None:
    """Handles of two groups, waited for in another order than they were started, the same on all
    ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group(list(range(size)))]
    x = torch.randn(size * 300, generator=torch.Generator().manual_seed(rank))
    for names in itertools.permutations(["ring", "two_shot", "semi_ring"]):
        expected = [commpass.all_reduce(x, algorithm=name) for name in names]
        starts = [partial(commpass.all_reduce, x, "sum", algorithm=name) for name in names]
        handles = [start(group=group, async_op=True) for start in starts for group in groups]
        for index in (5, 0, 3, 1, 4, 2):
            assert torch.equal(handles[index].wait(), expected[index // 2])
            assert handles[index].wait() is handles[index].wait()


@pytest.mark.xdist_group("ranks")
def test_handles_of_several_groups_in_any_order(ranks3):
    ranks3.run(check_several)


def failing(after: int):
    for _ in range(after):
        yield torch.zeros(1)
    raise ConnectionError("rank 3 is gone")


@pytest.mark.parametrize("after", [1, 2])
def test_wait_that_failed_says_why_each_time(after):
    handle = Handle(failing(after))
    with pytest.raises(ConnectionError, match="rank 3 is gone"):
        handle.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ConnectionError: rank 3 is gone"):
            handle.wait()


def test_start_that_failed_is_the_callers_error(recwarn):
    with pytest.raises(ConnectionError):
        Handle(failing(0))
    gc.collect()
    assert not [each for each in recwarn if "handle" in str(each.message)]


def test_handle_that_is_dropped_is_warned_of(recwarn):
    handle = Handle(failing(1))
    with pytest.warns(UserWarning, match=r"dropped without wait\(\)"):
        del handle

    result = torch.full((2, 3), 3.0)

    def done():
        yield torch.zeros(1)
        return result

    handle = Handle(done())
    assert handle.wait() is result
    del handle
    assert not recwarn.list


def check_peer_that_dies() -> None:
    handle = commpass.all_reduce(torch.ones(3000), algorithm="ring", async_op=True)
    if dist.get_rank() == 1:
        os._exit(0)
    time.sleep(1)
    for said in (".*", "an earlier wait on this handle failed: .+"):
        with pytest.raises(RuntimeError, match=said):
            handle.wait()


@pytest.mark.every
def test_handle_whose_peer_has_died_raises_each_time():
    ranks = Ranks(3)
    try:
        with pytest.raises(RanksFailed) as said:  # of the rank that died
            ranks.run(check_peer_that_dies, timeout=60)
    finally:
        ranks.stop()
    assert "rank 0: done" in str(said.value)
    assert "rank 2: done" in str(said.value)
