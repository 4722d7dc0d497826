"""Find the critical path of a sequence of tasks: its exchanges, and the slack of the other
exchanges.

Tasks run as in ``finished_us``. Their dependencies form a networkx graph of moments: when the rank
reaches a task, and when a link begins it. An edge holds the microseconds that must be between two
moments. A longest path is a critical one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import networkx as nx

from commpass.costmodel.timeline import HOST, Task

Moment = tuple[str, int]
"""``rank`` or ``link``, and the number of a task."""
BEGIN: Moment = ("begin", 0)
END: Moment = ("end", 0)


def dependencies(tasks: Sequence[Task]) -> nx.DiGraph:
    """Return the graph of the moments of some tasks. Moments of the rank without a link or a
    dependency are omitted: they are part of an edge."""
    graph = nx.DiGraph()
    graph.add_node(BEGIN)
    awaited = {number for task in tasks for number in task.after}
    last, since = BEGIN, 0.0  # the rank's last moment, and its busy time since then
    latest: dict[Hashable, int] = {}
    gives: dict[int, tuple[Moment, float]] = {}
    for number, task in enumerate(tasks):
        since += task.overhead_us
        if task.after or task.resource != HOST:
            moment = ("rank", number)
            _connect(graph, last, moment, since)
            for other in task.after:
                source, us = gives[other]
                _connect(graph, source, moment, us + task.overhead_us)
            last, since = moment, task.slowdown_us
        if task.resource == HOST:
            since += task.us
            if number in awaited:
                gives[number] = (last, since + task.latency_us)
            if task.latency_us:
                _connect(graph, last, END, since + task.latency_us)
            continue
        begun = ("link", number)
        _connect(graph, last, begun, 0.0)
        if task.resource in latest:
            before = latest[task.resource]
            _connect(graph, ("link", before), begun, tasks[before].us)
        latest[task.resource] = number
        gives[number] = (begun, task.us + task.latency_us)
        _connect(graph, begun, END, task.us + task.latency_us)
    _connect(graph, last, END, since)
    return graph


def _connect(graph: nx.DiGraph, source: Moment, target: Moment, us: float) -> None:
    """Add an edge between two moments; of several, the longest is kept."""
    known = graph.get_edge_data(source, target, {"us": 0.0})["us"]
    graph.add_edge(source, target, us=max(known, us))


def slack_us(tasks: Sequence[Task]) -> dict[int, float]:
    """Return the slack of each task on a link, by number: how many microseconds later the link
    could begin it without delaying the last task. It is 0 on a critical path."""
    graph = dependencies(tasks)
    order = list(nx.topological_sort(graph))
    before = _longest(graph, order)
    after = _longest(graph.reverse(copy=False), reversed(order))
    longest = before[END]
    links = (moment for moment in order if moment[0] == "link")
    return {moment[1]: max(longest - before[moment] - after[moment], 0.0) for moment in links}


def _longest(graph: nx.DiGraph, order: Iterable[Moment]) -> dict[Moment, float]:
    """Return the length of the longest path to each moment; ``order`` is a topological order."""
    found: dict[Moment, float] = {}
    for moment in order:
        sources = graph.pred[moment].items()
        found[moment] = max((found[each] + edge["us"] for each, edge in sources), default=0.0)
    return found
