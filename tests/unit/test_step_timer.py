"""Measured times of graphs against predictions: logged once, when they are known."""

from __future__ import annotations

import logging

import pytest

from commpass.distributed import step_timer
from commpass.distributed.step_timer import COUNTED, LATE, SKIPPED, StepTimer, TimedGraph


@pytest.fixture
def clock(monkeypatch):
    """A clock that a function advances."""
    now = [0.0]
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: now[0])
    return now


def takes(clock, ms: float):
    def function(inputs):
        clock[0] += ms / 1e3
        return inputs

    return function


def said(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "commpass"]


def test_one_line_when_all_graphs_are_known(clock, caplog):
    caplog.set_level(logging.INFO, "commpass")
    all_graphs = StepTimer()
    forward = all_graphs.with_timing(takes(clock, 10), TimedGraph("0 (forward)", 9e3, 20e3, True))
    backward = all_graphs.with_timing(
        takes(clock, 30), TimedGraph("0 (backward)", 31e3, 50e3, True)
    )
    for _ in range(SKIPPED + COUNTED + 5):
        assert forward([1]) == [1]
        backward([1])
    (line,) = said(caplog)
    assert line == "2 graphs: predicted 40 ms (70 ms without commpass, 43% less), measured 40 ms"


def test_first_calls_do_not_count(clock, caplog):
    caplog.set_level(logging.INFO, "commpass")
    graph, first = TimedGraph("0 (forward)", 1e3, 1e3, False), StepTimer()
    slow = first.with_timing(takes(clock, 500), graph)
    for _ in range(SKIPPED):
        slow([])
    assert graph.times_us == []


def test_graph_that_is_hardly_called_is_not_waited_for(clock, caplog):
    caplog.set_level(logging.INFO, "commpass")
    both = StepTimer()
    often = both.with_timing(takes(clock, 10), TimedGraph("0 (forward)", 9e3, 9e3, False))
    once = both.with_timing(takes(clock, 10), TimedGraph("1 (forward)", 9e3, 9e3, False))
    once([])
    for _ in range(SKIPPED + COUNTED + LATE + 5):
        often([])
    (line,) = said(caplog)
    assert line.startswith("graph 0 (forward): predicted 9 ms")
    for _ in range(SKIPPED + COUNTED + LATE + 5):
        once([])
    assert len(said(caplog)) == 2


@pytest.mark.parametrize(
    ("warns_if_slower", "ms", "lines"), [(True, 60, 1), (True, 40, 0), (False, 60, 0)]
)
def test_sites_slower_than_plain_are_named(clock, caplog, warns_if_slower, ms, lines):
    caplog.set_level(logging.WARNING, "commpass")
    one = StepTimer()
    run = one.with_timing(takes(clock, ms), TimedGraph("3 (backward)", 30e3, 50e3, warns_if_slower))
    for _ in range(SKIPPED + COUNTED + 1):
        run([])
    found = said(caplog)
    assert len(found) == lines
    if lines:
        assert "graph 3 (backward) takes 60 ms, more than the 50 ms" in found[0]
        assert "commpass probe --kernels" in found[0]


def test_calling_convention_stays():
    def boxed(inputs): ...

    boxed._boxed_call = True
    assert StepTimer().with_timing(boxed, TimedGraph("0", 1, 1, False))._boxed_call
