"""The critical path of tasks and their slack, against an enumeration of all paths and the effect of
a delay."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import networkx as nx
import pytest

from commpass.costmodel import HOST, Task, finished_us
from commpass.costmodel.critical import BEGIN, END, dependencies, slack_us


def drawn(seed: int, most: int = 9) -> list[Task]:
    """Tasks with whole numbers of microseconds, some on the rank and some on two links."""
    random_ = random.Random(seed)
    tasks = []
    for number in range(random_.randint(1, most)):
        many = random_.choice((0, 0, 1, 2))
        after = tuple(sorted(random_.sample(range(number), min(many, number))))
        on_link = random_.random() < 0.5
        tasks.append(
            Task(
                random_.choice(("tp", "dp")) if on_link else HOST,
                float(random_.randint(0, 9)),
                float(random_.randint(0, 4)) if on_link else 0.0,
                after,
                float(random_.randint(0, 3)) if on_link else 0.0,
                float(random_.randint(0, 6)) if on_link else 0.0,
            )
        )
    return tasks


def edges_of(tasks: Sequence[Task]) -> dict[tuple, dict[tuple, float]]:
    """Return for each moment those that come later, with the time between.

    Every task has its own moments, directly from its definition.
    """
    found: dict[tuple, dict[tuple, float]] = {}

    def add(source, target, us):
        there = found.setdefault(source, {})
        there[target] = max(there.get(target, 0.0), us)

    def is_link(number):
        return tasks[number].resource != HOST

    def rank_us(number):
        return tasks[number].slowdown_us if is_link(number) else tasks[number].us

    for n, task in enumerate(tasks):
        if n == 0:
            add("begin", ("at", 0), task.overhead_us)
        else:
            add(
                ("at", n - 1),
                ("at", n),
                task.overhead_us + rank_us(n - 1),
            )
        for m in task.after:
            source = ("on", m) if is_link(m) else ("at", m)
            add(source, ("at", n), tasks[m].us + tasks[m].latency_us + task.overhead_us)
        if is_link(n):
            add(("at", n), ("on", n), 0.0)
            earlier = [m for m in range(n) if tasks[m].resource == task.resource]
            for m in earlier[-1:]:
                add(("on", m), ("on", n), tasks[m].us)
        add(("on", n) if is_link(n) else ("at", n), "end", task.us + task.latency_us)
        add(("at", n), "end", rank_us(n))
    return found


def all_lengths(edges, moment="begin", length=0.0, seen=()):
    """Yield (length, moments) of every path from a moment to the end."""
    if moment == "end":
        yield length, seen
        return
    for target, us in edges[moment].items():
        yield from all_lengths(edges, target, length + us, (*seen, target))


def end_with_delay(tasks: Sequence[Task], which: int, delay: float) -> float:
    """Return when the last task ends if the link starts task ``which`` later by ``delay``."""
    now, free, done = 0.0, {}, []
    for number, task in enumerate(tasks):
        now = max([now, *(done[each] for each in task.after)]) + task.overhead_us
        if task.resource == HOST:
            now += task.us
            done.append(now + task.latency_us)
            continue
        begun = max(now, free.get(task.resource, 0.0)) + (delay if number == which else 0.0)
        free[task.resource] = begun + task.us
        done.append(begun + task.us + task.latency_us)
        now += task.slowdown_us
    return max([*done, now])


SEEDS = range(60)


@pytest.mark.few(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_critical_sites_are_on_a_longest_path(seed):
    tasks = drawn(seed)
    paths = list(all_lengths(edges_of(tasks)))
    longest = max(length for length, _ in paths)
    assert nx.dag_longest_path_length(dependencies(tasks), weight="us") == longest
    assert longest == finished_us(tasks)
    critical = {m[1] for length, p in paths if length == longest for m in p if m[0] == "on"}
    slack = slack_us(tasks)
    assert {number for number, us in slack.items() if us == 0} == critical
    for number, us in slack.items():
        through = max(length for length, p in paths if ("on", number) in p)
        assert us == longest - through


@pytest.mark.few(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_slack_is_the_delay_that_ends_nothing_later(seed):
    tasks = drawn(seed, 20)
    end = end_with_delay(tasks, -1, 0.0)
    for number, us in slack_us(tasks).items():
        assert end_with_delay(tasks, number, us) == end
        assert end_with_delay(tasks, number, us + 1) == end + 1


def test_hidden_exchange_has_slack_and_one_that_is_waited_for_has_none():
    long = Task(HOST, 100.0)
    start, wait = Task("tp", 30.0, 5.0), Task(HOST, 0.0, after=(0,))
    assert slack_us([start, long, wait]) == {0: 65.0}
    assert slack_us([start, wait, long]) == {0: 0.0}
    assert slack_us([dataclasses.replace(start, us=95.0), long, wait]) == {0: 0.0}


def test_exchange_may_be_exposed_and_not_critical():
    """The rank waits for the first exchange, and then for one on another link that takes longer."""
    long, short = Task("dp", 100.0), Task("tp", 10.0)
    tasks = [long, short, Task(HOST, 0.0, after=(1,)), Task(HOST, 7.0), Task(HOST, 0.0, after=(0,))]
    assert slack_us(tasks) == {0: 0.0, 1: 83.0}


def test_no_task_is_done_at_once():
    assert list(dependencies([]).edges(data="us")) == [(BEGIN, END, 0.0)]
    assert slack_us([]) == {}


@pytest.mark.slow
def test_long_course_is_no_deep_recursion():
    tasks = [Task("tp" if number % 3 else HOST, 1.0) for number in range(30_000)]
    assert len(slack_us(tasks)) == 20_000
