"""When stages end, against explicit timelines."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commpass.costmodel import HOST, Link, Task, finished_us
from commpass.errors import PolicyError


def test_nothing_takes_no_time():
    assert finished_us([]) == 0.0


def test_dependent_steps_add_up():
    tasks = [Task(HOST, 5.0), Task("link", 20.0, 3.0, (0,)), Task(HOST, 7.0, after=(1,))]
    assert finished_us(tasks) == 35.0


def test_compute_hides_behind_exchanges():
    """Two chunks: the second is encoded while the first is sent, and the first is decoded while the
    second is sent."""
    tasks = [
        Task(HOST, 5.0),
        Task("link", 20.0, 3.0, (0,)),  # on the link from 5 to 25, arrives at 28
        Task(HOST, 5.0),  # to 10
        Task("link", 20.0, 3.0, (2,)),  # from 25 to 45, arrives at 48
        Task(HOST, 7.0, after=(1,)),  # from 28 to 35
        Task(HOST, 7.0, after=(3,)),  # from 48 to 55
    ]
    assert finished_us(tasks) == 55.0


def test_rank_that_waits_starts_nothing():
    """An exchange that follows a wait starts no sooner than the end of the wait."""
    tasks = [
        Task("link", 10.0, 10.0),
        Task(HOST, 1.0, after=(0,)),  # from 20 to 21
        Task("link", 10.0, 10.0),  # depends on nothing, but follows the wait: from 21
    ]
    assert finished_us(tasks) == 41.0


def test_computation_takes_longer_beside_a_kernel_that_shares_its_processors():
    tasks = [Task("stream", 10.0, 2.0, overhead_us=2.0, slowdown_us=4.0), Task(HOST, 7.0)]
    assert finished_us(tasks) == 14.0  # the kernel from 2 to 12, computation from 2 to 13
    assert finished_us([*tasks, Task(HOST, 0.0, after=(0,))]) == 14.0
    assert finished_us([*tasks, Task(HOST, 5.0)]) == 18.0
    assert finished_us([Task("stream", 1.0, slowdown_us=4.0)]) == 4.0


def test_links_of_two_levels_carry_at_once():
    tasks = [Task("inside", 10.0), Task("link", 30.0), Task(HOST, 1.0, after=(0, 1))]
    assert finished_us(tasks) == 31.0


@pytest.mark.parametrize("by_messages", [False, True])
def test_latency_and_the_time_on_the_link_are_apart(by_messages):
    link = Link(10.0, 1.0, {"all_to_all": 2.0})
    latency, taken = link.parts_us("all_to_all", 3000, 4, 3, by_messages=by_messages)
    assert (latency, taken) == ((10.0, 3.0) if by_messages else (30.0, 6.0))
    if not by_messages:
        assert link.time_us("all_to_all", 3000, 4, 3) == latency + taken


def test_messages_that_meet_at_a_rank_crowd_each_other_out():
    link = Link(10.0, 1.0, contention_bytes=1000.0)

    def taken(nbytes: int, peers: int, by_messages: bool = True) -> float:
        return link.parts_us("all_to_all", nbytes, 4, peers, by_messages=by_messages)[1]

    assert [taken(400, 3), taken(4000, 3), taken(40_000, 3)] == [0.5, 5.0, 41.0]
    assert taken(4000, 1) == taken(4000, 3, by_messages=False) == 4.0
    with pytest.raises(PolicyError, match="contention_bytes"):
        Link(10.0, 1.0, contention_bytes=-1.0)


tasks = st.lists(
    st.builds(
        lambda *row: row,
        st.sampled_from([HOST, "link", "inside"]),
        st.integers(0, 20),
        st.integers(0, 10),
        st.integers(0, 5),
        st.integers(0, 12),
        st.sets(st.integers(1, 6), max_size=3),
    ),
    min_size=1,
    max_size=9,
)


@given(tasks)
def test_against_the_longest_path_through_all_that_must_follow_something(rows):
    """A graph of instants: when the host reaches a task, when its resource starts it, when the
    resource is free, and when the result is available.

    The end is the longest path.
    """
    graph = nx.DiGraph()
    host, link, made = None, {}, []
    for number, (resource, us, latency, busy, less, back) in enumerate(rows):
        after = tuple(sorted({number - each for each in back if number - each >= 0}))
        slower = less if resource != HOST else 0
        made.append(Task(resource, *map(float, (us, latency)), after, float(busy), float(slower)))
        come, take, free, there = ((number, what) for what in ("come", "take", "free", "there"))
        graph.add_edge(come, take, us=busy)
        graph.add_edge(take, free, us=us)
        graph.add_edge(free, there, us=latency)
        for each in after:
            graph.add_edge((each, "there"), come, us=0)
        if host is not None:  # it has started, or computed, all earlier tasks
            graph.add_edge(host, come, us=0)
        handed = (number, "handed")
        graph.add_edge(come, handed, us=busy + slower)
        host = free if resource == HOST else handed
        if resource != HOST:
            if resource in link:
                graph.add_edge(link[resource], take, us=0)
            link[resource] = free
    assert finished_us(made) == nx.dag_longest_path_length(graph, weight="us")
