"""simplify and memory layout: views of a value stay valid, and outputs keep their layout."""

from __future__ import annotations

import copy

import pytest
import torch
from everywhere import SLOW, everywhere, same
from functional_ops import ag, ar, rs
from graphs import as_rank, ops
from lockstep import run_in_lockstep

import commpass

wait = ops.wait_tensor
clone, keep = torch.ops.aten.clone.default, torch.preserve_format


def copied(x):
    return clone(x, memory_format=torch.contiguous_format)


CASES = {
    "a copy behind a gather, then a view": (
        lambda x: copied(ag(x * 2).t()).bfloat16().view(-1).sin(),
        "gather then narrow",
    ),
    "a copy that leaves values where they are": (
        lambda x: clone(ag(x * 2).t(), memory_format=keep).bfloat16().t().view(-1).sin(),
        "gather then narrow",
    ),
    "copies and scales in turn": (
        lambda x: copied((copied(ag(x).t()) * 3).view(4, 3, 4).transpose(0, 2)).half().view(-1),
        "gather then narrow",
    ),
    "turned sums, turned back": (
        lambda x: (ar(x.sin()).t() + ar(x.cos()).t()).t().view(-1).exp(),
        "sum of sums",
    ),
    "a turned sum and a straight one": (
        lambda x: (ar(x.sin()).t() + ar(x.t().cos())).t().reshape(-1).exp(),
        "sum of sums",
    ),
    "sums of three dimensions": (
        lambda x: (ar(x).view(2, 2, 6).permute(2, 0, 1) + ar(x.cos().view(6, 2, 2)) * 2).sin(),
        "sum of sums",
    ),
    "widened values that are turned": (
        lambda x: ar(x.half().float().t()).sin(),
        "widen then reduce",
    ),
    "turned values that are widened and turned back": (
        lambda x: ar(x.half().t().float().t()).sin(),
        "widen then reduce",
    ),
    "widened values of three dimensions": (
        lambda x: rs(x.half().float().view(2, 2, 6).permute(1, 2, 0)).sin(),
        "widen then reduce",
    ),
    "a cast laid out for four dimensions": (
        lambda x: ag(x).view(4, 2, 2, 3).to(torch.half, memory_format=torch.channels_last).sin(),
        "gather then narrow",
    ),
    "a part laid out for four dimensions": (
        lambda x: clone(ag(x * 2).view(4, 2, 2, 3), memory_format=torch.channels_last)[:2].sin(),
        None,
    ),
}


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("name", CASES)
def test_results_and_their_layout(name):
    function, rule = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(4, 6, generator=generator)] for _ in range(2)]
    ranks = everywhere(lambda rank: function, inputs)
    assert ranks.rules == ([rule] if rule else [])
    assert same(ranks, exact=rule != "sum of sums")
    assert all(a.stride() == b.stride() for a, b in ranks.pairs)


def written_after_a_cast(x):
    narrow = x.half()
    wide = narrow.float()
    narrow.mul_(3)
    return wide


def written_after_a_copy(x):
    row = x[:1].sin()
    whole = copied(row.expand(4, 6))
    row.mul_(3)
    return whole


@pytest.mark.parametrize("collective", [ar, rs, ag])
@pytest.mark.parametrize("made", [written_after_a_cast, written_after_a_copy])
def test_values_that_are_written_before_the_collective_are_not_sent_instead(made, collective):
    """In a graph that is not functional, what was widened or copied has other values by then."""
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(4, 6, generator=generator)] for _ in range(2)]
    ranks = everywhere(lambda rank: lambda x: collective(made(x)).sin(), inputs)
    assert ranks.rules == []
    assert same(ranks)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_own_part_of_each_dimension_is_scattered(dim):
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(4, 6, 8, generator=generator)] for _ in range(2)]
    ranks = everywhere(lambda rank: lambda x: ar(x * 2).chunk(2, dim)[rank].sin(), inputs)
    assert ranks.rules == ["scattered"]
    assert same(ranks)  # of two addends
    assert all(a.stride() == b.stride() for a, b in ranks.pairs)


@pytest.mark.parametrize("dim", [0, 1])
def test_part_of_another_dimension_than_the_gathered_one_is_not_what_one_gave(dim):
    inputs = [[torch.randn(4, 6, generator=torch.Generator().manual_seed(n))] for n in range(2)]
    ranks = everywhere(lambda rank: lambda x: ag(x * 2).chunk(2, dim)[rank].sin(), inputs)
    assert ranks.rules == ([] if dim else ["own part"])
    assert same(ranks)


def test_sizes_that_are_symbolic():
    """A graph of dynamic shapes is laid out by hints, and computes the same for other sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x):
        return (ar(x.sin()).t() + ar(x.t().cos())).t().reshape(-1).exp()

    with as_rank(0, 2):
        gm = make_fx(function, tracing_mode="symbolic")(torch.randn(4, 6))
        plain = copy.deepcopy(gm)
        plan = commpass.rewrite(gm, [], profile=SLOW, strict=True)
    assert [step.rule for step in plan.simplified] == ["sum of sums"]
    inputs = [[torch.randn(8, 10)] for _ in range(2)]
    world = {"0": [0, 1]}.__getitem__
    expected, got = (run_in_lockstep([each] * 2, inputs, world) for each in (plain, gm))
    assert torch.allclose(got[1], expected[1], rtol=1e-5)
