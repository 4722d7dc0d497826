"""Gathers and scatters in chunks of rows: each rank's part of every chunk."""

from __future__ import annotations

import pytest
import torch
from everywhere import SLOW, everywhere
from graphs import ops, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

import commpass
from commpass.passes.fx.parse import is_wait, parse
from commpass.policy import Policy
from commpass.policy.rules import Rule

N = 64
aten = torch.ops.aten
wait = ops.wait_tensor


def gathered(x, ranks, dim=0):
    """As in DTensor: gather along the first dimension, then put each rank's part in its place."""
    y = wait(ops.all_gather_into_tensor(x, ranks, "0"))
    return torch.cat(y.split(x.shape[0]), dim) if dim else y


def scattered(x, ranks, dim=0):
    x = torch.cat(x.split(x.shape[dim] // ranks, dim)) if dim else x
    return wait(ops.reduce_scatter_tensor(x, "sum", ranks, "0"))


def times(x, w):
    return (x.reshape(-1, x.shape[-1]) @ w).view(*x.shape[:-1], -1)


def values(*shape, seed=0):
    """Return values whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def mlp(ranks, dim):
    """A sequence-parallel half of a layer, followed by another gather."""

    def function(x, w1, w2, room):
        y = scattered(times(gathered(x, ranks, dim), w1).relu().clamp(max=3), ranks, dim)
        return times(gathered(x + y, ranks, dim), w2), x + y, room.repeat(256)

    return function


def ends(ranks, dim):
    """The matmul before a scatter, and the one after a gather."""

    def function(x, w1, w2, room):
        y = scattered(times(x, w1), ranks, dim).relu() + 1
        return times(gathered(y, ranks, dim) * 2, w2), room.repeat(256)

    return function


def kept(ranks, dim):
    """The gathered tensor also has a user of the whole, such as the gradient of a weight."""

    def function(x, w1, w2, room):
        whole = gathered(x, ranks, dim)
        return times(whole, w1) + 1, whole.flatten(0, -2).t() @ whole.flatten(0, -2), room.repeat(9)

    return function


BOTH = ["reduce_scatter", "all_gather"]
PROGRAMS = (mlp, ends, kept)
SHAPES = {"rows": ((128, N), 0), "one": ((1, 128, N), 1), "batch": ((32, 4, N), 1)}


def split(program, ranks, shape, dim, rows, profile=SLOW, **policy):
    given = [
        [values(*shape, seed=rank), values(N, N, seed=7 + rank), values(N, N, seed=9), values(4096)]
        for rank in range(ranks)
    ]
    chosen = Policy(rows=rows, skip=("simplify", "group"), more_memory=10.0, **policy)
    return everywhere(lambda rank: program(ranks, dim), given, chosen, profile)


@pytest.mark.rest_slow(1)
@pytest.mark.few(8)
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_shards_in_chunks_give_the_same_numbers(program, shape, rows):
    found = split(program, 2, *SHAPES[shape], rows)
    for one, other in found.pairs:
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    if shape != "one":
        assert all(plan.split for plan in found.plans)
        assert {len(step.into) for plan in found.plans for step in plan.split} == {rows}


def story(gm):
    """s starts an exchange, w waits, m is a matmul."""
    letters = {aten.mm.default: "m"}
    nodes = gm.graph.nodes
    return "".join(
        "s" if parse(node) else "w" if is_wait(node) else letters.get(node.target, "")
        for node in nodes
    )


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("shape", ["rows", "batch"])
def test_chunk_travels_while_a_matmul_runs(shape):
    found = split(ends, 2, *SHAPES[shape], 2, commpass.ethernet(1))
    plan = found.plans[0]
    assert [site.kind for site in plan] == ["reduce_scatter"] * 2 + ["all_gather"] * 2
    assert story(found.plain[0]) == "mswswm"
    assert story(found.simple[0]) == "msmswswswwmm"  # one chunk is gathered while another is summed


@pytest.mark.slow
def test_compressed_chunks():
    rule = Rule(codec="int8", force=True, chunks=1, rows=2)
    found = split(ends, 2, (128, N), 0, None, rules=[rule])
    assert [site.codec for site in found.plans[0]] == ["int8"] * 4
    for one, other in found.pairs:
        assert (one - other).norm() < 0.02 * one.norm()


def test_sites_with_nothing_before_and_after_them_are_not_split():
    def function(ranks, dim):
        return lambda x, w1, w2, room: gathered(x, ranks) + 1

    found = split(function, 2, (64, N), 0, 2)
    assert not any(plan.split for plan in found.plans)
    assert "nothing before it and nothing after it" in found.plans[0].sites[0].reason


def test_rows_that_ranks_do_not_share_evenly():
    """The matmul's rows are the entries of a dimension other than the scattered one."""

    def function(ranks, dim):
        return lambda x, w1, w2, room: scattered((x @ w1).t().contiguous(), ranks)

    found = split(function, 2, (64, N), 0, 2)
    assert not any(plan.split for plan in found.plans)
    assert "does not apply" in found.plans[0].sites[0].reason


@pytest.mark.slow
@settings(max_examples=examples(10, 25), deadline=None)
@given(
    ranks=st.integers(2, 4),
    local=st.sampled_from([16, 36, 48, 80]),
    batch=st.sampled_from([0, 1, 3, 32]),
    dim=st.integers(0, 1),
    rows=st.integers(2, 4),
    program=st.sampled_from(PROGRAMS),
)
def test_parts_of_any_shapes_give_the_bits_of_the_whole(ranks, local, batch, dim, rows, program):
    shape = (batch, local, N) if batch else (local, N)
    if program is ends:  # its input is whole
        dim = dim if batch else 0
        shape = tuple(size * ranks if at == dim else size for at, size in enumerate(shape))
    found = split(program, ranks, shape, dim if batch else 0, rows)
    for one, other in found.pairs:
        assert torch.equal(one, other)


@pytest.mark.parametrize(("gbit", "gains"), [(1, 2), (1000, 0)])
def test_cost_model_splits_what_gains(gbit, gains, fake_group):
    fake_group(2)
    given = [*[torch.empty(1024, 1024)] * 3, torch.empty(1 << 20)]
    plan = commpass.rewrite(
        trace(ends(2, 0), *given), given, Policy(), profile=commpass.ethernet(gbit)
    )
    assert len(plan.split) == gains


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(("codec", "kinds"), [(None, ["reduce_scatter"]), ("int8", BOTH)])
def test_gathers_that_gloo_carries_out_stay_whole(codec, kinds, fake_group, monkeypatch):
    """gloo corrupts memory with two in flight; coded gathers are sent as messages."""
    fake_group(2)
    monkeypatch.setattr(commpass.groups, "sends_messages", lambda name, device: True)
    given = [*[torch.empty(1024, 1024)] * 3, torch.empty(1 << 20)]
    policy = Policy(rules=[Rule(codec=codec, force=True)] if codec else [])
    gm = trace(ends(2, 0), *given)
    plan = commpass.rewrite(gm, given, policy, profile=commpass.ethernet(0.1))
    assert len(plan.split) == len(kinds)
    assert [site.kind for site in plan if site.name in plan.split[-1].into][-1] == kinds[-1]
