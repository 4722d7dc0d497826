"""Bodies of coded operators are traced once per process, if nothing distinguishes them."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from graphs import code, ops, trace
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import commpass
from commpass import Policy, Rule
from commpass.codecs import codec, operators
from commpass.passes import lower
from commpass.passes.fx.tracing import inductor_decompositions
from commpass.passes.regions import JoinColumns, Region


def summed(x):
    return ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0")) + 1


@pytest.fixture
def traces(fake_group, monkeypatch):
    """``traces(columns)`` rewrites a graph; it returns the number of traced bodies, and the
    graph."""
    fake_group(4)
    monkeypatch.setattr(lower, "_bodies", {})
    policy = Policy(rules=[Rule(codec="int8", algorithm="two_shot", force=True)])

    def run(columns: int, dynamic: bool = False):
        given = torch.empty(64, columns)
        if dynamic:
            gm = make_fx(
                summed,
                tracing_mode="symbolic",
                decomposition_table=inductor_decompositions(),
            )(given)
        else:
            gm = trace(summed, given)
        with mock.patch.object(
            lower.Bodies, "_trace", autospec=True, side_effect=lower.Bodies._trace
        ) as traced:
            (site,) = commpass.rewrite(gm, [], policy, strict=True)
        assert site.codec == "int8"
        return traced.call_count, gm

    return run


def test_equal_graphs_share_bodies_and_are_the_same(traces):
    first, gm = traces(64)
    again, same = traces(64)
    assert (first > 1, again) == (True, 0)
    assert code(gm) == code(same)
    values = [
        [node.meta["val"] for node in each.graph.nodes if "val" in node.meta] for each in (gm, same)
    ]
    shapes = [[(value.shape, value.dtype) for value in each] for each in values]
    assert shapes[0] == shapes[1]
    assert not {id(value.fake_mode) for value in values[0]} & {
        id(value.fake_mode) for value in values[1]
    }


@pytest.mark.slow
def test_other_sizes_have_bodies_of_their_own(traces):
    traces(64)
    assert traces(128)[0] > 0


@pytest.mark.slow
def test_bodies_of_sizes_that_are_not_fixed_are_not_kept(traces):
    assert traces(64, dynamic=True)[0] > 0
    assert not lower._bodies


def test_another_codec_of_the_same_name_is_not_taken_for_the_first(traces, monkeypatch):
    traces(64)
    coded = sum("int8" in str(key) for key in lower._bodies)
    other = dataclasses.replace(codec("int8"))
    assert other is not codec("int8")
    monkeypatch.setattr(operators, "lookup", lambda name: other)
    assert traces(64)[0] == coded > 1


@pytest.mark.slow
def test_bodies_kept_are_limited_in_number(traces, monkeypatch):
    monkeypatch.setattr(lower, "MOST_BODIES", 3)
    for columns in (64, 128, 192):
        traces(columns)
    assert len(lower._bodies) == 3
    assert traces(192)[1] is not None


def test_bodies_hold_no_fake_values(traces):
    traces(64)
    assert not any(node.meta for body, _ in lower._bodies.values() for node in body.nodes)


def test_regions_of_joins_of_other_widths_are_not_the_same():
    """The part of a join is written with the stride of the whole."""
    graph = fx.Graph()
    x, *joins = (graph.placeholder(name) for name in ("x", "narrow", "wide"))
    node = graph.call_function(torch.ops.aten.relu.default, (x,))
    for each, width in ((x, 64), (node, 64), (joins[0], 128), (joins[1], 256)):
        each.meta["val"] = torch.empty(2, width)
    keys = [
        Region((node,), (x,), (node,), {node: JoinColumns(join, 0)} if join else {}).key()
        for join in (None, *joins)
    ]
    assert len({*keys}) == 3
