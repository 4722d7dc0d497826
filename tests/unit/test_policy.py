"""Policies: presets, which rule applies to a site, what an annotation leaves open, and errors that
name file, line and remedy."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from deciding import decide
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

import commpass
from commpass.codecs import codec
from commpass.collectives import ALGORITHM_NAMES, DEFAULTS, algorithm
from commpass.costmodel import KernelRate, Kernels, Link, Profile
from commpass.costmodel.files import POLICY_KEYS
from commpass.errors import PolicyError
from commpass.passes import PASSES
from commpass.plan import Site
from commpass.plan.kinds import IN_GRAPHS
from commpass.policy import PASS_NAMES, PRESETS, PROFILE_KEYS, Policy, policy_named
from commpass.policy.rules import Annotation, Rule, covers

tried = settings(max_examples=examples(26, 80), deadline=None)


def site(
    module="layers.3.mlp.down",
    kind="all_reduce",
    direction="forward",
    group_label="tp",
    nbytes=4096,
    word=None,
) -> Site:
    return Site(
        name="s",
        kind=kind,
        group="17",
        group_label=group_label,
        group_size=8,
        dtype="float32",
        shape=(nbytes // 4,),
        bytes=nbytes,
        module=module,
        direction=direction,
        annotation=word.to_json() if isinstance(word, Annotation) else word,
    )


def terms(policy: Policy, **facts):
    return policy.allowed(site(**facts))[0]


# --- globs ----------------------------------------------------------------------------------------

COVERED = [
    ("layers.3.mlp", "layers.3.mlp", True),
    ("layers.3.mlp", "layers.3.mlp.down", True),
    ("layers.3.mlp", "layers.3.mlp.down.inner", True),
    ("layers.3.mlp", "layers.3.mlp2", False),
    ("layers.3.mlp", "layers.3", False),
    ("layers.3.mlp", "layers.13.mlp", False),
    ("layers.3.mlp", "model.layers.3.mlp", False),
    ("layers.*.mlp", "layers.3.mlp", True),
    ("layers.*.mlp", "layers.31.mlp.down", True),
    ("layers.*.mlp", "layers.3.attention", False),
    ("layers.*.mlp", "layers.3.block.mlp", False),
    ("layers.*.mlp", "layers.mlp", False),
    ("layers.*", "layers.3.mlp.down", True),
    ("layers.*", "layers", False),
    ("*", "layers.3.mlp", True),
    ("layers.?", "layers.3", True),
    ("layers.?", "layers.3.mlp", True),
    ("layers.?", "layers.31", False),
    ("layers.?", "layers.", False),
    ("l?yers", "l.yers", False),
    ("**.mlp", "layers.3.mlp", True),
    ("**.mlp", "a.b.c.d.mlp.down", True),
    ("**.mlp", "a.b.c.d.attention", False),
    ("layers.**.down", "layers.3.mlp.down", True),
    ("layers.**.down", "layers.3.mlp.up", False),
    ("**", "layers.3.mlp", True),
    ("**", "", True),
    ("", "layers.3.mlp", True),
    ("", "", True),
    ("layers", "", False),
    ("*.mlp*", "layers.mlp_1.down", True),
    ("layers.*_proj", "layers.q_proj", True),
    ("layers.*_proj", "layers.norm", False),
    ("a+b", "a+b", True),
    ("a+b", "aab", False),
    ("a.b", "axb", False),
    *((glob, "a\nb.c\nd", True) for glob in ("**", "*", "a\nb", "a?b", "**.c*", "a\nb.*")),
    ("a", "a\n", False),
    *(
        (name, f"{name}.mlp", True)
        for name in ("[red]x[/red]", "a|b", "漢字", "\x1b[31m", "x" * 999)
    ),
]


@pytest.mark.parametrize(("glob", "path", "covered"), COVERED)
def test_glob_covers_a_module_and_all_that_is_inside(glob, path, covered):
    assert covers(glob, path) is covered


NAMES = st.lists(st.text("abc0_", min_size=1, max_size=3), min_size=1, max_size=5)


@tried
@given(NAMES, st.data())
def test_every_prefix_of_a_path_covers_it_whatever_parts_are_stars(parts, data):
    prefix = parts[: data.draw(st.integers(1, len(parts)))]
    starred = [
        data.draw(st.sampled_from([part, "*", part[0] + "*", "?" * len(part)])) for part in prefix
    ]
    assert covers(".".join(starred), ".".join(parts))
    assert not covers(".".join([*starred, *parts[len(prefix) :], "more"]), ".".join(parts))


# --- rules ----------------------------------------------------------------------------------------

MATCHED = [
    (Rule(), True),
    (Rule(module="layers.*.mlp"), True),
    (Rule(module="layers.*.attention"), False),
    (Rule(kind="all_reduce"), True),
    (Rule(kind="all_gather"), False),
    (Rule(direction="forward"), True),
    (Rule(direction="backward"), False),
    (Rule(group="tp"), True),
    (Rule(group="t*"), True),
    (Rule(group="17"), True),
    (Rule(group="1?"), True),
    (Rule(group="dp"), False),
    (Rule(group="1"), False),
    (Rule(min_bytes=4096), True),
    (Rule(min_bytes=4097), False),
    (
        Rule(
            module="layers.*.mlp", kind="all_reduce", direction="forward", group="tp", min_bytes=1
        ),
        True,
    ),
    (
        Rule(
            module="layers.*.mlp", kind="all_reduce", direction="backward", group="tp", min_bytes=1
        ),
        False,
    ),
]


@pytest.mark.parametrize(("rule", "matched"), MATCHED, ids=str)
def test_rule_matches_by_module_kind_direction_group_and_size_together(rule, matched):
    assert rule.matches(site()) is matched
    assert terms(Policy(rules=[dataclasses.replace(rule, codec="int8")])).codecs == (
        ("int8",) if matched else ()
    )


ROWS = 1024
"""Entries per rank that represent those of an all-to-all whose ranks may hold different numbers."""
UNEVEN = {
    "less than they": ((1, 2), (3, 4)),
    "far more than they": ((90_000, 0), (1, 1)),
    "nothing": ((0, 0), (0, 1)),
    "not known": (("u0", "u1"), ("u2", "u3")),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("what", UNEVEN)
def test_least_size_is_compared_with_what_all_ranks_take_an_uneven_exchange_for(what, dtype):
    """Law 5: a rule that covered it on one rank only would make plans differ."""
    splits, width = UNEVEN[what], 24
    known = isinstance(splits[0][0], int)
    nbytes = sum(splits[0]) * width * getattr(torch, dtype).itemsize if known else -1
    facts = {
        "kind": "all_to_all",
        "dtype": dtype,
        "width": width,
        "splits": splits,
        "bytes": nbytes,
        "group_size": 2,
    }
    a_site = dataclasses.replace(site(), **facts)
    common = 2 * ROWS * width * getattr(torch, dtype).itemsize
    assert Rule(min_bytes=common).matches(a_site)
    assert not Rule(min_bytes=common + 1).matches(a_site)
    alike = dataclasses.replace(a_site, splits=((3, 3), (3, 3)), bytes=4096)
    assert Rule(min_bytes=4096).matches(alike)
    assert not Rule(min_bytes=4097).matches(alike)


def test_group_without_a_label_is_matched_by_its_name():
    rule = Rule(group="17", codec="int8")
    assert rule.matches(site(group_label=""))
    assert not Rule(group="tp", codec="int8").matches(site(group_label=""))


def test_first_rule_that_matches_counts_and_is_named():
    policy = Policy(
        rules=[
            Rule(module="layers.0", codec="fp8"),
            Rule(module="layers.*", codec="int8"),
            Rule(codec="int4"),
        ]
    )
    for module, index, name in (
        ("layers.0.mlp", 0, "fp8"),
        ("layers.1.mlp", 1, "int8"),
        ("head", 2, "int4"),
    ):
        found, which = policy.allowed(site(module))
        assert (found.codecs, which) == ((name,), index)
        assert f"rule {index + 1}" in found.source
        assert policy.rules[index].module in found.source


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (Rule(), "rule 1 (module='**')"),
        (Rule(group="tp", keep=True), "rule 1 (group='tp', keep=True)"),
        (Rule(kind="all_reduce", min_bytes=1), "rule 1 (kind='all_reduce', min_bytes=1)"),
        (
            Rule(module="layers.*", direction="forward"),
            "rule 1 (module='layers.*', direction='forward')",
        ),
    ],
)
def test_reason_shows_what_the_rule_is_about(rule, source):
    assert terms(Policy(rules=[rule])).source == source


OVER = [
    (Policy(name="mine", codecs="int4", max_error=0.02), None, "(max_error of policy 'mine')"),
    (
        Policy(rules=[Rule(group="tp", codec="int4", max_error=0.02)]),
        None,
        "(max_error of rule 1 (group='tp'))",
    ),
    (
        Policy(name="mine", max_error=0.02, rules=[Rule(group="tp", codec="int4")]),
        None,
        "(max_error of policy 'mine', since rule 1 (group='tp') says none)",
    ),
    (
        Policy(name="mine", max_error=0.02),
        Annotation(codec="int4"),
        "(max_error of policy 'mine', since compress(...) in the model says none)",
    ),
    (
        Policy(),
        Annotation(codec="int4", max_error=0.02),
        "(max_error of compress(...) in the model)",
    ),
]


@pytest.mark.parametrize(("policy", "word", "who"), OVER)
def test_codec_above_the_budget_has_the_reason_whose_budget_that_is(policy, word, who):
    (planned,) = decide(
        [dataclasses.replace(site(word=word), reduce_op="sum")], policy, Profile("p", Link(1, 1))
    )
    assert not planned.compressed
    assert f"is above the budget of 2.000% {who}" in planned.reason


def test_source_of_a_rule_does_not_make_sites_differ():
    policy = Policy(
        max_error=0.2,
        rules=[Rule(kind="all_gather", codec="int8", max_error=0.2), Rule(codec="int8")],
    )
    one, other = terms(policy, kind="all_gather"), terms(policy)
    assert one != other
    assert one.allow_like(other)


def test_site_that_no_rule_covers_is_the_policys():
    policy = Policy(
        name="mine",
        codecs="int8",
        max_error=0.1,
        algorithms="two_shot",
        rules=[Rule(module="head", keep=True)],
    )
    found, which = policy.allowed(site())
    assert (found.codecs, found.algorithms, found.max_error, found.force) == (
        ("int8",),
        ("two_shot",),
        0.1,
        False,
    )
    assert which is None
    assert "mine" in found.source


WHOLE = Policy(codecs=("fp8", "int8"), algorithms="one_shot", max_error=0.05)
OPEN = [
    ({"codec": "int4"}, {"codecs": ("int4",)}),
    ({"codec": ["int4", "fp8"]}, {"codecs": ("int4", "fp8")}),
    ({"codec": ()}, {"codecs": ()}),
    ({"algorithm": "two_shot"}, {"algorithms": ("two_shot",)}),
    ({"algorithm": ("two_shot", "direct")}, {"algorithms": ("two_shot", "direct")}),
    ({"max_error": 0.5}, {"max_error": 0.5}),
    ({"max_error": 0.0}, {"max_error": 0.0}),
    ({"force": True}, {"force": True}),
    ({}, {}),
]


@pytest.mark.parametrize(("said", "changed"), OPEN, ids=str)
def test_policy_fills_in_what_annotations_and_rules_leave_open(said, changed):
    expected = {
        "codecs": ("fp8", "int8"),
        "algorithms": ("one_shot",),
        "max_error": 0.05,
        "force": False,
    } | changed
    by_word = terms(WHOLE, word=Annotation(**said))
    by_rule = terms(dataclasses.replace(WHOLE, rules=[Rule(**said)]))
    for found in (by_word, by_rule):
        assert {field: getattr(found, field) for field in expected} == expected


def test_annotation_in_the_model_beats_every_rule():
    policy = Policy(
        codecs="fp8", rules=[Rule(codec="int8", force=True, max_error=0.5), Rule(keep=True)]
    )
    found, which = policy.allowed(site(word=Annotation(codec="int4")))
    assert (found.codecs, found.force, found.max_error) == (
        ("int4",),
        False,
        None,
    )  # open: the policy's, not the rule's
    assert which is None
    assert "compress" in found.source


@pytest.mark.parametrize("forced", [True, False])
def test_keep_allows_nothing_wherever_it_stands(forced):
    policy = Policy(
        codecs="fp8", rules=[Rule(module="layers.0", keep=True), Rule(codec="int8", force=forced)]
    )
    assert terms(policy, module="layers.0.mlp").codecs == ()
    assert terms(policy, module="layers.0.mlp").force is False
    kept = terms(policy, module="head", word=Annotation(keep=True))
    assert (kept.codecs, kept.force, kept.source) == ((), False, "keep")
    assert kept.rows == terms(policy, module="layers.0.mlp").rows == 1  # the matmul stays whole
    assert terms(policy, module="head").codecs == ("int8",)


def test_off_ignores_annotations_and_rules():
    policy = dataclasses.replace(
        PRESETS["off"], codecs="int8", rules=[Rule(codec="int8", force=True)]
    )
    for word in (None, Annotation(codec="int4", force=True)):
        found, which = policy.allowed(site(word=word))
        assert (found.codecs, found.force, which) == ((), False, None)
        assert "off" in found.source


def test_rule_as_text_shows_what_was_said_and_no_more():
    assert (
        str(Rule(module="layers.*", codec="int8", min_bytes=3))
        == "Rule(codec=('int8',), module='layers.*', min_bytes=3)"
    )
    assert str(Rule()) == "Rule()"


# --- annotations ----------------------------------------------------------------------------------

SPECS = (
    *ALGORITHM_NAMES,
    *DEFAULTS,
    "ring(stage=ag)",
    "hierarchical(node=8, between=int4)",
    "direct(first=sizes)",
)
WORDS = st.one_of(
    st.just(Annotation(keep=True)),
    st.builds(
        Annotation,
        codec=st.one_of(
            st.none(),
            st.just("fp8"),
            st.lists(st.sampled_from(["int8", "int4(block=64)", "rotated"])),
        ),
        algorithm=st.one_of(st.none(), st.just("direct"), st.lists(st.sampled_from(SPECS))),
        max_error=st.one_of(st.none(), st.floats(0, 1)),
        force=st.booleans(),
    ),
)


@tried
@given(WORDS)
def test_annotation_survives_json(word):
    assert Annotation.from_json(word.to_json()) == word
    assert Annotation.from_json(word.to_json()).to_json() == word.to_json()


@tried
@given(WORDS, WORDS)
def test_two_words_have_one_text_only_if_they_say_the_same(one, other):
    assert (one.to_json() == other.to_json()) == (one == other)


def test_one_name_and_several_are_both_taken():
    assert Annotation(codec="int8") == Annotation(codec=["int8"]) == Annotation(codec=("int8",))
    assert Policy(codecs="int8", algorithms="direct", skip="verify") == Policy(
        codecs=["int8"], algorithms=["direct"], skip=["verify"]
    )


# --- presets --------------------------------------------------------------------------------------


def test_presets_are_found_by_name_and_know_theirs():
    assert {"off", "lossless", "balanced", "aggressive"} <= set(PRESETS)
    for name, preset in PRESETS.items():
        assert policy_named(name) is preset
        assert preset.name == name


def test_off_and_lossless_allow_no_lossy_codec_and_the_lossy_presets_keep_a_budget():
    assert PRESETS["off"].off
    assert [name for name, preset in PRESETS.items() if preset.off] == ["off"]
    for name in ("off", "lossless"):
        assert (PRESETS[name].codecs, PRESETS[name].rules) == ((), ())
    assert 0 < PRESETS["balanced"].max_error < PRESETS["aggressive"].max_error


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.codecs])
@pytest.mark.parametrize("how", ["one_shot", "two_shot"])
def test_every_codec_of_a_preset_is_within_its_own_error_budget_on_eight_ranks(how, name):
    """This holds for algorithms that encode a value once or twice; those that code hop by hop
    exceed it with enough ranks."""
    preset = PRESETS[name]
    for spec in preset.codecs:
        assert 0 < algorithm("all_reduce", how).error(codec(spec), 8) <= preset.max_error


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.rules])
def test_every_codec_of_a_rule_of_a_preset_is_within_its_budget_where_values_are_encoded_once(name):
    preset = PRESETS[name]
    for rule in preset.rules:
        budget = preset.max_error if rule.max_error is None else rule.max_error
        for spec in rule.codec:
            error = codec(spec).relative_error()
            assert error == 0 if codec(spec).lossless else 0 < error <= budget, spec


@tried
@given(
    st.sampled_from([name for name, preset in PRESETS.items() if preset.max_error is not None]),
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]),
    st.integers(2, 100) | st.sampled_from([128, 512, 1000, 1024]),
    st.integers(1, 1 << 14),
    st.booleans(),
    st.sampled_from([*DEFAULTS, *SPECS, None]),
)
def test_nothing_above_the_budget_of_a_preset_is_ever_chosen_whatever_the_ranks(
    name, kind, ranks, numel, force, only
):
    preset = dataclasses.replace(PRESETS[name], rules=[Rule(force=force, algorithm=only)])
    link = Link(0.0, 0.001)
    free = Profile(
        "free",
        link,
        kernels=Kernels(0.0, KernelRate(1e-6, 1e-6)),
        margin=0.0,
        ranks_per_host=2 if ranks % 2 == 0 else 0,
    )
    one = dataclasses.replace(
        site(kind=kind),
        reduce_op="sum" if kind.startswith("reduce") or kind == "all_reduce" else None,
        group_size=ranks,
        shape=(numel * ranks,),
        bytes=4 * numel * ranks,
    )
    (planned,) = decide([one], preset, free)
    assert planned.error <= preset.max_error
    if planned.compressed:
        exact = algorithm(kind, planned.algorithm).error(codec(planned.codec), ranks)
        assert planned.error == pytest.approx(exact, abs=1e-6)
        assert exact <= preset.max_error + 1e-6


def test_ring_is_within_the_budget_of_a_preset_on_few_ranks_and_above_it_on_many():
    ring = algorithm("all_reduce", "ring")
    assert (
        ring.error(codec("int8"), 2) < PRESETS["balanced"].max_error < ring.error(codec("int8"), 64)
    )


def test_policy_is_taken_as_it_is():
    policy = Policy(codecs="int8")
    assert policy_named(policy) is policy


# --- errors ---------------------------------------------------------------------------------------

REFUSED = {
    "policy's field": (
        lambda: Policy(codec="int8"),
        ["Policy", "'codec'", "did you mean 'codecs'?", "max_error"],
    ),
    "policy by position": (
        lambda: Policy("balanced"),
        ["Policy('balanced')", "Policy(codecs='int8')", "Policy.from_preset('balanced')"],
    ),
    "policy's preset": (lambda: Policy(preset="taco"), ["'preset'", "Policy.from_preset("]),
    "rule by position": (lambda: Rule("int8"), ["Rule('int8')", "Rule(codec='int8')"]),
    "several in one name": (lambda: Rule(codec="int8, int4"), ["a list, ['int8', 'int4']"]),
    "rule's field": (
        lambda: Rule(modul="a"),
        ["Rule", "'modul'", "did you mean 'module'?", "min_bytes"],
    ),
    "word's field": (
        lambda: Annotation(algoritm="a"),
        ["Annotation", "'algoritm'", "did you mean 'algorithm'?"],
    ),
    "word is no rule": (lambda: Annotation(module="a"), ["Annotation", "'module'", "codec"]),
    "rule's codec": (lambda: Rule(codec="int9"), ["'int9'", "did you mean 'int8'?", "rotated"]),
    "one of several": (lambda: Annotation(codec=["int8", "pf8"]), ["'pf8'", "did you mean 'fp8'?"]),
    "codec's parameter": (lambda: Rule(codec="int8(blok=8)"), ["'blok'", "did you mean 'block'?"]),
    "policy's codec": (
        lambda: Policy(codecs=["int8", "rotatd"]),
        ["'rotatd'", "did you mean 'rotated'?"],
    ),
    "algorithm": (
        lambda: Rule(algorithm="two-shot"),
        ["'two-shot'", "did you mean 'two_shot'?", "direct"],
    ),
    "policy's algorithm": (
        lambda: Policy(algorithms="oneshot"),
        ["'oneshot'", "did you mean 'one_shot'?"],
    ),
    "algorithm with parameters": (
        lambda: Policy(algorithms="rin(stage=ag)"),
        ["'rin'", "did you mean 'ring'?"],
    ),
    "algorithm's parameter": (
        lambda: Rule(algorithm="ring(stag=ag)"),
        ["'ring'", "'stag'", "did you mean 'stage'?"],
    ),
    "policy's stage": (
        lambda: Policy(algorithms="ring(stage=agg)"),
        ["'agg'", "did you mean 'ag'?", "both", "rs"],
    ),
    "rule's stage": (
        lambda: Rule(algorithm="ring(stage=agg)"),
        ["'agg'", "did you mean 'ag'?", "both", "rs"],
    ),
    "word's stage": (
        lambda: Annotation(algorithm="ring(stage=agg)"),
        ["'agg'", "did you mean 'ag'?", "both", "rs"],
    ),
    "one of several stages": (
        lambda: Annotation(algorithm=["ring", "ring(stage=sr)"]),
        ["'sr'", "did you mean 'rs'?"],
    ),
    "value of another type": (
        lambda: Annotation(algorithm="two_shot(shards=many)"),
        ["'two_shot'", "shards='many'", "shards=1"],
    ),
    "too many shards": (
        lambda: Policy(algorithms="one_shot(shards=65)"),
        ["shards=65", "from 1 to 64"],
    ),
    "what goes first": (
        lambda: Rule(algorithm="direct(first=size)"),
        ["'size'", "did you mean 'sizes'?", "static"],
    ),
    "ranks on a host": (
        lambda: Rule(algorithm="hierarchical(node=-1)"),
        ["node=-1", "number of ranks on one host"],
    ),
    "codec between hosts": (
        lambda: Rule(algorithm="hierarchical(between=int9)"),
        ["'int9'", "did you mean 'int8'?"],
    ),
    "state between hosts": (
        lambda: Rule(algorithm="hierarchical(between=topk)"),
        ["'topk'", "error feedback", "'int4'"],
    ),
    "another's parameter": (
        lambda: Rule(algorithm="one_shot(stage=ag)"),
        ["'one_shot'", "'stage'", "shards"],
    ),
    "kind": (
        lambda: Rule(kind="allreduce"),
        ["'allreduce'", "did you mean 'all_reduce'?", *IN_GRAPHS],
    ),
    "direction": (
        lambda: Rule(direction="backwards"),
        ["'backwards'", "did you mean 'backward'?", "forward"],
    ),
    "negative error": (lambda: Rule(max_error=-0.1), ["max_error=-0.1", "0.01"]),
    "error that is no number": (lambda: Policy(max_error=math.nan), ["max_error=nan", "0.01"]),
    "keep with a codec": (lambda: Rule(keep=True, codec="int8"), ["keep=True", "codec"]),
    "keep with force": (lambda: Annotation(keep=True, force=True), ["keep=True", "force"]),
    "keep with an algorithm": (
        lambda: Annotation(keep=True, algorithm="direct"),
        ["keep=True", "algorithm"],
    ),
    "keep with chunks": (lambda: Rule(keep=True, chunks=4), ["keep=True", "chunks"]),
    "keep with rows": (lambda: Rule(keep=True, rows=4), ["keep=True", "rows"]),
    "no chunks of a rule": (lambda: Rule(chunks=0), ["chunks=0", "from 1 to 64"]),
    "no chunks of a policy": (lambda: Policy(chunks=0), ["chunks=0", "from 1 to 64"]),
    "fewer chunks than none": (lambda: Annotation(chunks=-1), ["chunks=-1", "from 1 to 64"]),
    "too many chunks of a rule": (lambda: Rule(chunks=65), ["chunks=65", "from 1 to 64"]),
    "too many chunks of a policy": (lambda: Policy(chunks=65), ["chunks=65", "from 1 to 64"]),
    "chunks as a text": (
        lambda: Rule(chunks="4"),
        ["Rule(chunks='4')", "expected int or None, got str"],
    ),
    "half a chunk": (
        lambda: Policy(chunks=1.5),
        ["Policy(chunks=1.5)", "expected int or None, got float"],
    ),
    "chunks of native": (
        lambda: Rule(algorithm="native(chunks=2)"),
        ["'native'", "no parameter 'chunks'"],
    ),
    "native for a kind that has it not": (
        lambda: Rule(kind="all_gather", algorithm="native"),
        ["all_gather has no algorithm 'native'", "direct"],
    ),
    "preset": (
        lambda: policy_named("balnced"),
        ["'balnced'", "did you mean 'balanced'?", ".toml", *PRESETS],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unknown_keys_are_refused_with_the_nearest(what):
    make, parts = REFUSED[what]
    with pytest.raises(PolicyError) as error:
        make()
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "spec",
    [*SPECS, "semi_ring(stage=rs, shards=4)", "hierarchical( node = 8 )", "direct(shards=2)"],
)
def test_algorithms_may_have_parameters_wherever_they_are_named(spec, tmp_path):
    """A parameter counts as known if the algorithm of that name has it for one kind of
    collective."""
    assert Policy(algorithms=spec).algorithms == (spec,)
    assert terms(Policy(rules=[Rule(algorithm=spec)])).algorithms == (spec,)
    assert terms(Policy(), word=Annotation(algorithm=spec)).algorithms == (spec,)
    path = tmp_path / "mine.toml"
    path.write_text(f'algorithms = ["{spec}"]\n[[rule]]\nalgorithm = "{spec}"\n')
    assert Policy.from_toml(path) == Policy(
        name="mine", algorithms=spec, rules=[Rule(algorithm=spec)]
    )


def test_codecs_that_nobody_names_are_chosen_from_the_defaults():
    assert (
        Policy().algorithms
        == terms(Policy()).algorithms
        == terms(Policy(rules=[Rule(codec="int8")])).algorithms
        == DEFAULTS
    )
    assert {*ALGORITHM_NAMES} - {*DEFAULTS} == {"native"}  # it is used only if it is named


# --- TOML -----------------------------------------------------------------------------------------


@pytest.fixture
def toml(tmp_path):
    """Write a file and return its path; text is used unchanged."""

    def write(text: str | bytes, name: str = "mine.toml"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_file_holds_all_that_a_policy_can_say(toml):
    path = toml("""
codecs = ["fp8", "int8(block=64)"]
algorithms = "two_shot"
max_error = 0.05
reassociate = false
skip = ["verify"]

[[rule]]
module = "layers.*.mlp"
kind = "all_reduce"
direction = "backward"
group = "tp"
min_bytes = 65536
codec = "int4"
algorithm = ["one_shot"]
max_error = 1
force = true

[[rule]]
keep = true
""")
    assert Policy.from_toml(path) == Policy(
        name="mine",
        codecs=("fp8", "int8(block=64)"),
        algorithms=("two_shot",),
        max_error=0.05,
        reassociate=False,
        skip=("verify",),
        rules=(
            Rule(
                module="layers.*.mlp",
                kind="all_reduce",
                direction="backward",
                group="tp",
                min_bytes=65536,
                codec="int4",
                algorithm="one_shot",
                max_error=1.0,
                force=True,
            ),
            Rule(keep=True),
        ),
    )
    assert policy_named(str(path)) == Policy.from_toml(str(path)) == Policy.from_toml(path)


def test_empty_file_is_a_policy_that_leaves_all_alone(toml):
    assert Policy.from_toml(toml("")) == Policy(name="mine")
    assert Policy.from_toml(toml("# nothing\r\n\r\n")) == Policy(name="mine")


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_where_a_file_may_start(name, toml):
    assert Policy.from_toml(toml(f'preset = "{name}"')) == dataclasses.replace(
        PRESETS[name], name="mine"
    )


def test_file_wins_over_its_preset(toml):
    path = toml(
        'name = "ours"\nmax_error = 0.01\npreset = "balanced"\n[[rule]]\nmodule = "head"\nkeep ='
        " true\n"
    )
    expected = dataclasses.replace(
        PRESETS["balanced"], name="ours", max_error=0.01, rules=(Rule(module="head", keep=True),)
    )
    assert Policy.from_toml(path) == expected
    assert Policy.from_toml(toml('preset = "balanced"\ncodecs = "int8"')).codecs == ("int8",)


BAD = {
    "syntax": ('codecs = "int8"\nmax_error == 1\n', 2, ["not TOML"]),
    "text without quotes": ("preset = balanced\n", 1, ["not TOML", 'it in quotes, "balanced"']),
    "a codec without quotes": (
        'max_error = 1\ncodecs = ["int8", int8(block=64)]\n',
        2,
        ['write it in quotes, "int8(block=64)"'],
    ),
    "a pattern without quotes": (
        "[[rule]]\nmodule = layers.*.mlp\n",
        2,
        ['write it in quotes, "layers.*.mlp"'],
    ),
    "Python's True": ("reassociate = True\n", 1, ["not TOML", ": write true"]),
    "a profile": (
        "\nmargin = 0.1\n[link]\nalpha_us = 20\n",
        2,
        ["this is a profile, since it has 'link'", "profile=", "--profile"],
    ),
    "a profile with a base": ('base = "ethernet-1g"\n', 1, ["this is a profile", "'base'"]),
    "syntax in a rule": ("\n\n[[rule]]\nmodule = layers\n", 4, ["not TOML"]),
    "a key twice": ('codecs = "int8"\nmax_error = 1\ncodecs = "fp8"\n', 3, ["not TOML"]),
    "an array without an end": ('max_error = 1\ncodecs = ["int8",', 2, ["not TOML"]),
    "a text without an end": ('max_error = 1\n\ncodecs = "int8\n', 3, ["not TOML"]),
    "unknown field": (
        'max_error = 1\ncodec = "int8"\n',
        2,
        ["'codec'", "did you mean 'codecs'?", "a policy", "preset"],
    ),
    "a rule's field in the policy": ("# first\n\nforce = true\n", 3, ["'force'", "a policy"]),
    "unknown field in the first rule": (
        '\n[[rule]]\nmodule = "a"\nkodec = "int8"\n',
        4,
        ["'kodec'", "'codec'", "a rule"],
    ),
    "unknown field in the third rule": (
        (
            '[[rule]]\ncodec = "int8"\n[[rule]]\ncodec = "int8"\n\n[[rule]]\ncodec = "int8"\nmodul'
            ' = "x"\n[[rule]]\nmodul = "y"\n'
        ),
        8,
        ["'modul'", "did you mean 'module'?"],
    ),
    "wrong type": ("\nmax_error = 1\nskip = 3\n", 3, ["skip", "expected", "str", "int"]),
    "wrong type of a number": ('max_error = "1%"\n', 1, ["max_error", "expected", "float", "str"]),
    "wrong type of a switch": (
        '\nreassociate = "no"\n',
        2,
        ["reassociate", "expected", "bool", "str"],
    ),
    "wrong type in an array": (
        '\n\ncodecs = ["int8", 8]\n',
        3,
        ["codecs", "expected", "str", "int"],
    ),
    "wrong type in a rule": (
        '[[rule]]\nforce = true\n\n[[rule]]\nmin_bytes = "1k"\n',
        5,
        ["min_bytes", "expected", "int"],
    ),
    "wrong type of a switch in a rule": (
        "[[rule]]\nforce = 1\n",
        2,
        ["force", "expected", "bool", "int"],
    ),
    "unknown codec": ('\ncodecs = ["int8", "int9"]\n', 2, ["'int9'", "did you mean 'int8'?"]),
    "unknown codec in a rule": (
        '[[rule]]\ncodec = "fp8"\n[[rule]]\ncodec = "pf8"\n',
        4,
        ["'pf8'", "did you mean 'fp8'?"],
    ),
    "unknown parameter": (
        '[[rule]]\ncodec = "int8(blok=8)"\n',
        2,
        ["'blok'", "did you mean 'block'?"],
    ),
    "unknown algorithm": (
        '[[rule]]\n\nalgorithm = "twoshot"\n',
        3,
        ["'twoshot'", "did you mean 'two_shot'?"],
    ),
    "unknown algorithm of several": (
        '\nalgorithms = ["ring", "rung(stage=ag)"]\n',
        2,
        ["'rung'", "did you mean 'ring'?"],
    ),
    "no chunks": ("\nchunks = 0\n", 2, ["chunks=0", "from 1 to 64"]),
    "too many chunks in a rule": (
        '[[rule]]\ncodec = "int8"\n[[rule]]\ncodec = "int8"\nchunks = 65\n',
        5,
        ["chunks=65", "from 1 to 64"],
    ),
    "chunks as a text in a rule": (
        '[[rule]]\nchunks = "4"\n',
        2,
        ["chunks", "expected", "int", "str"],
    ),
    "keep and chunks in a rule": (
        "max_error = 1\n[[rule]]\nkeep = true\nchunks = 2\n",
        2,
        ["keep=True", "chunks"],
    ),
    "unknown stage": (
        'max_error = 1\nalgorithms = "ring(stage=agg)"\n',
        2,
        ["'agg'", "did you mean 'ag'?"],
    ),
    "unknown stage in a rule": (
        '[[rule]]\n[[rule]]\nalgorithm = ["ring(stage=agg)"]\n',
        3,
        ["'agg'", "did you mean 'ag'?"],
    ),
    "unknown parameter of an algorithm": (
        '[[rule]]\nalgorithm = "two_shot(shard=2)"\n',
        2,
        ["'shard'", "'shards'"],
    ),
    "unknown kind": (
        '[[rule]]\nkind = "allreduce"\n',
        2,
        ["'allreduce'", "did you mean 'all_reduce'?"],
    ),
    "kind of explicit calls alone": (
        '[[rule]]\nkind = "reduce_scatter_v"\n',
        2,
        ["'reduce_scatter_v'", "did you mean 'reduce_scatter'?"],
    ),
    "unknown direction": (
        '[[rule]]\ndirection = "back"\n',
        2,
        ["'back'", "did you mean 'backward'?"],
    ),
    "unknown preset": ('\n\n\npreset = "balnced"\n', 4, ["'balnced'", "did you mean 'balanced'?"]),
    "preset of a wrong type": ("\npreset = 3\n", 2, ["preset", "balanced"]),
    "preset of several": ('\npreset = ["balanced"]\n', 2, ["preset", "balanced"]),
    "a negative error": ("\nmax_error = -0.5\n", 2, ["max_error=-0.5", "0.01"]),
    "a rule that contradicts itself": (
        '# a\n\n[[rule]]\nkeep = true\ncodec = "int8"\n',
        3,
        ["keep=True"],
    ),
    "[rule]": ('codecs = "int8"\n\n[rule]\nmodule = "a"\n', 3, ["[[rule]]"]),
    "rule =": ('codecs = "int8"\nrule = "int8"\n', 2, ["[[rule]]"]),
    "[[rules]]": (
        'codecs = "int8"\n\n[[rules]]\nmodule = "a"\n',
        3,
        ["'rules'", "did you mean 'rule'?"],
    ),
    "[[Rule]] behind a good one": (
        '[[rule]]\nmodule = "a"\n\n[[Rule]]\nmodule = "a"\n',
        4,
        ["'Rule'", "did you mean 'rule'?"],
    ),
    "[policy]": ('# all of it\n[policy]\ncodecs = "int8"\n', 2, ["'policy'", "codecs"]),
    "a table in a rule": (
        '[[rule]]\nmodule = "a"\n[[rule]]\nmodule = "b"\n[rule.when]\nkind = "x"\n',
        5,
        ["'when'", "a rule"],
    ),
    "comments before it": (
        "# max_eror = 1\n  # max_eror = 1\n\nmax_eror = 1 # here\n",
        4,
        ["'max_eror'", "'max_error'"],
    ),
    "comments in a rule": (
        '[[rule]] # one\n# kind = "y"\n\nkind = "y"\n',
        4,
        ["'y'", "all_reduce"],
    ),
    "a rule commented out": (
        '[[rule]]\nforce = true\n#[[rule]]\n#kind = "z"\n[[rule]]\nkind = "y"\n',
        6,
        ["'y'"],
    ),
    "a key in quotes": ('"max_error" = 1\n\'codecs\' = "int9"\n', 2, ["'int9'"]),
    "a key in quotes in a rule": (
        '[[ rule ]]\n"module" = "a"\n\t"kind"="y"\n',
        3,
        ["'y'", "all_reduce"],
    ),
    "an array on several lines": (
        'codecs = [\n  "int8",\n  "fp8",\n]\nmax_error = "x"\n',
        5,
        ["max_error", "expected"],
    ),
    "the same key above and in a rule": (
        'max_error = 1\n[[rule]]\nmax_error = "x"\n',
        3,
        ["max_error", "expected"],
    ),
    "lines that end as on Windows": ('max_error = 1\r\n\r\ncodecs = "int9"\r\n', 3, ["'int9'"]),
}


@pytest.mark.parametrize("what", BAD)
def test_error_in_a_file_names_the_file_the_line_and_what_was_expected(what, toml):
    text, line, parts = BAD[what]
    path = toml(text)
    with pytest.raises(PolicyError) as error:
        Policy.from_toml(path)
    said = str(error.value)
    assert said.startswith(str(path)), said
    found = re.match(r":(\d+):|.*\(at line (\d+),", said.removeprefix(str(path)))
    assert found, f"no line: {said}"
    assert int(found[1] or found[2]) == line, said
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("raw", "part"),
    [(b'codecs = "\xff\xfe"', "UTF-8"), ("codecs = 'ü'".encode("latin-1"), "UTF-8")],
)
def test_file_that_is_not_utf_8_is_named(raw, part, toml):
    with pytest.raises(PolicyError, match=part) as error:
        Policy.from_toml(toml(raw))
    assert "mine.toml" in str(error.value)


def test_file_that_is_missing_or_cannot_be_read_is_named(tmp_path):
    with pytest.raises(PolicyError, match=r"none\.toml.*No such file"):
        policy_named(str(tmp_path / "none.toml"))
    with pytest.raises(PolicyError, match="cannot be read"):
        Policy.from_toml(tmp_path)


def test_text_beyond_ascii_is_read_as_utf_8(toml):
    assert (
        Policy.from_toml(toml('[[rule]]\nmodule = "schichten.ä"\nkeep = true\n')).rules[0].module
        == "schichten.ä"
    )


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Policy(max_error="x"), "max_error='x'"),
        (lambda: Policy(codecs=3), "codecs=3"),
        (lambda: Policy(codecs=("int8", 3)), "codecs="),
        (lambda: Policy(rules=[{"codec": "int8"}]), "commpass.Rule(...)"),
        (lambda: Policy(rules=3), "commpass.Rule(...)"),
        (lambda: Rule(min_bytes="3"), "min_bytes='3'"),
        (lambda: Rule(min_bytes=-1), "Rule(min_bytes=-1): must be at least 0"),
        (
            lambda: Profile("p", Link(1, 1), margin=10),
            "Profile(margin=10): must be a share of the plain time",
        ),
        (lambda: Rule(module=None), "module=None"),
        (lambda: commpass.codec(8), "8 is no codec"),
        (lambda: commpass.backend(3), "3 is no policy"),
        (lambda: commpass.backend(["int8"]), "write commpass.Policy(codecs=['int8'])"),
        (lambda: commpass.backend("int8(block=64)"), "commpass.Policy(codecs='int8(block=64)')"),
        (lambda: commpass.backend([]), "[] is no policy: give one of"),
        (lambda: commpass.backend("cluster.json"), "is given as profile='cluster.json'"),
        (lambda: commpass.backend(Path("cluster.json")), "a policy is a .toml file"),
        (lambda: Rule(direction="bwd"), "'bwd'; did you mean 'backward'?"),
        (lambda: Rule(direction="FW"), "'FW'; did you mean 'forward'?"),
        (lambda: Rule(direction="fowrard"), "'fowrard'; did you mean 'forward'?"),
        (lambda: Rule(direction="up"), "'up'. Known: backward, forward."),
        (lambda: commpass.backend(Path("none.toml")), "none.toml: cannot be read"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(make, part):
    with pytest.raises(PolicyError) as error:
        make()
    assert part in str(error.value)


def test_keys_of_policies_and_of_profiles_are_no_others():
    """They tell files of the two apart."""
    fields = {kind: {f.name for f in dataclasses.fields(kind)} for kind in (Policy, Profile)}
    assert fields[Profile] | {"base"} > PROFILE_KEYS
    assert fields[Policy] | {"preset", "rule"} > POLICY_KEYS
    assert not PROFILE_KEYS & (fields[Policy] | {"preset", "rule"})
    assert not POLICY_KEYS & (fields[Profile] | {"base"})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('rule = [{codec = "int8"},\n  {codec = "int9"}]\n', 2),
        (
            (
                'name = "x"\nrule = [\n  {module = "a", codec = "int8"},\n  {module = "b", kodec ='
                ' "int8"},\n]\n'
            ),
            4,
        ),
    ],
)
def test_error_in_an_inline_rule_names_its_line(tmp_path, text, line):
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(PolicyError, match=f"policy.toml:{line}: "):
        Policy.from_toml(file)


def test_chunks_in_a_file_are_those_of_python(toml):
    path = toml('chunks = 2\n[[rule]]\nmodule = "head"\nchunks = 64\n[[rule]]\nchunks = 1\n')
    rules = [Rule(module="head", chunks=64), Rule(chunks=1)]
    policy = Policy.from_toml(path)
    assert policy == Policy(name="mine", chunks=2, rules=rules)
    assert terms(policy).chunks == 1  # 1 is a value, and not left open
    assert terms(Policy(chunks=2, rules=[Rule(codec="int8")])).chunks == 2
    assert terms(Policy(rules=[Rule(codec="int8")])).chunks is None
    assert Annotation.from_json(Annotation(chunks=4).to_json()).chunks == 4


def test_rule_that_only_says_how_does_not_answer_for_the_codec():
    policy = Policy(name="mine", codecs="int8", rules=[Rule(rows=4, kind="all_reduce")])
    found = terms(policy)
    assert (found.source, found.split) == ("policy 'mine'", "rule 1 (kind='all_reduce')")
    found = terms(Policy(name="mine", rows=2, rules=[Rule(codec="int8")]))
    assert (found.source, found.split) == ("rule 1 (module='**')", "policy 'mine'")


def test_preset_with_something_changed():
    rule = Rule(kind="all_reduce", rows=4)
    changed = Policy.from_preset("balanced", rules=[rule], max_error=0.01)
    assert (changed.codecs, changed.name) == (PRESETS["balanced"].codecs, "balanced, changed")
    assert (changed.rules, changed.max_error) == ((rule,), 0.01)
    assert Policy.from_preset("balanced") == PRESETS["balanced"]
    assert Policy.from_preset("taco", rules=[rule]).rules == (rule, *PRESETS["taco"].rules)
    with pytest.raises(PolicyError, match="did you mean 'balanced'"):
        Policy.from_preset("balance")
    with pytest.raises(PolicyError, match="did you mean 'max_error'"):
        Policy.from_preset("balanced", max_eror=0.1)


def test_pass_that_does_not_exist_is_refused_where_it_is_written(tmp_path):
    assert tuple(each.name for each in PASSES if each.phase == "graph") == PASS_NAMES
    with pytest.raises(PolicyError, match="no pass 'chunks'; did you mean 'chunk'"):
        Policy(skip="chunks")
    file = tmp_path / "policy.toml"
    file.write_text('max_error = 0.1\nskip = ["chunks"]\n')
    with pytest.raises(PolicyError, match=r"policy\.toml:2: .*no pass 'chunks'"):
        Policy.from_toml(file)
