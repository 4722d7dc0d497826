"""Candidates and the choice as pure functions: when the choice compresses, and what is allowed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from choice_formulas import CASES, SPECS, choices, fits, parameters
from deciding import (
    CODECS,
    COMPRESSIBLE,
    FAST,
    ITEM,
    LINKS,
    RANKS,
    SHARED_OUT,
    SLOW,
    decide,
    forced,
    one,
    options,
    profile,
    site,
    tried,
)
from graphs import KINDS_HERE
from hypothesis import example, given
from hypothesis import strategies as st

import commpass
from commpass.collectives import (
    ALGORITHM_NAMES,
    DEFAULTS,
    algorithms_of,
)
from commpass.costmodel import (
    KernelRate,
    Kernels,
    Link,
    Profile,
    default_profile,
    ethernet,
)
from commpass.errors import PolicyError
from commpass.plan import NONE, Site
from commpass.plan.kinds import KINDS
from commpass.policy import PRESETS, Policy
from commpass.policy.rules import Annotation, Rule

SITES = st.builds(
    lambda kind, numel, ranks, dtype: site(
        kind, numel * (ranks if kind in SHARED_OUT else 1), ranks, dtype
    ),
    st.sampled_from(COMPRESSIBLE),
    st.integers(1, 1 << 22) | st.integers(1, 300),
    st.integers(2, 1024),
    st.sampled_from(list(ITEM)),
)


ANY_SITES = st.builds(
    lambda kind, op, numel, ranks, dtype, reason, module: site(
        kind,
        max(numel, 0),
        ranks,
        dtype,
        reduce_op=op,
        unsupported_reason=reason,
        module=module,
        **({"bytes": -1, "shape": ("u0",)} if numel < 0 else {}),
    ),
    st.sampled_from([*KINDS_HERE, "permute_tensor"]),
    st.sampled_from([None, "sum", "avg", "max"]),
    st.integers(-1, 5000),
    st.integers(1, 64),
    st.sampled_from([*ITEM, "int32", "complex64", "float8_e4m3fn", "unknown"]),
    st.sampled_from([None, None, "nobody waits for its result"]),
    st.sampled_from(["", "layers.0.mlp", "head"]),
)


POLICIES = st.builds(
    Policy,
    codecs=st.lists(st.sampled_from(CODECS), max_size=3),
    algorithms=st.lists(
        st.sampled_from([*DEFAULTS, "ring(stage=ag)", "hierarchical(node=4)"]),
        min_size=1,
        unique=True,
    ),
    max_error=st.sampled_from([None, 0.0, 0.01, 1.0]),
    rules=st.lists(
        st.sampled_from(
            [
                Rule(module="layers.*", keep=True),
                Rule(module="head", codec="fp8", force=True),
                Rule(min_bytes=999),
            ]
        ),
        max_size=2,
    ),
)


@tried
@given(st.lists(ANY_SITES, max_size=5), POLICIES, LINKS)
def test_same_inputs_give_the_same_plan_and_sites_do_not_depend_on_each_other(sites, policy, link):
    planned = decide(sites, policy, profile(link))
    assert decide(list(sites), dataclasses.replace(policy), profile(link)) == planned
    assert tuple(one(a_site, policy, profile(link)) for a_site in sites) == planned
    assert decide(reversed(sites), policy, profile(link)) == planned[::-1]


@tried
@given(ANY_SITES, POLICIES, LINKS, st.floats(0, 0.5))
def test_every_site_keeps_its_facts_and_has_a_reason(a_site, policy, link, margin):
    """Law 6, and the parts of law 9 that need no graph."""
    planned = one(a_site, policy, profile(link, margin))
    assert planned.reason.strip()
    for field in dataclasses.fields(Site):
        assert getattr(planned, field.name) == getattr(a_site, field.name)
    assert (planned.codec == NONE) == (planned.algorithm == NONE)
    if not planned.compressed:
        assert planned.wire_bytes == planned.bytes
        assert planned.predicted_us == planned.plain_us
        assert planned.error == 0
    else:
        assert planned.codec in planned.reason
        assert planned.algorithm in planned.reason


def sends_fewer_bytes(spec: str, a_site: Site) -> bool:
    """Whether the wire of a row, of what one rank sends to another, is smaller than the row."""
    dtype = getattr(torch, a_site.dtype)
    rows = a_site.group_size if KINDS[a_site.kind].scatters else 1
    row = a_site.bytes // dtype.itemsize // rows
    return commpass.codec(spec).wire_bytes(row, dtype) < row * dtype.itemsize


@pytest.mark.slow
@tried
@given(
    SITES,
    LINKS,
    st.sampled_from([0.0, 0.1, 0.5]),
    st.lists(st.sampled_from(CODECS), min_size=1, unique=True),
)
@example(site("all_reduce", 1, 2, "float32"), Link(7.0, 1.0), 0.0, ["int8"])
def test_chosen_candidate_is_the_fastest_and_never_slower_than_leaving_alone(
    a_site, link, margin, codecs
):
    """Law 10. Each candidate is forced separately to learn its time. A codec that sends no fewer
    bytes than the values are is no candidate unless it is forced, as for one value."""
    a_profile = profile(link, margin)
    chosen = one(a_site, Policy(codecs=codecs), a_profile)
    alone = [
        one(a_site, forced(codec, spec), a_profile)
        for codec in codecs
        if sends_fewer_bytes(codec, a_site)
        for spec in choices(a_site.kind)
    ]
    times = {
        (planned.codec, planned.algorithm): planned.predicted_us
        for planned in alone
        if planned.compressed
    }
    best = min(times.values(), default=math.inf)
    gains = chosen.plain_us - best > margin * chosen.plain_us
    assert chosen.compressed == gains
    assert chosen.predicted_us == (best if gains else chosen.plain_us)
    if gains:
        assert times[chosen.codec, chosen.algorithm] == best
        assert chosen.predicted_us < (1 - margin) * chosen.plain_us


@tried
@given(SITES, st.floats(0.01, 100))
def test_faster_link_never_turns_a_site_that_was_left_alone_into_a_compressed_one(a_site, gbytes):
    slower, faster = profile(Link(0.0, gbytes)), profile(Link(0.0, 2 * gbytes))
    if one(a_site, Policy(codecs="int8"), faster).compressed:
        assert one(a_site, Policy(codecs="int8"), slower).compressed


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("kind", COMPRESSIBLE)
def test_slow_link_makes_it_compress_and_a_fast_one_leave_alone_with_both_times(kind, ranks):
    a_site = site(kind, 1 << 20, ranks)
    slow = one(a_site, Policy(name="mine", codecs="int8"), profile(SLOW, 0.1))
    assert slow.codec == "int8"
    assert slow.predicted_us < slow.plain_us / 2
    fast = one(a_site, Policy(name="mine", codecs="int8"), profile(FAST, 0.1))
    assert fast.codec == NONE
    forced = one(a_site, Policy(rules=[Rule(codec="int8", force=True)]), profile(FAST, 0.1))
    for planned, compressed in ((slow, slow), (fast, forced)):
        assert f"{compressed.predicted_us:,.0f} us" in planned.reason
        assert f"{planned.plain_us:,.0f} us" in planned.reason
        assert f"int8 by {compressed.algorithm}" in planned.reason
        assert "test" in planned.reason  # the profile
    assert "mine" in slow.reason
    assert "no gain" in fast.reason


def test_gain_has_to_be_above_the_margin_and_the_reason_says_so():
    """Law 10, at the limit: a gain of exactly the margin is not enough."""
    a_site = site(numel=100_000)
    free = one(a_site, Policy(codecs="int8"), profile(Link(10.0, 1.0)))
    assert free.compressed
    share = (free.plain_us - free.predicted_us) / free.plain_us
    assert 0 < share < 1
    for margin, compressed in ((share * 0.99, True), (share * 1.01, False)):
        planned = one(a_site, Policy(codecs="int8"), profile(Link(10.0, 1.0), margin))
        assert planned.compressed is compressed
        assert ("margin" in planned.reason) is not compressed
        assert (f"{margin:.0%}" in planned.reason) is not compressed


def test_gain_of_exactly_the_margin_is_not_enough():
    link, free = Link(0.0, 0.001), Kernels(0.0, KernelRate(0.0, 0.0))
    a_site = site(
        "all_gather", 128 * 64, 2
    )  # float32: 32768 bytes; int8 with blocks of 256: 8192 + 128 bytes
    planned = one(a_site, Policy(codecs="int8"), Profile("test", link, kernels=free, margin=0.0))
    assert (planned.bytes, planned.wire_bytes, planned.plain_us, planned.predicted_us) == (
        32768,
        8320,
        32768.0,
        8320.0,
    )
    for margin, compressed in ((24448 / 32768, False), (24447 / 32768, True)):
        assert (
            one(
                a_site, Policy(codecs="int8"), Profile("test", link, kernels=free, margin=margin)
            ).compressed
            is compressed
        )


def test_profiles_have_a_margin_of_their_own():
    assert ethernet(10).margin > 0
    assert default_profile("cuda").margin > 0


@pytest.mark.slow
@tried
@given(SITES, LINKS)
def test_force_compresses_whatever_the_times_and_says_so(a_site, link):
    planned = one(a_site, Policy(rules=[Rule(codec="int8", force=True)]), profile(link, 0.5))
    assert planned.codec == "int8"
    assert "forces" in planned.reason
    assert "rule 1" in planned.reason
    word = dataclasses.replace(a_site, annotation=Annotation(codec="fp8", force=True).to_json())
    assert one(word, Policy(), profile(link, 0.5)).codec == "fp8"


def shares(kind: str, spec: str, ranks: int) -> list[float]:
    """Return the share of a result's variance in what is encoded, for each encode.

    Values of ranks are independent: a partial sum of k of them has k shares of ``ranks``.
    """
    name, given = parameters(spec)
    up, down = ranks // 2, (ranks - 1) // 2
    scattered = {
        "ring": [k / ranks for k in range(1, ranks)],
        "semi_ring": [k / ranks for side in (up, down) for k in range(1, side + 1)],
        "hierarchical": [1.0, 1.0],
    }.get(name, [1.0])
    gathered = [1.0] if kind == "all_reduce" and name != "one_shot" else []
    stage = given.get("stage")
    return scattered * (stage != "ag") + gathered * (stage != "rs")


@pytest.mark.few(70)
@pytest.mark.parametrize(
    ("kind", "spec", "ranks"),
    [(*case, ranks) for case in CASES for ranks in [*RANKS, 129] if fits(case[1], ranks)],
)
def test_error_of_a_plan_is_the_codecs_once_for_each_encode(kind, spec, ranks):
    planned = one(site(kind, 64 * ranks, ranks), forced("int4", spec), profile())
    once = commpass.codec("int4").relative_error()
    assert planned.error == pytest.approx(
        once * math.sqrt(sum(shares(kind, spec, ranks))), abs=2e-6
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_encodes_of_rings_add_up_to_the_closed_formulas(ranks):
    up, down = ranks // 2, (ranks - 1) // 2
    assert sum(shares("reduce_scatter", "ring", ranks)) == pytest.approx((ranks - 1) / 2)
    assert sum(shares("all_reduce", "ring", ranks)) == pytest.approx((ranks - 1) / 2 + 1)
    semi = (up * (up + 1) + down * (down + 1)) / (2 * ranks)
    assert sum(shares("reduce_scatter", "semi_ring", ranks)) == pytest.approx(semi)


def coded(values: np.ndarray, random: np.random.Generator, error: float) -> np.ndarray:
    """The average effect of a codec on values: noise of ``error`` times their size."""
    return values + error * values.std() * random.standard_normal(values.shape)


def simulated(spec: str, ranks: int, error: float = 0.05, numel: int = 20_000) -> float:
    """Return the relative error of one shard of an all_reduce of Gaussian values, in float64."""
    name, given = parameters(spec)
    random = np.random.default_rng(ranks)
    x = random.standard_normal((ranks, numel))
    stage = given.get("stage")
    scatters = stage != "ag"

    def send(values: np.ndarray) -> np.ndarray:
        return coded(values, random, error) if scatters else values

    def chain(rows: np.ndarray) -> np.ndarray:
        partial = np.zeros(numel)
        for row in rows:
            partial = send(partial + row)
        return partial

    if name == "ring":
        total = chain(x[:-1]) + x[-1]
    elif name == "semi_ring":
        up = ranks // 2
        total = chain(x[:up]) + x[up] + chain(x[up + 1 :])
    elif name == "hierarchical":
        node = int(given["node"])
        total = sum(
            send(sum(send(row) for row in rows)) for rows in x.reshape(ranks // node, node, numel)
        )
    else:
        total = sum(send(row) for row in x)
    if stage != "rs" and name != "one_shot":
        total = coded(total, random, error)
    exact = x.sum(axis=0)
    return float((total - exact).std() / exact.std())


@pytest.mark.few(22)
@pytest.mark.parametrize(
    ("spec", "ranks"),
    [(s, ranks) for s in SPECS["all_reduce"] for ranks in (2, 3, 8, 64) if fits(s, ranks)],
)
def test_predicted_errors_are_those_of_a_simulation(spec, ranks):
    planned = one(site(ranks=ranks), forced("int4", spec), profile())
    predicted = planned.error / commpass.codec("int4").relative_error()
    assert simulated(spec, ranks) / 0.05 == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("force", [False, True])
def test_candidate_above_the_error_budget_is_out_and_the_reason_gives_error_and_budget(force):
    error = commpass.codec("int4").relative_error()
    for budget, allowed in (
        (error * 1.001, {"one_shot"}),
        (error * 1.5, {"one_shot", "two_shot"}),
        (error * 0.999, set()),
    ):
        for name in ("one_shot", "two_shot"):
            policy = Policy(
                codecs="int4", algorithms=name, max_error=budget, rules=[Rule(force=force)]
            )
            planned = one(site(), policy, profile())
            assert planned.compressed is (name in allowed), (budget, name)
            assert planned.error <= budget
            if not planned.compressed:
                of_it = error * (math.sqrt(2) if name == "two_shot" else 1)
                for part in ("int4", name, f"{of_it:.3%}", f"{budget:.3%}"):
                    assert part in planned.reason


def test_budget_takes_the_next_codec_that_is_within_it():
    policy = Policy(codecs=("int4", "int8"))
    assert one(site(), policy, profile()).codec == "int4"  # fewer bytes
    assert one(site(), dataclasses.replace(policy, max_error=0.02), profile()).codec == "int8"
    strict = dataclasses.replace(policy, max_error=0.0)
    nothing, (each,) = one(site(), strict, profile()), options([site()], strict, profile())
    assert nothing.codec == NONE
    for codec in policy.codecs:
        tried = {c.algorithm: c for c in each.candidates if c.codec == codec and c.error}
        assert set(choices("all_reduce")) <= set(tried)
        assert all(f"{codec} by {spec}: error " in c.refused for spec, c in tried.items())
        least = min(tried.values(), key=lambda c: c.error)
        assert nothing.reason.count(f"{codec} by ") == 1  # the site's own reason is short
        assert least.refused in nothing.reason


@pytest.mark.parametrize("stage", ["ag", "rs"])
def test_one_stage_coded_is_within_a_budget_that_two_are_not(stage):
    once = commpass.codec("int4").relative_error()
    policy = Policy(codecs="int4", algorithms=["two_shot", f"two_shot(stage={stage})"])
    assert one(site(), policy, profile()).algorithm == "two_shot"  # fewer bytes
    assert (
        one(site(), dataclasses.replace(policy, max_error=once * 1.1), profile()).algorithm
        == f"two_shot(stage={stage})"
    )


@tried
@given(
    SITES, st.sampled_from(CODECS), st.floats(0, 0.5), st.sampled_from([0, 2, 4, 8]), st.booleans()
)
def test_no_algorithm_above_the_budget_is_chosen_at_any_number_of_ranks(
    a_site, codec, budget, node, force
):
    """Rings encode again at each hop: the more ranks, the larger their error."""
    a_profile = profile(Link(0.0, 0.01), ranks_per_host=node)
    planned = one(
        a_site, Policy(codecs=codec, max_error=budget, rules=[Rule(force=force)]), a_profile
    )
    once = commpass.codec(codec).relative_error()
    if planned.compressed:
        assert (
            once * math.sqrt(sum(shares(planned.kind, planned.algorithm, planned.group_size)))
            <= budget + 1e-6
        )
    if force:
        least = min(
            math.sqrt(sum(shares(planned.kind, spec, planned.group_size)))
            for spec in choices(planned.kind)
        )
        assert planned.compressed or once * least > budget - 1e-6


@pytest.mark.parametrize("kind", COMPRESSIBLE)
@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_algorithm_named_for_another_kind_leaves_this_kind_its_own_or_the_site_alone(kind, name):
    """A policy names algorithms for all kinds at once; a rule or an annotation names them for its
    own sites."""
    own, mine = choices(kind), name in [a.name for a in algorithms_of(kind)]
    word = (
        Policy(),
        site(kind, ranks=2, annotation=Annotation(codec="int8", algorithm=name).to_json()),
    )
    rule = Policy(rules=[Rule(codec="int8", algorithm=name)]), site(kind, ranks=2)
    for policy, a_site in (
        (Policy(codecs="int8", algorithms=name), site(kind, ranks=2)),
        rule,
        word,
    ):
        planned = one(a_site, policy, profile())
        if mine and name in ("hierarchical", "sparse", "native"):  # not for this group and codec
            assert not planned.compressed
        elif mine or policy.algorithms == (name,):
            assert planned.algorithm in ([name] if mine else own)
        else:
            assert not planned.compressed
            assert (
                planned.reason
                == f"{planned.reason.partition(' names ')[0]} names {name}, but {kind} has only "
                + ", ".join(a.name for a in algorithms_of(kind))
            )
            assert planned.reason.startswith(("rule 1", "compress(...)"))


@pytest.mark.parametrize("force", [True, False])
def test_algorithms_of_the_kind_alone_count_of_those_named(force):
    several = Policy(rules=[Rule(codec="int8", algorithm=["direct", "two_shot"], force=force)])
    assert one(site(ranks=8), several, profile()).algorithm == "two_shot"
    assert one(site("all_gather", ranks=8), several, profile()).algorithm == "direct"
    alone = one(
        site(ranks=8),
        Policy(rules=[Rule(codec="int8", algorithm="direct", force=force)]),
        profile(),
    )
    assert (alone.codec, alone.wire_bytes) == (NONE, alone.bytes)
    assert "two_shot" in alone.reason


def test_algorithm_that_the_kind_of_a_rule_has_not_is_refused_at_once():
    with pytest.raises(PolicyError) as error:
        Rule(kind="all_reduce", codec="int8", algorithm="direct")
    assert "all_reduce has no algorithm 'direct'" in str(error.value)
    assert "two_shot" in str(error.value)
    assert Rule(kind="all_reduce", codec="int8", algorithm=["direct", "ring(stage=ag)"]).algorithm


def test_fastest_of_several_algorithms_is_taken():
    few, many = (one(site(ranks=ranks), Policy(codecs="int8"), profile(SLOW)) for ranks in (2, 64))
    assert (few.algorithm, many.algorithm) == ("one_shot", "two_shot")
    only = one(site(ranks=64), Policy(codecs="int8", algorithms="one_shot"), profile(SLOW))
    assert only.algorithm in ("one_shot", NONE)
    assert "two_shot" not in only.reason


FORCED = Policy(codecs="int8", rules=[Rule(codec="int8", force=True)])


OBSTACLES = {
    "the form of the collective": (
        site(unsupported_reason="nobody waits for its result"),
        "nobody waits for its result",
    ),
    "one rank": (site(ranks=1), "one rank"),
    "a kind that is not known": (site("permute_tensor"), "permute_tensor"),
    "max": (site(reduce_op="max"), "'max'"),
    "product": (site("reduce_scatter", reduce_op="product"), "'product'"),
    "integers": (site(dtype="int64", bytes=800), "int64"),
    "bools": (site(dtype="bool", bytes=100), "bool"),
    "complex numbers": (site(dtype="complex64", bytes=800), "complex64"),
    "8-bit floats": (site(dtype="float8_e4m3fn", bytes=100), "float8_e4m3fn"),
    "a dtype that is not known": (site(dtype="unknown", bytes=-1, shape=()), "unknown"),
    "no elements": (site(numel=0), "no elements"),
    "a size that is not known": (site(bytes=-1, shape=("u0", 4)), "size is not known"),
}


@pytest.mark.parametrize("what", OBSTACLES)
@pytest.mark.parametrize("policy", [Policy(codecs="int8"), FORCED], ids=["wanted", "forced"])
def test_unsupported_site_is_uncompressed_even_if_forced_and_is_its_reason(what, policy):
    a_site, part = OBSTACLES[what]
    planned = one(a_site, policy, profile())
    assert part in planned.reason
    assert (planned.codec, planned.algorithm, planned.wire_bytes) == (NONE, NONE, a_site.bytes)
    assert planned.predicted_us == planned.plain_us >= 0


def test_sites_would_be_compressed_without_the_reason():
    assert one(site(), Policy(codecs="int8"), profile()).compressed
    assert one(site("reduce_scatter"), FORCED, profile()).compressed
    assert one(
        site(shape=("s0", 4)), Policy(codecs="int8"), profile()
    ).compressed  # symbolic, but with a hint


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        (PRESETS["off"], "off"),
        (PRESETS["lossless"], "lossless"),
        (Policy(name="mine"), "mine"),
        (Policy(codecs="int8", rules=[Rule(module="a", codec="int8"), Rule(keep=True)]), "rule 2"),
        (Policy(rules=[Rule(module="**", algorithm="direct")]), "rule 1"),
    ],
)
def test_site_that_nobody_allows_a_codec_has_the_reason_who_said_so(policy, part):
    planned = one(site(), policy, profile())
    assert planned.codec == NONE
    assert part in planned.reason
    assert "allows no codec" in planned.reason


def test_word_in_the_model_is_decided_by_and_named():
    kept = one(site(annotation=Annotation(keep=True).to_json()), Policy(codecs="int8"), profile())
    assert (kept.codec, "keep" in kept.reason) == (NONE, True)
    said = one(site(annotation=Annotation(codec="fp8").to_json()), Policy(codecs="int8"), profile())
    assert (said.codec, "compress" in said.reason) == ("fp8", True)
    off = one(
        site(annotation=Annotation(codec="fp8", force=True).to_json()), PRESETS["off"], profile()
    )
    assert off.codec == NONE


@pytest.mark.parametrize(
    ("name", "state"), [("topk", "error feedback"), ("difference", "reference")]
)
def test_codec_that_needs_state_is_refused_with_what_it_needs(name, state):
    planned = one(site(), Policy(codecs=(name,)), profile())
    assert not planned.compressed
    assert f"{name} needs {state}" in planned.reason


def test_reason_says_why_nothing_keeps_state():
    with_state = one(site(stateless="it is in a loop"), Policy(codecs="topk"), profile())
    assert "topk needs error feedback, but it is in a loop" in with_state.reason
    kept = one(site(stateless=None), forced("topk"), profile())
    assert (kept.codec, kept.algorithm) == ("topk", "sparse")


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        (Policy(codecs="int8", algorithms="sparse"), "int8 selects no indices"),
        (Policy(codecs="int8", max_error=0.0), "above the budget of 0.000%"),
    ],
)
def test_codec_that_needs_no_state_is_not_refused_for_lack_of_it(policy, part):
    planned = one(site(), policy, profile())
    assert "None" not in planned.reason
    assert part in planned.reason
