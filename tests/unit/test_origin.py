"""What distinguishes a recompiled graph from another one: its code, and the call of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commpass.distributed import origin
from commpass.distributed.owners import Calls


class Recorder:
    """A backend that records the origin of each graph that it gets."""

    def __init__(self):
        self.found: list[origin.Origin] = []

    def __call__(self, gm, example_inputs):
        self.found.append(Calls(gm, example_inputs, False).origin)
        return gm.forward


@pytest.fixture
def recorder():
    torch._dynamo.reset()
    yield Recorder()
    torch._dynamo.reset()


def test_code_that_is_compiled_again_has_the_same_origin(recorder):
    def function(x, scale):
        return x * scale

    compiled = torch.compile(function, backend=recorder, dynamic=False)
    for given in ((torch.ones(3), 1.0), (torch.ones(4), 1.0), (torch.ones(4), 2.0)):
        compiled(*given)
    assert len(recorder.found) == 3
    assert len(set(recorder.found)) == 1
    assert recorder.found[0].function == recorder.found[0].code != ""


def test_graphs_behind_a_break_are_of_the_same_function(recorder):
    def function(x):
        x = x + 1
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        return x * 3

    torch.compile(function, backend=recorder)(torch.ones(3))
    assert len({each.function for each in recorder.found}) == 1
    assert len({each.code for each in recorder.found}) == 3


@pytest.mark.parametrize("body", ["x * 3", "x.sin()", "x * 2 + 1"])
def test_functions_of_one_name_and_line_are_distinguished(body, recorder):
    for each in ("x * 2", body):
        space: dict = {}
        exec(f"def function(x): return {each}", space)
        torch.compile(space["function"], backend=recorder)(torch.ones(3))
    first, second = recorder.found
    assert first.function != second.function


@pytest.mark.parametrize("wraps", [False, True])
def test_function_has_one_origin_if_torch_wraps_it_or_not(wraps, recorder):
    """torch 2.11 wraps functions without a file; by this setting every version wraps all."""

    def first(x):
        return x * 2

    def second(x):
        return x * 3

    for each in (first, second):
        with torch._dynamo.config.patch(wrap_top_frame=wraps):
            torch.compile(each, backend=recorder)(torch.ones(3))
    assert recorder.found == [origin.origin_of(each.__code__) for each in (first, second)]


def test_code_of_torchs_own_tells_nothing(recorder):
    torch.compile(nn.Sequential(nn.Linear(3, 3)), backend=recorder)(torch.ones(3))
    assert recorder.found == [origin.UNKNOWN]


def test_graph_by_hand_is_known_by_its_operators():
    def graph_of(function):
        return torch.fx.symbolic_trace(function)

    first = origin.origin_of_graph(graph_of(lambda x: torch.sin(x) + 1))
    assert first == origin.origin_of_graph(graph_of(lambda y: torch.sin(y) + 1))
    assert first != origin.origin_of_graph(graph_of(lambda x: torch.cos(x) + 1))
    assert first.code != ""


def test_each_call_of_a_code_and_direction_is_another_one():
    code = origin.Origin("f", "f")
    try:
        first = origin.call_of(code, "forward")
        assert first == origin.call_of(code, "forward")
        assert first != origin.call_of(code, "backward")
        assert first != origin.call_of(origin.Origin("g", "g"), "forward")
        origin.count_call(code, "forward")
        second = origin.call_of(code, "forward")
        assert second != first
        origin.forget_calls()
        assert origin.call_of(code, "forward") == first
    finally:
        origin.forget_calls()
