"""decide as a pure function, its numbers worked out a second time from the formulas, and when it compresses or does not."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import commpass
from commpass.collectives import ALGORITHM_NAMES, algorithms_of
from commpass.costmodel import KINDS, KernelRate, Kernels, Link, Profile, default_profile, ethernet
from commpass.passes.decide import decide
from commpass.plan import NONE, PlannedSite, Site
from commpass.policy import PRESETS, Policy, Rule, Word

COMPRESSIBLE = ("all_reduce", "all_gather", "reduce_scatter")
RANKS = [2, 3, 8, 64, 1000, 1024]
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
CODECS = ("int8", "int4(block=64)", "fp8", "rotated")
KERNELS = Kernels(
    launch_us=3.0,
    other=KernelRate(0.5, 0.25),
    rates={"int8": KernelRate(0.125, 0.0625), "int4": KernelRate(0.375, 0.75)},
)
FAST, SLOW = Link(5.0, 500.0), Link(50.0, 0.05)

examples = settings(max_examples=80, deadline=None)


def profile(link: Link = SLOW, margin: float = 0.0, **changes) -> Profile:
    return Profile("test", link, kernels=KERNELS, margin=margin, **changes)


def site(kind: str = "all_reduce", numel: int = 1 << 20, ranks: int = 8, dtype: str = "float32", **changes) -> Site:
    reduces = {"all_reduce": "sum", "reduce_scatter": "avg"}
    facts = {
        "name": "site", "kind": kind, "reduce_op": reduces.get(kind), "group": "0", "group_label": "tp", "group_size": ranks,
        "dtype": dtype, "shape": (numel,), "bytes": numel * ITEM.get(dtype, 1),
    }  # fmt: skip
    return Site(**(facts | changes))


def one(a_site: Site, policy: Policy, a_profile: Profile) -> PlannedSite:
    (planned,) = decide([a_site], policy, a_profile)
    return planned


SITES = st.builds(
    lambda kind, numel, ranks, dtype: site(kind, numel * (ranks if kind == "reduce_scatter" else 1), ranks, dtype),
    st.sampled_from(COMPRESSIBLE), st.integers(1, 1 << 22) | st.integers(1, 300), st.integers(2, 1024),
    st.sampled_from(list(ITEM)),
)  # fmt: skip
ANY_SITES = st.builds(
    lambda kind, op, numel, ranks, dtype, obstacle, module: site(
        kind, max(numel, 0), ranks, dtype, reduce_op=op, obstacle=obstacle, module=module,
        **({"bytes": -1, "shape": ("u0",)} if numel < 0 else {}),
    ),
    st.sampled_from([*KINDS, "permute_tensor"]), st.sampled_from([None, "sum", "avg", "max"]), st.integers(-1, 5000),
    st.integers(1, 64), st.sampled_from([*ITEM, "int32", "complex64", "float8_e4m3fn", "unknown"]),
    st.sampled_from([None, None, "nobody waits for its result"]), st.sampled_from(["", "layers.0.mlp", "head"]),
)  # fmt: skip
LINKS = st.builds(
    Link,
    st.floats(0, 500),
    st.floats(0.001, 1000),
    st.sampled_from([{}, {"all_to_all": 2.0, "reduce_scatter": 2.0}]),
)
POLICIES = st.builds(
    Policy,
    codecs=st.lists(st.sampled_from(CODECS), max_size=3),
    algorithms=st.lists(st.sampled_from(ALGORITHM_NAMES), min_size=1, unique=True),
    max_error=st.sampled_from([None, 0.0, 0.01, 1.0]),
    rules=st.lists(
        st.sampled_from(
            [Rule(module="layers.*", keep=True), Rule(module="head", codec="fp8", force=True), Rule(min_bytes=999)]
        ),
        max_size=2,
    ),
)


# --- the formulas, a second time --------------------------------------------------------------------------------------


def exchange_us(kind: str, nbytes: float, ranks: int, alpha: float, gbytes: float, factor: float = 1.0) -> float:
    """alpha-beta: ``messages * alpha + bytes sent / bandwidth``; 1 GB/s are 1000 bytes a microsecond."""
    beta = factor / (gbytes * 1000)
    p = ranks
    return {
        "all_reduce": 2 * (p - 1) * alpha + 2 * (p - 1) / p * nbytes * beta,
        "all_gather": (p - 1) * (alpha + nbytes * beta),
        "reduce_scatter": (p - 1) * alpha + (p - 1) / p * nbytes * beta,
        "all_to_all": (p - 1) * alpha + (p - 1) / p * nbytes * beta,
    }[kind]


def wire_bytes(numel: int, block: int, bits: int, scale: int) -> int:
    """Codes of whole blocks, then a scale a block, each up to a multiple of 128 bytes."""
    blocks = math.ceil(numel / block)
    return math.ceil(blocks * block * bits / 8 / 128) * 128 + math.ceil(blocks * scale / 128) * 128


def work(algorithm: str, kind: str, numel: int, ranks: int, block: int, bits: int, dtype: str):
    """(exchanges, values encoded, values decoded, encodes in a row) of one rank."""
    scale = 8 if dtype == "float64" else 4
    if kind == "reduce_scatter":
        return [("all_to_all", ranks * wire_bytes(numel // ranks, block, bits, scale))], numel, numel, 1
    if algorithm == "two_shot":
        shard = math.ceil(numel / (ranks * block)) * block
        wire = wire_bytes(shard, block, bits, scale)
        return [("all_to_all", ranks * wire), ("all_gather", wire)], shard * (ranks + 1), 2 * shard * ranks, 2
    return [("all_gather", wire_bytes(numel, block, bits, scale))], numel, numel * ranks, 1


CASES = [(kind, algorithm.name) for kind in COMPRESSIBLE for algorithm in algorithms_of(kind)]


@pytest.mark.parametrize("dtype", ITEM)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("kind", "algorithm"), CASES)
def test_predicted_times_and_bytes_are_those_of_the_formulas(kind, algorithm, ranks, dtype):
    alpha, gbytes = 7.0, 1.25
    factors = {"reduce_scatter": 2.0, "all_to_all": 1.5}
    a_profile = profile(Link(alpha, gbytes, factors))
    for (codec, block, bits), per_rank in itertools.product([("int8", 256, 8), ("int4(block=64)", 64, 4)], [1, 300, 40_000]):
        numel = per_rank * ranks
        planned = one(
            site(kind, numel, ranks, dtype), Policy(rules=[Rule(codec=codec, algorithm=algorithm, force=True)]), a_profile
        )
        exchanges, encoded, decoded, encodes = work(algorithm, kind, numel, ranks, block, bits, dtype)
        rate = KERNELS.rates[codec.partition("(")[0]]
        expected = sum(exchange_us(k, size, ranks, alpha, gbytes, factors.get(k, 1.0)) for k, size in exchanges)
        expected += 2 * encodes * KERNELS.launch_us + (encoded * rate.encode_ns + decoded * rate.decode_ns) / 1000
        plain = exchange_us(kind, numel * ITEM[dtype], ranks, alpha, gbytes, factors.get(kind, 1.0))
        assert (planned.codec, planned.algorithm) == (codec, algorithm)
        assert planned.predicted_us == pytest.approx(expected, abs=1e-3)
        assert planned.plain_us == pytest.approx(plain, abs=1e-3)
        assert planned.wire_bytes == sum(size for _, size in exchanges)
        assert planned.bytes == numel * ITEM[dtype]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_link_costs_start_ups_and_bytes(kind, ranks):
    for alpha, gbytes, factor, nbytes in ((0.0, 1.0, 1.0, 10**6), (60.0, 1.25, 2.0, 10**6), (60.0, 1.25, 2.0, 0)):
        expected = exchange_us(kind, nbytes, ranks, alpha, gbytes, factor)
        assert Link(alpha, gbytes, {kind: factor}).us(kind, nbytes, ranks) == pytest.approx(expected)
        assert Link(alpha, gbytes).us(kind, nbytes, ranks) == pytest.approx(exchange_us(kind, nbytes, ranks, alpha, gbytes))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_alone_sends_nothing(kind):
    assert Link(60.0, 1.0).us(kind, 1 << 20, 1) == 0.0
    assert Link(60.0, 1.0).us(kind, 1 << 20, 2) > 60.0


def test_ethernet_is_gloo_over_that_many_bits():
    """gloo's reduce_scatter sends everything twice and its all_to_all is half duplex; its all_reduce is at the formula."""
    link = ethernet(10, alpha_us=60.0).link_of("any")
    for kind, factor in (("all_reduce", 1), ("all_gather", 1), ("reduce_scatter", 2), ("all_to_all", 2)):
        assert link.us(kind, 1 << 24, 8) == pytest.approx(exchange_us(kind, 1 << 24, 8, 60.0, 1.25, factor))
    assert default_profile("cpu").link == ethernet(10).link
    assert default_profile("cuda").link.gbytes_per_s > link.gbytes_per_s


def test_a_kernel_costs_its_launch_and_its_values():
    assert KERNELS.us("int8", 1000, 2000, kernels=2) == pytest.approx(6.0 + 0.125 + 0.125)
    assert KERNELS.us("int8(block=64)", 1000, 2000, kernels=2) == KERNELS.us("int8", 1000, 2000, kernels=2)
    assert KERNELS.us("rotated", 1000, 2000, kernels=1) == pytest.approx(3.0 + 0.5 + 0.5)


LABELS = {"tp": 1.0, "tp_inner": 1.0, "dp": 2.0, "dp0": 3.0, "pp": 4.0, "": 4.0, "ep.1": 5.0}


@pytest.mark.parametrize("label", LABELS)
def test_the_first_link_whose_glob_fits_the_groups_label_counts(label):
    links = {
        "tp*": Link(1.0, 1.0),
        "dp": Link(2.0, 1.0),
        "dp?": Link(3.0, 1.0),
        "ep.[0-3]": Link(5.0, 1.0),
        "tp": Link(9.0, 1.0),
    }
    a_profile = profile(Link(4.0, 1.0), links=links)
    assert a_profile.link_of(label).alpha_us == LABELS[label]
    planned = one(site(group_label=label, ranks=2), Policy(), a_profile)
    assert planned.plain_us == pytest.approx(exchange_us("all_reduce", planned.bytes, 2, LABELS[label], 1.0), abs=1e-3)


def test_groups_on_links_of_their_own_are_decided_on_their_own():
    a_profile = profile(FAST, links={"dp": SLOW})
    tp, dp = decide([site(group_label="tp"), site(group_label="dp")], Policy(codecs="int8"), a_profile)
    assert (tp.codec, dp.codec) == (NONE, "int8")


# --- a pure function, and one that never loses ------------------------------------------------------------------------


@examples
@given(st.lists(ANY_SITES, max_size=5), POLICIES, LINKS)
def test_the_same_inputs_give_the_same_plan_and_sites_do_not_depend_on_each_other(sites, policy, link):
    planned = decide(sites, policy, profile(link))
    assert decide(list(sites), dataclasses.replace(policy), profile(link)) == planned
    assert tuple(one(a_site, policy, profile(link)) for a_site in sites) == planned
    assert decide(reversed(sites), policy, profile(link)) == planned[::-1]


@examples
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


@examples
@given(SITES, LINKS, st.sampled_from([0.0, 0.1, 0.5]), st.lists(st.sampled_from(CODECS), min_size=1, unique=True))
def test_the_chosen_candidate_is_the_fastest_and_never_slower_than_leaving_alone(a_site, link, margin, codecs):
    """Law 10. Each candidate is forced by itself to learn its time."""
    a_profile = profile(link, margin)
    chosen = one(a_site, Policy(codecs=codecs), a_profile)
    times = {
        (codec, a.name): one(a_site, Policy(rules=[Rule(codec=codec, algorithm=a.name, force=True)]), a_profile).predicted_us
        for codec in codecs
        for a in algorithms_of(a_site.kind)
    }
    best = min(times.values())
    gains = chosen.plain_us - best > margin * chosen.plain_us
    assert chosen.compressed == gains
    assert chosen.predicted_us == (best if gains else chosen.plain_us)
    if gains:
        assert times[chosen.codec, chosen.algorithm] == best
        assert chosen.predicted_us < (1 - margin) * chosen.plain_us


@examples
@given(SITES, st.floats(0.01, 100))
def test_a_faster_link_never_turns_a_site_that_was_left_alone_into_a_compressed_one(a_site, gbytes):
    slower, faster = profile(Link(0.0, gbytes)), profile(Link(0.0, 2 * gbytes))
    if one(a_site, Policy(codecs="int8"), faster).compressed:
        assert one(a_site, Policy(codecs="int8"), slower).compressed


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("kind", COMPRESSIBLE)
def test_a_slow_link_makes_it_compress_and_a_fast_one_leave_alone_with_both_times(kind, ranks):
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


def test_a_gain_has_to_be_above_the_margin_and_the_reason_says_so():
    """Law 10, at the edge: a gain of exactly the margin is not enough."""
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


def test_a_gain_of_exactly_the_margin_is_not_enough():
    link, free = Link(0.0, 0.001), Kernels(0.0, KernelRate(0.0, 0.0))
    a_site = site("all_gather", 128 * 64, 2)  # float32: 32768 bytes; int8 with blocks of 256: 8192 + 128 bytes
    planned = one(a_site, Policy(codecs="int8"), Profile("test", link, kernels=free, margin=0.0))
    assert (planned.bytes, planned.wire_bytes, planned.plain_us, planned.predicted_us) == (32768, 8320, 32768.0, 8320.0)
    for margin, compressed in ((24448 / 32768, False), (24447 / 32768, True)):
        assert one(a_site, Policy(codecs="int8"), Profile("test", link, kernels=free, margin=margin)).compressed is compressed


def test_profiles_have_a_margin_of_their_own():
    assert ethernet(10).margin > 0
    assert default_profile("cuda").margin > 0


@examples
@given(SITES, LINKS)
def test_force_compresses_whatever_the_times_and_says_so(a_site, link):
    planned = one(a_site, Policy(rules=[Rule(codec="int8", force=True)]), profile(link, 0.5))
    assert planned.codec == "int8"
    assert "forces" in planned.reason
    assert "rule 1" in planned.reason
    word = dataclasses.replace(a_site, word=Word(codec="fp8", force=True).to_json())
    assert one(word, Policy(), profile(link, 0.5)).codec == "fp8"


# --- what is allowed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "algorithm"), CASES)
def test_the_error_of_a_plan_is_the_codecs_once_for_each_encode(kind, algorithm):
    planned = one(site(kind), Policy(rules=[Rule(codec="int4", algorithm=algorithm, force=True)]), profile())
    once = commpass.codec("int4").relative_error()
    assert planned.error == pytest.approx(once * (math.sqrt(2) if algorithm == "two_shot" else 1), abs=1e-6)


@pytest.mark.parametrize("forced", [False, True])
def test_a_candidate_above_the_error_budget_is_out_and_the_reason_gives_error_and_budget(forced):
    error = commpass.codec("int4").relative_error()
    for budget, allowed in ((error * 1.001, {"one_shot"}), (error * 1.5, {"one_shot", "two_shot"}), (error * 0.999, set())):
        for algorithm in ("one_shot", "two_shot"):
            policy = Policy(codecs="int4", algorithms=algorithm, max_error=budget, rules=[Rule(force=forced)])
            planned = one(site(), policy, profile())
            assert planned.compressed is (algorithm in allowed), (budget, algorithm)
            assert planned.error <= budget
            if not planned.compressed:
                of_it = error * (math.sqrt(2) if algorithm == "two_shot" else 1)
                for part in ("int4", algorithm, f"{of_it:.3%}", f"{budget:.3%}"):
                    assert part in planned.reason


def test_the_budget_takes_the_next_codec_that_is_within_it():
    policy = Policy(codecs=("int4", "int8"))
    assert one(site(), policy, profile()).codec == "int4"  # fewer bytes
    assert one(site(), dataclasses.replace(policy, max_error=0.02), profile()).codec == "int8"
    nothing = one(site(), dataclasses.replace(policy, max_error=0.0), profile())
    assert nothing.codec == NONE
    for part in ("int4 by one_shot", "int4 by two_shot", "int8 by one_shot", "int8 by two_shot"):
        assert part in nothing.reason


@pytest.mark.parametrize("kind", COMPRESSIBLE)
@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_an_algorithm_named_for_another_kind_leaves_this_kind_its_own(kind, name):
    own = [algorithm.name for algorithm in algorithms_of(kind)]
    for policy in (Policy(codecs="int8", algorithms=name), Policy(rules=[Rule(codec="int8", algorithm=name)])):
        planned = one(site(kind, ranks=2), policy, profile())
        assert planned.compressed
        assert planned.algorithm in ([name] if name in own else own)


def test_of_several_algorithms_the_fastest_is_taken():
    few, many = (one(site(ranks=ranks), Policy(codecs="int8"), profile(SLOW)) for ranks in (2, 64))
    assert (few.algorithm, many.algorithm) == ("one_shot", "two_shot")
    only = one(site(ranks=64), Policy(codecs="int8", algorithms="one_shot"), profile(SLOW))
    assert only.algorithm in ("one_shot", NONE)
    assert "two_shot" not in only.reason


FORCED = Policy(codecs="int8", rules=[Rule(codec="int8", force=True)])
OBSTACLES = {
    "the form of the collective": (site(obstacle="nobody waits for its result"), "nobody waits for its result"),
    "one rank": (site(ranks=1), "one rank"),
    "broadcast": (site("broadcast"), "broadcast"),
    "all_to_all": (site("all_to_all"), "all_to_all"),
    "send": (site("send"), "send"),
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
def test_an_obstacle_leaves_a_site_alone_even_if_forced_and_is_its_reason(what, policy):
    a_site, part = OBSTACLES[what]
    planned = one(a_site, policy, profile())
    assert part in planned.reason
    assert (planned.codec, planned.algorithm, planned.wire_bytes) == (NONE, NONE, a_site.bytes)
    assert planned.predicted_us == planned.plain_us >= 0


def test_without_the_obstacle_those_sites_would_be_compressed():
    assert one(site(), Policy(codecs="int8"), profile()).compressed
    assert one(site("reduce_scatter"), FORCED, profile()).compressed
    assert one(site(shape=("s0", 4)), Policy(codecs="int8"), profile()).compressed  # symbolic, but with a hint


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
def test_a_site_that_nobody_allows_a_codec_has_the_reason_who_said_so(policy, part):
    planned = one(site(), policy, profile())
    assert planned.codec == NONE
    assert part in planned.reason
    assert "allows no codec" in planned.reason


def test_a_word_in_the_model_is_decided_by_and_named():
    kept = one(site(word=Word(keep=True).to_json()), Policy(codecs="int8"), profile())
    assert (kept.codec, "keep" in kept.reason) == (NONE, True)
    said = one(site(word=Word(codec="fp8").to_json()), Policy(codecs="int8"), profile())
    assert (said.codec, "compress" in said.reason) == ("fp8", True)
    off = one(site(word=Word(codec="fp8", force=True).to_json()), PRESETS["off"], profile())
    assert off.codec == NONE


@pytest.mark.parametrize(("name", "state"), [("topk", "error feedback"), ("difference", "reference")])
def test_a_codec_that_needs_state_is_refused_with_what_it_needs(name, state):
    planned = one(site(), Policy(codecs=(name,)), profile())
    assert not planned.compressed
    assert f"{name} needs {state}" in planned.reason
