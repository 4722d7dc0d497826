"""Several ranks, and several groups, on one link."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from graphs import ops, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from commpass.costmodel import HOST, Link, Profile
from commpass.costmodel.links import DIRECT, MEASURED, ONE, SEVERAL, Region, steps
from commpass.errors import PolicyError
from commpass.passes.fx import costs
from commpass.passes.fx.memory import memory
from commpass.passes.fx.parse import parse
from commpass.passes.fx.schedule import timed
from commpass.passes.fx.work import work_of

SLOW, FAST = Link(0.0, 1.0), Link(0.0, 100.0)


def leaving(kind: str, groups: list[range], node: int, nbytes: float) -> float:
    """Return the bytes that leave the busiest host, counted message by message.

    Every rank of each group sends to the next, or equally much to each other one.
    """
    found: Counter[int] = Counter()
    for ranks in groups:
        members, sent = list(ranks), steps(kind, len(ranks), nbytes)[1]
        for at, rank in enumerate(members):
            others = [members[(at + 1) % len(members)]]
            if kind in DIRECT:
                others = [other for other in members if other != rank]
            for other in others:
                if other // node != rank // node:
                    found[rank // node] += sent / len(others)
    return max(found.values(), default=0.0)


@settings(max_examples=examples(20, 60), deadline=None)
@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
)
def test_port_carries_what_all_its_ranks_send(kind, node, hosts, many, strided):
    """All ranks are in groups of one form, each at the same collective, with one port per host."""
    ranks = node * hosts
    if many > ranks or ranks % many:
        return
    step = ranks // many if strided else 1
    if strided:
        groups = [range(first, ranks, step) for first in range(step)]
    else:
        groups = [range(first, first + many) for first in range(0, ranks, many)]
    profile = Profile("one port", SLOW, intra_host_link=FAST, ranks_per_host=node, ports=1)
    crossing = leaving(kind, groups, node, 1e6)
    link = profile.link_of("dp", ranks=tuple(groups[0]))
    if crossing:
        _, taken = link.parts_us(kind, 1e6, many)
        alone = steps(kind, many, 1e6)[1]  # what one rank sends, including to its own host
        assert taken == pytest.approx(max(crossing, alone) / 1e3)
    else:
        assert link is FAST


def test_ports_for_each_rank_are_not_shared():
    for ports in (0, 8, 16):
        link = Profile("p", SLOW, ranks_per_host=8, ports=ports).link_of(
            "dp", ranks=range(0, 64, 8)
        )
        assert link.time_us("all_reduce", 8e6, 8) == SLOW.time_us("all_reduce", 8e6, 8)


def test_two_ports_carry_twice_as_much():
    times = [
        Profile("p", SLOW, ranks_per_host=8, ports=ports)
        .link_of("dp", ranks=range(0, 64, 8))
        .time_us(kind, 8e6, 8)
        for kind in ("all_reduce", "all_to_all")
        for ports in (1, 2)
    ]
    assert times[0] == 2 * times[1]
    assert times[2] == 2 * times[3]


def test_rates_measured_of_one_rank_are_shared_as_well():
    measured = {ONE: (Region(0, 7.0, 2.0),), SEVERAL: (Region(0, 9.0, 2.0),)}
    profile = Profile("p", Link(1.0, 1.0, measured=measured), ranks_per_host=4, ports=1)
    link = profile.link_of("tp", ranks=range(8))
    assert link.parts_us("all_to_all", 14e3, 8, 1, by_messages=True) == (7.0, 7.0)
    shared = 4 * (8 - 4) / 7
    assert link.parts_us("all_to_all", 14e3, 8, 7, by_messages=True) == (9.0, 7.0 * shared)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ports": 1}, "needs ranks_per_host"),
        ({"ports": -1, "ranks_per_host": 2}, "must be a number of network ports"),
        ({"ports": 1.5, "ranks_per_host": 2}, "must be a number of network ports"),
    ],
)
def test_ports_that_cannot_be(fields, said):
    with pytest.raises(PolicyError, match=said):
        Profile("p", SLOW, **fields)


@pytest.mark.parametrize("kind", ["all_reduced", "messagess"])
def test_kinds_that_do_not_exist_are_named(kind):
    with pytest.raises(PolicyError, match="did you mean"):
        Link(1.0, 1.0, sharing={kind: 2.0})
    assert kind not in MEASURED


def test_groups_on_one_link_take_turns_and_others_do_not(fake_group):
    """Two exchanges at once: of two groups between hosts, and of one between and one inside."""
    fake_group(8)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    names = {name: mesh[name].get_group().group_name for name in ("pp", "dp", "tp")}

    def end(first: str, second: str, **links) -> float:
        def function(x, y):
            started = [
                ops.all_reduce(x, "sum", names[first]),
                ops.all_reduce(y, "sum", names[second]),
            ]
            return [ops.wait_tensor(each) for each in started]

        gm = trace(function, torch.ones(250_000), torch.ones(250_000))
        profile = Profile("p", SLOW, intra_host_link=SLOW, ranks_per_host=2, links=links)
        work = work_of(gm.graph, memory(gm.graph), profile)
        assert sum(parse(node) is not None for node in gm.graph.nodes) == 2
        assert {
            costs.prices_of(profile)(names[name], 2).port for name in (first, second)
        }.isdisjoint({HOST})
        return timed(work, gm.graph.nodes).now

    one = SLOW.time_us("all_reduce", 1e6, 2)
    assert end("pp", "dp") == pytest.approx(2 * one)
    assert end("dp", "tp") == pytest.approx(one)
    assert end("pp", "dp", dp=SLOW) == pytest.approx(one)
