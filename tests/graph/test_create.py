"""Nodes that are created without torch's walk through their arguments, and the nodes that stay."""

from __future__ import annotations

import copy
from functools import partial
from math import inf
from unittest import mock

import pytest
import torch
from functional_ops import ar
from graphs import trace
from torch import fx

from commpass.costmodel import ethernet
from commpass.passes import manager, move
from commpass.passes.context import GraphInput
from commpass.passes.fx.create import call, copy_of, copy_of_graph
from commpass.passes.fx.marks import MARK
from commpass.policy import Policy
from commpass.policy.rules import Rule

aten = torch.ops.aten
SITES = 4


def several() -> fx.Graph:
    """Return a graph with lists, slices, keyword arguments, a default, and a type."""
    graph = fx.Graph()
    x, y = graph.placeholder("x", type_expr=torch.Tensor), graph.placeholder("y", default_value=2)
    both = graph.call_function(aten.cat.default, ([x, x], 0))
    part = graph.call_function(torch.Tensor.__getitem__, (both, (slice(None, y), 0)))
    cast = graph.call_function(aten._to_copy.default, (part,), {"dtype": torch.bfloat16})
    made = graph.call_function(aten.empty.memory_format, ([2, 3],), {"device": "cpu"})
    again = graph.call_method("add", (cast, made), {"alpha": 2})
    graph.output((again, {"both": both}))
    for number, node in enumerate(graph.nodes):
        node.meta["number"] = number
    return graph


def facts(graph: fx.Graph) -> list[tuple[object, ...]]:
    return [
        (
            n.name,
            n.op,
            n.target,
            n.type,
            str(n.args),
            str(n.kwargs),
            str([*n.all_input_nodes, *n.users]),
        )
        for n in graph.nodes
    ]


def test_copied_nodes_are_those_of_torch():
    graph, made, like = several(), fx.Graph(), fx.Graph()
    own, torchs = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        own[node] = copy_of(made, node, own.__getitem__)
        torchs[node] = like.node_copy(node, torchs.__getitem__)
    assert facts(made) == facts(like) == facts(graph)
    assert not any(node.meta for node in made.nodes)
    for node, held in own.items():
        target = node.target if node.op == "call_function" else None
        assert held in made.find_nodes(op=node.op, target=target or node.target)
    made.lint()


def test_calls_are_those_of_torch():
    graph, like = several(), several()
    for each, create in ((graph, partial(call, graph)), (like, like.call_function)):
        x, how = next(iter(each.nodes)), {"dtype": torch.float32}
        with each.inserting_before(each.output_node()):
            create(aten._to_copy.default, (create(aten.cat.default, ([x, x], 1)),), how)
            create(aten.empty.memory_format, ([2],))
    assert facts(graph) == facts(like)


def test_copied_graph_is_torchs_copy_with_the_names_that_are_taken():
    graph = several()
    with graph.inserting_before(graph.output_node()):
        x = next(iter(graph.nodes))
        graph.erase_node(graph.call_function(aten.cat.default, ([x],)))
    made, like = copy_of_graph(graph), copy.deepcopy(graph)
    assert facts(made) == facts(like)
    assert [node.meta for node in made.nodes] == [node.meta for node in graph.nodes]
    next(iter(made.nodes)).meta["number"] = -1
    assert next(iter(graph.nodes)).meta["number"] == 0
    names = []
    for each in (graph, made):
        with each.inserting_before(each.output_node()):
            names.append(each.call_function(aten.cat.default, ([next(iter(each.nodes))],)).name)
    assert names[0] == names[1] == "cat_default_2"


def chain(x, *weights):
    for weight in weights:
        x = ar(torch.relu(x @ weight))
    return x


def gradients(x, *weights):
    found = []
    for weight in weights:
        x = torch.relu(x @ weight)
        found.append(ar(x.t() @ x))
    return found


def repeated(x, *weights):
    x = ar(torch.relu(x @ weights[0]))
    for _ in weights[1:]:
        x = ar(x)
    return x


def compressed(function, *skip: str) -> manager.PassContext:
    gm = trace(function, torch.zeros(64, 64), *[torch.zeros(64, 64)] * SITES)
    rule = Rule(codec="int8", algorithm="one_shot", force=True)
    policy = Policy(rules=[rule], group_bytes=0, skip=skip)
    given = GraphInput(
        gm=gm, direction="backward", policy=policy, profile=ethernet(1), kernels=True
    )
    found = manager.run(given, "0", strict=True)
    assert len(found.plan.compressed) == SITES
    return found


@pytest.mark.parametrize("function", [chain, gradients])
def test_every_inserted_value_is_used(fake_group, function):
    fake_group(8)
    graph = compressed(function, "move").gm.graph
    inserted = [node for node in graph.nodes if MARK in node.meta]
    assert inserted
    unused = [node for node in inserted if not node.users and not node.is_impure()]
    assert [n for n in unused if n.target is not torch.ops.commpass.kernel_.default] == []


@pytest.mark.parametrize("function", [chain, gradients, repeated])
def test_what_sites_encode_stays_in_the_graph(fake_group, function):
    fake_group(8)
    found = compressed(function, "fuse", "simplify", "move", "sample")
    kept = {id(node.meta.get("val")) for node in found.gm.graph.nodes}
    assert len(found.encoded) == SITES
    assert all(id(value) in kept for each in found.encoded.values() for value in each.values)


@pytest.mark.parametrize(("function", "once"), [(chain, True), (gradients, False)])
def test_buffers_of_needed_kernels_are_no_delayed_computation(fake_group, function, once):
    fake_group(8)
    with mock.patch.object(move, "schedule", side_effect=move.schedule) as orders:
        compressed(function)
    windows = {each.args[2] for each in orders.call_args_list if each.args[3] < inf}
    assert 0 in windows
    assert (windows == {0}) is once


def test_inputs_inserted_for_a_copy_come_before_it():
    graph = several()
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = copy_of(made, node, copied)
        return copies[node]

    made.output(copied(next(node for node in graph.nodes if node.name == "add")))
    made.lint()
    assert [node.name for node in made.nodes][-2:] == ["add", "output"]
