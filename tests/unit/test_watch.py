"""Measured times of graphs against predictions: logged once, when they are known."""

from __future__ import annotations

import logging

import pytest

from commpass.distributed import watch
from commpass.distributed.watch import COUNTED, LATE, SKIPPED, Watch, Watched


@pytest.fixture
def clock(monkeypatch):
    """A clock that a function advances."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now[0])
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
    all_graphs = Watch()
    forward = all_graphs.timed(takes(clock, 10), Watched("0 (forward)", 9e3, 20e3, True))
    backward = all_graphs.timed(takes(clock, 30), Watched("0 (backward)", 31e3, 50e3, True))
    for _ in range(SKIPPED + COUNTED + 5):
        assert forward([1]) == [1]
        backward([1])
    (line,) = said(caplog)
    assert line == "2 graphs: predicted 40 ms (70 ms without commpass), measured 40 ms"


def test_first_calls_do_not_count(clock, caplog):
    caplog.set_level(logging.INFO, "commpass")
    graph, first = Watched("0 (forward)", 1e3, 1e3, False), Watch()
    slow = first.timed(takes(clock, 500), graph)
    for _ in range(SKIPPED):
        slow([])
    assert graph.took_us == []


def test_graph_that_is_hardly_called_is_not_waited_for(clock, caplog):
    caplog.set_level(logging.INFO, "commpass")
    both = Watch()
    often = both.timed(takes(clock, 10), Watched("0 (forward)", 9e3, 9e3, False))
    once = both.timed(takes(clock, 10), Watched("1 (forward)", 9e3, 9e3, False))
    once([])
    for _ in range(SKIPPED + COUNTED + LATE + 5):
        often([])
    (line,) = said(caplog)
    assert line.startswith("graph 0 (forward): predicted 9 ms")
    for _ in range(SKIPPED + COUNTED + LATE + 5):
        once([])
    assert len(said(caplog)) == 2


@pytest.mark.parametrize(("judged", "ms", "lines"), [(True, 60, 1), (True, 40, 0), (False, 60, 0)])
def test_sites_slower_than_plain_are_named(clock, caplog, judged, ms, lines):
    caplog.set_level(logging.WARNING, "commpass")
    one = Watch()
    run = one.timed(takes(clock, ms), Watched("3 (backward)", 30e3, 50e3, judged))
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
    assert Watch().timed(boxed, Watched("0", 1, 1, False))._boxed_call
