"""The contracts between passes: the list is consistent, and a broken contract is detected at
once."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from graphs import code, trace
from torch import fx

import commpass
from commpass import Policy, Rule
from commpass.codecs import operators
from commpass.errors import VerifyError
from commpass.passes import PASSES, GraphInput, Pass, choose, manager, rewrite, run, verify
from commpass.passes.contract import FACTS
from commpass.passes.failures import SiteFailure
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import graph_modules

ops = torch.ops._c10d_functional
NAMES = [step.name for step in PASSES]


def graph():
    def function(x):
        x = ops.wait_tensor(ops.all_reduce(torch.relu(x), "sum", "0"))
        return ops.wait_tensor(ops.all_gather_into_tensor(x * 2, 4, "0"))

    return trace(function, torch.ones(64, 64))


def drive(gm, passes, **rule):
    policy = Policy(rules=[Rule(codec="int8", force=True, **rule)])
    road = GraphInput(gm=gm, direction="forward", policy=policy, profile=commpass.ethernet(1))
    return run(road, "0", tuple(passes), strict=True)


def changed(name: str, **how) -> list[Pass]:
    return [dataclasses.replace(step, **how) if step.name == name else step for step in PASSES]


def test_index_lists_all_passes_in_order_with_what_they_require_and_provide():
    lines = [line for line in manager.__doc__.splitlines() if line.startswith("    ")]
    rows = [tuple(re.split(" {2,}", line.strip())[:3]) for line in lines]
    said = [", ".join(facts) or "-" for step in PASSES for facts in (step.requires, step.provides)]
    assert rows == [
        ("pass", "requires", "provides"),
        *zip(NAMES, said[::2], said[1::2], strict=True),
    ]


def test_documentation_lists_all_passes_in_order():
    text = (Path(__file__).parents[2] / "docs/design.md").read_text()
    assert re.findall(r"^\d+\. \*\*(\w+)\*\*", text, re.MULTILINE) == NAMES


ABOUT_NODES = {"sites", "coded", "plain"}


def lacking(passes) -> list[str]:
    """Return the facts that passes require, but that no earlier pass establishes for them."""
    held, found = set(), []
    for step in passes:
        found += [f"{step.name}: {fact}" for fact in step.requires if fact not in held]
        held = held - ABOUT_NODES if step.mutates else held
        held = held | set(step.provides)
    return found


def test_passes_provide_what_later_passes_require():
    assert not lacking(PASSES)
    assert not lacking([step for step in PASSES if step.needed])


@pytest.mark.parametrize("name", [step.name for step in PASSES if step.provides])
def test_pass_that_another_requires_cannot_be_omitted(name):
    rest = [step for step in PASSES if step.name != name]
    optional = name in ("simplify", "group", "chunk", "fuse", "streams", "move", "sample")
    assert bool(lacking(rest)) != optional


@pytest.mark.parametrize(("first", "second"), [(0, 4), (4, 5), (5, 6), (6, 7), (7, 8)])
def test_passes_in_another_order_lack_facts(first, second):
    order = list(PASSES)
    order[first], order[second] = order[second], order[first]
    assert lacking(order)


def test_pass_that_mutates_the_graph_invalidates_facts_about_it():
    blind = Pass(name="blind", run=lambda road: None, mutates=True)
    assert "rewrite: sites" in lacking([*PASSES[:6], blind, *PASSES[6:]])
    blind = dataclasses.replace(blind, mutates=False)
    assert not lacking([*PASSES[:6], blind, *PASSES[6:]])


def test_post_grad_passes_come_last():
    phases = [step.phase for step in PASSES]
    assert phases == sorted(phases, key=("graph", "post-grad").index)


def test_every_fact_is_promised_by_a_pass():
    assert {fact for step in PASSES for fact in step.provides} == set(FACTS)
    assert {fact for step in PASSES for fact in step.requires} <= set(FACTS)


def erase(road):
    """Remove the last multiplication from the graph."""
    node = next(n for n in reversed(road.gm.graph.nodes) if n.target is torch.ops.aten.mul.Tensor)
    node.replace_all_uses_with(node.args[0])
    road.gm.graph.erase_node(node)


def forget_one(road):
    road.found = road.found[:1]


def unmark(road):
    rewrite.run(road)
    next(n for n in road.gm.graph.nodes if n.target in operators.IMPLEMENTATIONS).meta.pop(MARK)


def no_reason(road):
    choose.run(road)
    sites = [dataclasses.replace(site, reason="") for site in road.plan.sites]
    road.plan_with(sites=tuple(sites))


BROKEN = {
    "a pass that changes more than it says": ("candidates", erase, "changed the graph"),
    "a site that is not known": (
        "simplify",
        forget_one,
        "provides 'sites', but 1 sites are known, 2 are there",
    ),
    "options of other sites": (
        "candidates",
        lambda road: None,
        "2 sites have 0 options",
    ),
    "a decision without a reason": ("choose", no_reason, "has no reason"),
    "an operator without a mark": ("rewrite", unmark, "has no mark"),
    "a site that nothing stands for": ("rewrite", lambda road: None, "nothing stands for"),
    "operators that nobody lowered": ("lower", lambda road: None, "is left"),
}


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("what", BROKEN)
def test_broken_promise_is_found_and_the_graph_is_the_untouched_one(what, fake_group):
    name, wrong, said = BROKEN[what]
    fake_group(4)
    gm = graph()
    before = code(gm)
    outcome = drive(gm, changed(name, run=wrong))
    assert isinstance(outcome.error, VerifyError)
    assert said in str(outcome.error)
    assert f"pass {name!r}" in outcome.plan.fallback
    assert code(gm) == before
    good = drive(graph(), PASSES)
    assert good.error is None
    assert len(good.plan.compressed) == 2


def test_pass_that_only_moves_nodes_is_rolled_back_as_well(fake_group):
    fake_group(4)
    gm = graph()
    before = code(gm)

    def move(road):
        first = next(n for n in road.gm.graph.nodes if n.op == "call_function")
        list(road.gm.graph.nodes)[-2].append(first)
        raise RuntimeError("half way")

    order = Pass(name="order", run=move, mutates=True)
    outcome = drive(gm, [PASSES[0], order])
    assert "half way" in outcome.plan.fallback
    assert code(gm) == before


def test_graph_may_come_again_under_another_policy(fake_group):
    fake_group(4)
    gm = graph()
    first = Policy(rules=[Rule(kind="all_reduce", codec="int8", algorithm="two_shot", force=True)])
    assert len(commpass.rewrite(gm, [], first, strict=True).compressed) == 1
    for policy in (Policy(codecs="int8", off=True), "lossless", "balanced"):
        again = commpass.rewrite(gm, [], policy, strict=True)
        assert not again.fallback
        kinds = [site.kind for site in again]
        assert kinds == ["all_to_all", "all_gather", "all_gather"]


def test_sub_graph_that_several_others_hold_is_one(fake_group):
    fake_group(4)
    shared = trace(lambda x: ops.wait_tensor(ops.all_reduce(x, "sum", "0")), torch.ones(64, 64))

    def holding(**children):
        holder = fx.Graph()
        for name in children:
            holder.get_attr(name)
        holder.output(None)
        return fx.GraphModule(children, holder)

    root = holding(a=holding(shared=shared), b=holding(shared=shared))
    assert [prefix for prefix, _ in graph_modules(root)] == ["", "a.", "a.shared.", "b."]


def test_promises_are_checked_under_strict_and_where_the_environment_says_so(
    fake_group, monkeypatch
):
    fake_group(4)
    policy = Policy(rules=[Rule(codec="int8", force=True)])
    passes = tuple(changed("choose", run=no_reason))

    def outcome(**how):
        road = GraphInput(
            gm=graph(), direction="forward", policy=policy, profile=commpass.ethernet(1)
        )
        return run(road, "0", passes, **how)

    monkeypatch.setenv("COMMPASS_CHECK", "0")
    assert outcome().error is None
    assert "has no reason" in str(outcome(strict=True).error)
    monkeypatch.setenv("COMMPASS_CHECK", "1")
    assert "has no reason" in str(outcome().error)


@pytest.mark.parametrize("more", [-1, 1])
def test_graph_that_sends_other_bytes_than_its_plan_says_is_refused(more, fake_group):
    fake_group(4)
    gm = graph()
    plan = drive(gm, PASSES).plan.sites
    verify.verify(gm, plan)
    said = [dataclasses.replace(site, wire_bytes=site.wire_bytes + more) for site in plan]
    with pytest.raises(SiteFailure) as failure:
        verify.verify(gm, said)
    assert {*failure.value.errors} == {site.name for site in plan}
    for site, error in zip(said, failure.value.errors.values(), strict=True):
        assert f"the plan says {site.wire_bytes} bytes on the wire" in str(error)
        assert f"the graph sends {site.wire_bytes - more}" in str(error)
