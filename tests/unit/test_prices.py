"""Prices of the hops of an algorithm, against times computed from formulas and messages counted one
by one."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest

from commpass.collectives import Payload, Request, read_stages
from commpass.costmodel import HOST, KernelRate, Kernels, Link, Profile, finished_us, prices
from commpass.costmodel.links import ONE, Region, crossing
from commpass.costmodel.profile import INTRA_HOST, LINK, profile_named
from commpass.plan.stage import ALL, BLOCK, NEXT, STRIDE, Stage, all_to_all

NODE, RANKS, SHARD = 8, 64, 1024
"""Ranks of a host and of a group, and the number of values of the shard that each rank sums."""
FREE = Kernels(0.0, KernelRate(0.0, 0.0))
PROFILE = Profile(
    "hosts",
    Link(10.0, 1.0),
    intra_host_link=Link(2.0, 100.0),
    ranks_per_host=NODE,
    ports=1,
    kernels=FREE,
)


def of_group(profile: Profile, ranks: int = RANKS):
    return prices(profile, ranks, ["tp"])


def exchanges(spec: str, profile: Profile = PROFILE, *, by_messages: bool = False) -> list:
    """Return port, latency and microseconds on the link of each exchange of an uncoded all_reduce
    of float32 values, and its end."""
    import torch

    request = Request("0", RANKS, by_messages=by_messages)
    payload = Payload(RANKS * SHARD, 1, torch.float32)
    found = read_stages("all_reduce", spec, "raw", payload, request)
    tasks = [of_group(profile).task(stage) for stage in found]
    rows = [(task.resource, task.latency_us, task.us) for task in tasks if task.resource != HOST]
    return [*rows, finished_us(tasks)]


def test_hop_inside_a_host_takes_its_link_and_one_between_hosts_their_port():
    """There are 7 messages of 8 shards inside, and 7 of one shard between hosts.

    The latter are sent by all 8 ranks through one port. A ring of shards follows, of which one rank
    of a host sends through its port.
    """
    shard_us = SHARD * 4 / 1e3
    inner, outer, gather, end = exchanges("hierarchical(node=8)")
    assert inner == (INTRA_HOST, 7 * 2.0, pytest.approx(7 * 8 * shard_us / 100))
    assert outer == (LINK, 7 * 10.0, pytest.approx(7 * shard_us * NODE))
    assert gather == (LINK, 63 * 10.0, pytest.approx(63 * shard_us))
    assert end == pytest.approx(sum(sum(times) for _, *times in (inner, outer, gather)))


def test_hop_between_hosts_has_its_own_port_where_each_rank_has_one():
    profile = Profile(
        "p",
        PROFILE.link,
        intra_host_link=PROFILE.intra_host_link,
        ranks_per_host=NODE,
        ports=NODE,
        kernels=FREE,
    )
    _, outer, *_ = exchanges("hierarchical(node=8)", profile)
    assert outer == (LINK, 70.0, pytest.approx(7 * SHARD * 4 / 1e3))


@pytest.mark.parametrize("spec", ["hierarchical(node=8)", "two_shot", "one_shot", "ring"])
def test_a_port_for_each_rank_is_as_many_ports_as_ranks(spec):
    """Also on links with protocols, whose rings of the whole group divide their bytes among all
    ports, while the second hop of a hierarchy has one port for each of its groups."""
    profile = profile_named("dgx-h100")
    assert profile is not None
    assert profile.ports == NODE
    none_shared = dataclasses.replace(profile, ports=0)
    assert exchanges(spec, none_shared) == exchanges(spec, profile)


def test_parts_that_are_not_hosts_go_by_the_port_that_their_bytes_pass():
    """Parts of 16 ranks on two hosts each: 8 of the 15 others are on the other host.

    The second hop is between 4 of those parts, all on other hosts.
    """
    inner, outer, *_ = exchanges("hierarchical(node=16)")
    assert inner == (LINK, 150.0, pytest.approx(15 * 4 * SHARD * 4 / 1e3 * NODE * 8 / 15))
    assert outer == (LINK, 30.0, pytest.approx(3 * SHARD * 4 / 1e3 * NODE))


def test_parts_of_a_host_without_a_link_of_their_own_do_not_pass_the_port():
    inner, *_ = exchanges(
        "hierarchical(node=8)", Profile("p", PROFILE.link, ranks_per_host=NODE, ports=1)
    )
    assert inner == (LINK, 70.0, pytest.approx(7 * 8 * SHARD * 4 / 1e3))


@pytest.mark.parametrize("by_messages", [False, True])
@pytest.mark.parametrize("spec", ["ring", "semi_ring"])
def test_one_rank_of_a_host_sends_to_the_next_host(spec, by_messages):
    """The 8 ranks of a host send through its port as much as one of them."""
    first, *_ = exchanges(spec, by_messages=by_messages)
    messages = {"ring": 1, "semi_ring": 2}[spec]
    latency = 10.0 if by_messages else 10.0 * messages
    assert first == (LINK, latency, pytest.approx(messages * SHARD * 4 / 1e3))


PARTS = [
    (on_host, hosts, size)
    for on_host, hosts, size in itertools.product(range(1, 9), range(1, 9), range(2, 33))
    if on_host * hosts > size and on_host * hosts % size == 0
]


@pytest.mark.parametrize("reach", [BLOCK, STRIDE])
def test_bytes_that_leave_a_host_are_those_of_its_messages(reach):
    for on_host, hosts, size in PARTS:
        check_leaving(on_host, hosts, size, reach)


def check_leaving(on_host: int, hosts: int, size: int, reach: str) -> None:
    ranks = on_host * hosts
    step = 1 if reach == BLOCK else ranks // size
    left: Counter[int] = Counter()
    for rank in range(ranks):
        first = rank // size * size if reach == BLOCK else rank % step
        for other in range(first, first + size * step, step):
            if other // on_host != rank // on_host:
                left[rank // on_host] += 1
    most = max(left.values(), default=0)
    assert crossing(reach, size - 1, ranks, on_host) * (size - 1) == pytest.approx(most)


@pytest.mark.parametrize(
    ("to", "source", "reach"),
    [
        ([4, 5, 6, 7], [4, 5, 6, 7], BLOCK),
        ([1, 5, 9], [1, 5, 9], STRIDE),
        ([6], [4], NEXT),
        ([4, 6], [4, 6], NEXT),
        (range(12), range(12), ALL),
        ([4, 6, 9], [4, 6, 9], ALL),
        ([5, 6, 7, 8], [5, 6, 7, 8], ALL),  # no block of four begins there
        ([4, 5, 6, 7], [4, 5], ALL),
        ([], [], ALL),
    ],
)
def test_exchange_reaches(to, source, reach):
    sent, received = ([int(rank in some) for rank in range(12)] for some in (to, source))
    found = all_to_all(100 * sum(sent), sent, received, 5, by_messages=False)
    away = len(set(to) - {5})
    assert (found.reach, found.peers, found.leaving) == (reach, away, 100 * away)


def test_measurement_of_messages_holds_the_time_for_which_a_rank_is_busy():
    """A single exchange takes the measured time, and no more; the rank starts several at once one
    after the other."""
    region = (Region(0.0, 300.0, 1.0),)
    message = Stage(role="exchange", kind="all_to_all", leaving=5000, peers=1, by_messages=True)
    for overhead_us, one in ((0.0, 305.0), (100.0, 305.0), (400.0, 305.0)):
        link = Link(1.0, 1.0, overhead_us=overhead_us, measured={ONE: region})
        task = of_group(Profile("p", link, kernels=FREE), 4).task(message)
        assert finished_us([task]) == pytest.approx(one)
        assert task.overhead_us == min(overhead_us, 300.0)
        assert finished_us([task, task]) == pytest.approx(one + max(task.overhead_us, 5.0))
    stated = of_group(Profile("p", Link(10.0, 1.0, overhead_us=100.0)), 4).task(message)
    assert (stated.overhead_us, stated.latency_us, stated.us) == (100.0, 10.0, 5.0)


@pytest.mark.parametrize(("members", "port"), [(range(4), INTRA_HOST), ((0, 1, 2, 8), LINK)])
def test_blocks_of_ranks_that_are_on_hosts_unevenly_pass_the_port(members, port):
    stage = Stage(role="exchange", kind="all_to_all", nbytes=8, leaving=4, peers=1, reach=BLOCK)
    assert prices(PROFILE, 4, ["tp"], members).task(stage).resource == port


@pytest.mark.parametrize("role", ["sum", "enter", "leave"])
def test_parts_of_other_kernels_take_no_time(role):
    assert of_group(PROFILE).task(Stage(role=role, values=1 << 20)).us == 0.0


def test_group_whose_labels_are_not_known_has_the_links_of_any_label():
    profile = Profile("p", Link(1.0, 1.0), links={"*": Link(7.0, 1.0)})
    assert prices(profile, 4, []).link == prices(profile, 4, [""]).link == Link(7.0, 1.0)
