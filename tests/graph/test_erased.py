"""Erased nodes cannot be read, so the facts of rules are recorded earlier.

Ranks compare the numbers that a rule moves across a collective, and the sites that it merges.
"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from functional_ops import ag, ar, rs
from graphs import as_rank, ops, trace
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import commpass
from commpass.errors import VerifyError
from commpass.passes.fx.erase import CHECK, Erased, erase
from commpass.policy import Policy

wait = ops.wait_tensor
SLOW = commpass.ethernet(0.001)
PACKAGE = Path(commpass.__file__).parent
X = torch.ones(64, 32)


def erased() -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    graph.output(x)
    erase(node)
    return node


READ = ("args", "kwargs", "target", "op", "users", "meta", "all_input_nodes", "next", "graph")


@pytest.mark.parametrize("what", READ)
def test_erased_node_cannot_be_read(what):
    with pytest.raises(VerifyError, match=f"mul_tensor was erased, and then its {what} was read"):
        getattr(erased(), what)


def test_erased_node_has_no_place_in_an_order():
    node = erased()
    for compare in (lambda: node < node, lambda: max(node, node), lambda: node >= node):
        with pytest.raises(VerifyError, match="its place was read"):
            compare()


def test_erased_node_can_be_named_and_looked_up():
    node = erased()
    assert node.name == "mul_tensor"
    assert repr(node) == "mul_tensor (erased)"
    assert {node: 1}[node] == 1
    assert isinstance(node, fx.Node)


def test_erased_node_is_as_torch_has_it_without_the_checks(monkeypatch):
    monkeypatch.setenv(CHECK, "0")
    node = erased()
    assert type(node) is fx.Node
    assert node.args == (None, 2.0)


def test_other_nodes_of_the_graph_can_be_read():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(torch.ops.aten.neg.default, (x,)) for _ in range(2))
    graph.output(second)
    erase(first)
    assert isinstance(first, Erased)
    assert list(x.users) == [second]
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]
    graph.lint()


@pytest.mark.slow
def test_nodes_are_erased_in_one_place_only():
    places = {
        f"{file.relative_to(PACKAGE)}: {call.func.attr}"
        for folder in ("passes", "parallel")
        for file in (PACKAGE / folder).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("erase_node", "eliminate_dead_code")
    }
    assert places == {"passes/fx/erase.py: erase_node"}


# --- facts of rules -------------------------------------------------------------------------------


def a2a(x):
    return wait(ops.all_to_all_single(x, [16] * 4, [16] * 4, "0"))


def narrowed(x, gather, between, mesh=None):
    return between(gather(x.sin())).bfloat16() + 1


def added(x, between, mesh):
    return between(ar(x.sin())) + ar(x.cos())


def scattered_and_added(x, between, mesh):
    return between(rs(x.sin())) - rs(x.cos())


def summed_twice(x, between, mesh):
    dp, tp = (mesh.get_group(name).group_name for name in ("dp", "tp"))
    return ar(between(ar(x.sin(), group=tp)), group=dp) + 1


def by_scalar(x, k):
    return torch.ops.aten.mul.Scalar(x, k)


AROUND = {
    "gather": (partial(narrowed, gather=ag), "gather then narrow"),
    "all to all": (partial(narrowed, gather=a2a), "gather then narrow"),
    "sum": (added, "sum of sums"),
    "scatter": (scattered_and_added, "sum of sums"),
    "nested": (summed_twice, "nested groups"),
}
SCALES = {
    "times": (lambda y, k: y * k, lambda k: (f"times {k}",)),
    "scalar": (by_scalar, lambda k: (f"times {k}",)),
    "divided": (lambda y, k: y / k, lambda k: (f"divided by {k}",)),
    "negated": (lambda y, k: -y * k, lambda k: ("times -1", f"times {k}")),
    "between views": (
        lambda y, k: (y.view(-1) * k).view(y.shape) / 3,
        lambda k: (f"times {k}", "divided by 3"),
    ),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("place", AROUND)
@pytest.mark.parametrize("scale", SCALES)
def test_plan_names_the_numbers_that_a_rule_moves(place, scale):
    """Ranks with different numbers plan differently, so that they fall back."""
    (around, rule), (scaled, said) = AROUND[place], SCALES[scale]
    digests = set()
    for rank in range(2):
        k = 0.5 + 2.0 * rank
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            gm = trace(partial(around, between=partial(scaled, k=k), mesh=mesh), X)
            plan = commpass.rewrite(gm, [], Policy(group_bytes=0), profile=SLOW, strict=True)
        assert [(step.rule, step.moved) for step in plan.simplified] == [(rule, said(k))]
        digests.add(plan.digest())
    assert len(digests) == 2


def test_ranks_with_the_same_numbers_plan_alike():
    digests = set()
    for rank in range(2):
        with as_rank(rank, 4):
            gm = trace(partial(narrowed, gather=ag, between=lambda y: -y * 3.0), X)
            digests.add(commpass.rewrite(gm, [], Policy(), profile=SLOW, strict=True).digest())
    assert len(digests) == 1


def test_plan_says_which_sites_a_rule_merged():
    """Each rank can merge only one of two pairs, since its other number is 0: not the same one."""

    def function(x, k):
        first = ar(x.sin()) * k + ar(x.cos())
        return first * (ar(x.exp()) * (2.0 - k) + ar(x.tan()))

    plans = []
    for k in (0.0, 2.0):
        with as_rank(0, 4):
            gm = trace(partial(function, k=k), X)
            plans.append(commpass.rewrite(gm, [], Policy(group_bytes=0), profile=SLOW, strict=True))
    merged = [[(step.rule, step.moved, step.numbers) for step in p.simplified] for p in plans]
    assert merged == [
        [("sum of sums", ("times 2.0",), (2, 3))],
        [("sum of sums", ("times 2.0",), (0, 1))],
    ]
    assert [[site.kind for site in plan] for plan in plans] == [["all_reduce"] * 3] * 2
    assert plans[0].digest() != plans[1].digest()
