"""simplify and what the policy allows.

Sites that are allowed different things are not merged. The result of a rule is allowed what the
original sites are. Rules are reported with the original sites.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from functional_ops import ag, ar, rs
from graphs import ops, trace
from torch.distributed.device_mesh import init_device_mesh

import commpass
from commpass.distributed.summary import Summary
from commpass.passes.fx.parse import parse
from commpass.policy import Policy
from commpass.policy.annotate import KEY
from commpass.policy.rules import Annotation, Rule

wait = ops.wait_tensor
X = torch.ones(64, 32)
SLOW = commpass.ethernet(0.001)


def labelled(function, paths=(), words=(), x=X):
    """A graph whose collectives, in order, are in these modules and have these annotations."""
    gm = trace(function, x)
    nodes = [node for node in gm.graph.nodes if parse(node)]
    for node, path in zip(nodes, paths, strict=False):
        node.meta["nn_module_stack"] = {path: (path, torch.nn.Module)}
    for node, word in zip(nodes, words, strict=False):
        if word is not None:
            node.meta["custom"] = {KEY: word.to_json()}
    return gm


def planned(gm, **policy):
    return commpass.rewrite(gm, [], Policy(**policy), profile=SLOW, strict=True)


def rules(plan):
    return [step.rule for step in plan.simplified]


SUM = lambda x: ar(x.sin()) + ar(x.cos())  # noqa: E731
EQUAL = lambda x: ar(x.sin()) * ar(x.sin())  # noqa: E731
KEPT = Rule(module="router", keep=True)


@pytest.mark.few(5)
@pytest.mark.parametrize("order", [("router", "mlp"), ("mlp", "router")])
@pytest.mark.parametrize("function", [SUM, EQUAL])
@pytest.mark.parametrize("said", ["by a rule", "in the model"])
def test_kept_sites_are_not_merged_with_compressed_ones(function, order, said, fake_group):
    fake_group(8)
    words = [Annotation(keep=True) if path == "router" else None for path in order]
    by_a_rule = said == "by a rule"
    gm = labelled(function, order, [] if by_a_rule else words)
    plan = planned(gm, codecs="int8", rules=[KEPT] if by_a_rule else [])
    assert rules(plan) == []
    codecs = {site.module: site.codec for site in plan}
    assert codecs == {"router": "none", "mlp": "int8"}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "terms",
    [{"codec": "int4"}, {"max_error": 0.5}, {"force": True}, {"algorithm": "ring"}, {"keep": True}],
)
def test_sites_with_equal_permissions_alone_are_merged(terms, fake_group):
    fake_group(8)
    paths = ("router", "mlp")
    other = Rule(module="router", **terms)
    assert rules(planned(labelled(SUM, paths), codecs="int8", rules=[other])) == []
    same = [other, Rule(module="mlp", **terms)]  # two equivalent rules
    assert rules(planned(labelled(SUM, paths), codecs="int8", rules=same)) == ["sum of sums"]


def test_keep_changes_nothing_where_nothing_is_compressed(fake_group):
    fake_group(8)
    assert rules(planned(labelled(SUM, ("router", "mlp")), rules=[KEPT])) == ["sum of sums"]


@pytest.mark.slow
def test_gather_of_scatter_and_nested_groups_merge_only_what_is_allowed_the_same(fake_group):
    fake_group(8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dp, tp = (mesh.get_group(name).group_name for name in ("dp", "tp"))
    paths = ("router", "mlp")
    for function, rule in (
        (lambda x: ag(rs(x * 2)).sin(), "gather of scatter"),
        (lambda x: ar(ar(x.sin(), group=tp), group=dp) + 1, "nested groups"),
    ):
        assert rules(planned(labelled(function, paths), codecs="int8", rules=[KEPT])) == []
        assert rules(planned(labelled(function, paths), codecs="int8")) == [rule]


def test_sites_that_a_rule_makes_are_allowed_what_they_stand_for(fake_group):
    """A scatter made from an all_reduce is not a site for rules on reduce_scatter."""
    fake_group(8)
    own = lambda x: ar(x * 2)[:8] + 1  # noqa: E731
    for kind, codec in (("all_reduce", "int8"), ("reduce_scatter", "none")):
        plan = planned(labelled(own), rules=[Rule(kind=kind, codec="int8", force=True)])
        assert [(site.kind, site.codec) for site in plan] == [("reduce_scatter", codec)]
    narrow = lambda x: ag(x * 2).bfloat16() + 1  # noqa: E731
    large = Rule(min_bytes=64 * 32 * 4, keep=True)  # after narrowing it is half as large
    plan = planned(labelled(narrow), codecs="int8", rules=[large])
    assert rules(plan) == ["gather then narrow"]
    assert [site.codec for site in plan] == ["none"]
    assert "rule 1" in plan.sites[0].reason


def test_terms_are_kept_through_several_rules(fake_group):
    """Sites that are merged, then scattered: the result is allowed what both were."""
    fake_group(8)
    function = lambda x: (ar(x.sin()) + ar(x.cos()))[:8] + 1  # noqa: E731
    said = [Rule(kind="all_reduce", keep=True)]
    plan = planned(labelled(function), codecs="int8", rules=said)
    assert rules(plan) == ["sum of sums", "scattered"]
    assert [(site.kind, site.codec) for site in plan] == [("reduce_scatter", "none")]


def test_graph_that_comes_again_is_allowed_what_the_new_policy_says(fake_group):
    fake_group(8)
    gm = labelled(SUM)
    assert rules(planned(gm, codecs="int8", skip=("simplify",), rules=[Rule(keep=True)])) == []
    assert [site.codec for site in planned(gm, rules=[Rule(keep=True)])] == ["none"]
    plan = planned(gm, rules=[Rule(codec="int8", force=True)])
    assert [site.codec for site in plan] == ["int8"]


def test_rules_are_reported_by_what_was_found(fake_group):
    """After a merge of two sites, one of the modules has no collective any more."""
    fake_group(8)
    said = [Rule(module="first"), Rule(module="second"), Rule(module="third", keep=True)]
    policy = Policy(codecs="int8", rules=said)
    gm = labelled(SUM, ("first", "second"))
    plan = commpass.rewrite(gm, [], policy, profile=SLOW, strict=True)
    assert rules(plan) == ["sum of sums"]
    assert plan.matched == (0, 1)
    summary = Summary(policy)
    summary.add(plan, trained=False)
    (warning,) = summary.unmatched_rules().values()
    assert "third" in warning


def test_plan_without_the_field_is_still_read(fake_group):
    fake_group(8)
    plan = planned(labelled(SUM), codecs="int8", rules=[Rule(kind="all_reduce")])
    assert plan.matched == (0,)
    assert commpass.Plan.from_json(plan.to_json()) == plan
    old = msgspec.json.decode(plan.to_json())
    del old["matched"]
    read = commpass.Plan.from_json(msgspec.json.encode(old))
    assert read.matched == ()
    assert (read.sites, read.digest()) == (plan.sites, plan.digest())
