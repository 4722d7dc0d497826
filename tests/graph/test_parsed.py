"""Parsed collectives are kept while the passes run, and parsed again after an edit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from functional_ops import ar
from graphs import ops, trace
from torch import fx

from commpass import groups
from commpass.costmodel import ethernet
from commpass.passes import manager
from commpass.passes.context import GraphInput
from commpass.passes.fx import parse as module
from commpass.passes.fx.parse import parse, parsing_once
from commpass.policy import Policy
from commpass.policy.rules import Rule
from commpass.utils.by_identity import cached_by_identity


def graph(x, y):
    return ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0")) + y


@pytest.fixture
def start():
    gm = trace(graph, torch.zeros(4), torch.zeros(4))
    (node,) = gm.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_reduce.default
    )
    return node


def other_input(node: fx.Node) -> fx.Node:
    return node.graph.find_nodes(op="placeholder")[1]


def set_arguments(node: fx.Node) -> None:
    node.args = (other_input(node), *node.args[1:])


def replace_input(node: fx.Node) -> None:
    node.replace_input_with(node.all_input_nodes[0], other_input(node))


def replace_uses(node: fx.Node) -> None:
    node.all_input_nodes[0].replace_all_uses_with(other_input(node))


def set_one_argument(node: fx.Node) -> None:
    node.update_arg(0, other_input(node))


@pytest.mark.parametrize("edit", [set_arguments, replace_input, replace_uses, set_one_argument])
def test_a_kept_call_is_parsed_again_after_an_edit(start, edit):
    with parsing_once():
        before = parse(start)
        assert parse(start) is before
        edit(start)
        assert parse(start).inputs == (other_input(start),)
        assert parse(start).inputs != before.inputs


def test_a_kept_call_is_parsed_again_after_an_edit_of_its_keywords(start):
    with parsing_once():
        assert parse(start).reduce_op == "sum"
        start.args, start.kwargs = start.args[:1], {"reduce_op": "sum", "group_name": "0"}
        assert parse(start).reduce_op == "sum"
        start.kwargs = {"reduce_op": "avg", "group_name": "0"}
        assert parse(start).reduce_op == "avg"


def test_a_kept_call_is_parsed_again_after_a_change_of_its_operator(start):
    with parsing_once():
        assert parse(start).form == "plain"
        start.target = torch.ops._c10d_functional.all_reduce_.default
        assert parse(start).form == "in-place"


def test_calls_are_not_kept_outside_of_the_passes(start):
    assert parse(start) is not parse(start)
    with parsing_once():
        kept = parse(start)
    assert parse(start) is not kept


def test_results_of_python_functions_are_not_kept():
    """They may hold tensors, such as those of a model."""
    seen = []
    cached = cached_by_identity(lambda target: seen.append(target) or len(seen))

    def function(x):
        return x

    alive = weakref.ref(function)
    assert [cached(torch.ops.aten.mm.default) for _ in range(2)] == [1, 1]
    assert [cached(function) for _ in range(2)] == [2, 3]
    del seen[:], function
    gc.collect()
    assert alive() is None


def chain(x, *weights):
    for weight in weights:
        x = ar(torch.relu(x @ weight))
    return x


def parsings(monkeypatch, sites: int) -> int:
    """Return how often the passes parse a collective of a graph."""
    count = 0
    plain = module._parse

    def counted(*args):
        nonlocal count
        count += 1
        return plain(*args)

    gm = trace(chain, torch.zeros(16, 16), *[torch.zeros(16, 16)] * sites)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_parse", counted)
        policy = Policy(rules=[Rule(codec="int8", force=True)])
        given = GraphInput(gm=gm, direction="forward", policy=policy, profile=ethernet(1))
        found = manager.run(given, "0", strict=True)
    assert len(found.plan.compressed) == sites
    return count


def test_passes_parse_the_collectives_of_each_site_a_few_times(monkeypatch, fake_group):
    fake_group(8)
    few, many = parsings(monkeypatch, 4), parsings(monkeypatch, 12)
    assert many - few == 8 * 2  # its own collective, and that of its algorithm


def test_passes_look_up_the_labels_of_a_group_once(monkeypatch, fake_group):
    fake_group(8)
    looked_up, labels = [], groups.labels
    monkeypatch.setattr(groups, "labels", lambda group: looked_up.append(group) or labels(group))
    parsings(monkeypatch, 4)
    assert len(looked_up) == 1
    groups.labels_of("0")
    groups.labels_of("0")
    assert len(looked_up) == 3  # outside of the passes, a new mesh may give a group other labels
