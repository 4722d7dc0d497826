"""Sites that the caller of the passes excludes stay uncompressed with a reason; other sites are
unaffected."""

from __future__ import annotations

import dataclasses

import pytest
from graphs import collectives, ops, trace
from torch import ones

import commpass
from commpass.errors import PolicyError
from commpass.passes.context import GraphInput
from commpass.passes.manager import run
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
SLOW = commpass.ethernet(0.01)
INT8 = Policy(rules=[Rule(codec="int8", force=True)])
WHY = "uncompressed by a test"


@pytest.fixture(autouse=True)
def _group(fake_group):
    fake_group(2)


def planned(gm, excluded=None, policy=INT8, profile=SLOW):
    road = GraphInput(gm=gm, direction="forward", policy=policy, profile=profile)
    return run(road, "0", strict=True, excluded=excluded)


def three(x, y, z):
    return [wait(ops.all_reduce(each * 2, "sum", "0")) + 1 for each in (x, y, z)]


def joined(x, y):
    one, two = ops.all_reduce(x.sin(), "sum", "0"), ops.all_reduce(y.cos(), "sum", "0")
    return wait(one) + 1, wait(two) + 1


def product(x, w):
    return wait(ops.all_reduce(x @ w, "sum", "0")) @ w


PROGRAMS = {
    "plain": (three, [ones(1000), ones(2000), ones(3000)], INT8, SLOW),
    "grouped": (joined, [ones(1000), ones(2000)], INT8, commpass.ethernet(10)),
    "split": (
        product,
        [ones(128, 64), ones(64, 64)],
        dataclasses.replace(INT8, rows=2, more_memory=10.0),
        SLOW,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_names_of_sites_are_the_same_on_the_restored_graph(name):
    function, inputs, policy, profile = PROGRAMS[name]
    gm = trace(function, *inputs)
    gm.graph.erase_node(gm.graph.call_function(ops.all_reduce, (None, "sum", "0")))  # uses a name
    before, seen = gm.code, []
    for _ in range(3):
        outcome = planned(gm, policy=policy, profile=profile)
        steps = (outcome.plan.grouped, outcome.plan.split)
        seen.append((steps, [site.name for site in outcome.plan], gm.code))
        outcome.restore("once more")
        assert gm.code == before
    assert seen[0][2] != before
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.slow
def test_excluded_site_is_left_alone_and_its_neighbours_are_not():
    gm = trace(three, *PROGRAMS["plain"][1])
    first = planned(gm)
    names = [site.name for site in first.plan]
    assert len(first.plan.compressed) == 3
    first.restore("once more")
    plan = planned(gm, {names[1]: WHY}).plan
    assert [site.name for site in plan] == names
    assert [site.compressed for site in plan] == [True, False, True]
    assert plan.sites[1].reason == WHY
    assert plan.sites[1].unsupported_reason is None
    assert not plan.fallback
    assert [kind for kind, _, _ in collectives(gm)].count("all_reduce") == 1


@pytest.mark.parametrize("which", ["member", "whole"])
def test_grouped_site_is_left_alone_with_its_group(which):
    function, inputs, policy, profile = PROGRAMS["grouped"]
    gm = trace(function, *inputs)
    first = planned(gm, policy=policy, profile=profile)
    (fusion,) = first.plan.grouped
    assert first.plan.compressed
    first.restore("once more")
    name = fusion.into if which == "whole" else fusion.sites[1]
    plan = planned(gm, {name: WHY}, policy, profile).plan
    assert [(site.name, site.compressed, site.reason) for site in plan] == [
        (fusion.into, False, WHY)
    ]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("which", ["whole", "chunk"])
def test_chunks_of_one_collective_are_excluded_together(which):
    function, inputs, policy, profile = PROGRAMS["split"]
    gm = trace(function, *inputs)
    first = planned(gm, policy=policy, profile=profile)
    (split,) = first.plan.split
    assert len(first.plan.compressed) == 2
    first.restore("once more")
    name = split.site if which == "whole" else split.into[1]
    plan = planned(gm, {name: WHY}, policy, profile).plan
    assert [(site.name, site.compressed, site.reason) for site in plan] == [
        (part, False, WHY) for part in split.into
    ]


@pytest.mark.slow
def test_excluded_name_that_no_site_has_changes_nothing():
    plans = [
        planned(trace(three, *PROGRAMS["plain"][1]), excluded).plan
        for excluded in (None, {"all_reduce_99": WHY})
    ]
    assert plans[0] == plans[1]
    assert len(plans[0].compressed) == 3


def test_excluded_site_is_left_alone_though_a_rule_forces_what_it_cannot_do():
    policy = Policy(rules=[Rule(codec="topk", force=True)])
    gm = trace(three, *PROGRAMS["plain"][1])
    error = planned(gm, policy=policy).error
    assert isinstance(error, PolicyError)
    assert "forces a codec" in str(error)
    names = ("all_reduce", "all_reduce_1", "all_reduce_2")
    plan = planned(gm, dict.fromkeys(names, WHY), policy).plan
    assert [site.reason for site in plan] == [WHY] * 3
