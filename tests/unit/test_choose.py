"""Candidates and the choice as pure functions.

Numbers are computed a second time from the formulas, and the tests show when the choice compresses.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from deciding import decide, options
from graphs import KINDS_HERE, trace
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiers import examples, thinned

import commpass
from commpass.collectives import (
    ALGORITHM_NAMES,
    DEFAULTS,
    Payload,
    Request,
    Stages,
    algorithms_of,
    read_stages,
)
from commpass.costmodel import (
    KernelRate,
    Kernels,
    Link,
    Profile,
    default_profile,
    ethernet,
    profile_named,
)
from commpass.costmodel.kernels import CPU
from commpass.distributed.parts import Part
from commpass.errors import PolicyError
from commpass.plan import NONE, Plan, PlannedSite, Site
from commpass.plan.kinds import KINDS
from commpass.policy import PRESETS, Policy
from commpass.policy.rules import Annotation, Rule

COMPRESSIBLE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SHARED_OUT = ("reduce_scatter", "all_to_all")
"""Kinds whose input has a part for every rank."""
RANKS = [2, 3, 8, 48, 64, 65, 1000, 1024]
MOST_HOPS = 64
"""The largest number of hops of a ring."""
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
CODECS = ("int8", "int4(block=64)", "fp8", "rotated")
KERNELS = Kernels(
    launch_us=3.0,
    other=KernelRate(0.5, 0.25),
    rates={"int8": KernelRate(0.125, 0.0625), "int4": KernelRate(0.375, 0.75)},
)
FAST, SLOW = Link(5.0, 500.0), Link(50.0, 0.05)

tried = settings(max_examples=examples(26, 80), deadline=None)


def profile(
    link: Link = SLOW, margin: float = 0.0, kernels: Kernels = KERNELS, **changes
) -> Profile:
    return Profile("test", link, kernels=kernels, margin=margin, **changes)


def site(
    kind: str = "all_reduce",
    numel: int = 1 << 20,
    ranks: int = 8,
    dtype: str = "float32",
    **changes,
) -> Site:
    reduces = {"all_reduce": "sum", "reduce_scatter": "avg"}
    facts = {
        "name": "site",
        "kind": kind,
        "reduce_op": reduces.get(kind),
        "group": "0",
        "group_label": "tp",
        "group_size": ranks,
        "dtype": dtype,
        "shape": (numel,),
        "bytes": numel * ITEM.get(dtype, 1),
    }
    return Site(**(facts | changes))


def forced(codec: str, named: str | None = None, **more) -> Policy:
    return Policy(rules=[Rule(codec=codec, algorithm=named, force=True)], **more)


def one(a_site: Site, policy: Policy, a_profile: Profile) -> PlannedSite:
    (planned,) = decide([a_site], policy, a_profile)
    return planned


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
LINKS = st.builds(
    Link,
    st.floats(0, 500),
    st.floats(0.001, 1000),
    st.sampled_from([{}, {"all_to_all": 2.0, "reduce_scatter": 2.0}]),
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


# --- a second implementation of the formulas ------------------------------------------------------


def exchange_us(
    kind: str,
    nbytes: float,
    ranks: int,
    alpha: float,
    gbytes: float,
    factor: float = 1.0,
    peers: int | None = None,
) -> float:
    """alpha-beta: ``messages * alpha + bytes sent / bandwidth``; 1 GB/s are 1000 bytes per
    microsecond.

    With ``peers``, a rank sends one message to each of those and to no other rank.
    """
    beta = factor / (gbytes * 1000)
    p = ranks
    if peers is not None:
        return peers * alpha + nbytes * beta
    return {
        "all_reduce": 2 * (p - 1) * alpha + 2 * (p - 1) / p * nbytes * beta,
        "all_gather": (p - 1) * (alpha + nbytes * beta),
        "reduce_scatter": (p - 1) * alpha + (p - 1) / p * nbytes * beta,
        "all_to_all": (p - 1) * alpha + (p - 1) / p * nbytes * beta,
        "broadcast": (p - 1) * alpha + nbytes * beta,
    }[kind]


def wire_bytes(numel: int, block: int, bits: int, scale: int) -> int:
    """Codes of whole blocks, then a scale per block, each padded to a multiple of 128 bytes."""
    blocks = math.ceil(numel / block)
    return math.ceil(blocks * block * bits / 8 / 128) * 128 + math.ceil(blocks * scale / 128) * 128


def parameters(spec: str) -> tuple[str, dict[str, str]]:
    name, _, inside = spec.rstrip(")").partition("(")
    return name, dict(part.split("=") for part in inside.split(", ") if part)


def work(spec: str, kind: str, numel: int, ranks: int, block: int, bits: int, dtype: str):
    """Return the work of one rank: (exchanges, values encoded, values decoded, kernels).

    Exchanges are (kind, bytes passed to the collective, bytes that leave, peers). The codec has no
    scales and codes nothing if ``bits`` is 0. If ``peers`` is None, the bytes that leave follow the
    plain collective's formula.
    """
    wide, plain = 8 if dtype == "float64" else 4, ITEM[dtype]  # wide: a scale, and a partial sum
    name, given = parameters(spec)
    stage, shards, node = given.get("stage"), int(given.get("shards", 1)), int(given.get("node", 1))

    def whole(values: int) -> int:
        return math.ceil(values / (block * shards)) * block * shards

    def sizes(values: int, item: int) -> list[int]:
        """Return the bytes of a row in each exchange: one, or its shards' scales together and then
        the codes of each."""
        if item:
            return [math.ceil(values / shards) * item] * shards
        if shards == 1:
            return [wire_bytes(values, block, bits, wide)]
        of_one = whole(values) // shards
        codes = wire_bytes(of_one, block, bits, 0)
        return [shards * (wire_bytes(of_one, block, bits, wide) - codes), *[codes] * shards]

    # (kind, rows, values of each, rows for other ranks if only some get one, bytes per value if not
    # coded, rows that arrive)
    if kind in ("all_gather", "broadcast"):
        hops = [(kind, 1, numel, None, 0 if bits else plain, ranks if kind == "all_gather" else 1)]
    elif kind == "all_to_all":
        hops = [(kind, ranks, numel // ranks, None, 0 if bits else plain, ranks)]
    elif name == "one_shot":
        hops = [("all_gather", 1, whole(numel), None, 0 if bits else plain, ranks)]
    else:
        shard, nodes = whole(math.ceil(numel / ranks)), ranks // node
        scattered = {  # (rows, values of each, rows for other ranks)
            "two_shot": [(ranks, shard, None)],
            "direct": [(ranks, shard, None)],
            "ring": [(1, shard, 1)] * (ranks - 1),
            "semi_ring": [(2, shard, 2)] * ((ranks - 1) // 2) + [(1, shard, 1)] * (1 - ranks % 2),
            "hierarchical": [
                (node, nodes * shard, node - 1),
                (nodes, shard, nodes - 1),
            ],  # one stays here
        }[name]
        sums = (
            plain if name in ("two_shot", "direct") else wide
        )  # partial sums are not rounded, values are as they came
        item = sums if stage == "ag" or not bits else 0
        hops = [("all_to_all", rows, values, away, item, rows) for rows, values, away in scattered]
        if kind == "all_reduce":
            hops.append(
                ("all_gather", 1, shard, None, plain if stage == "rs" or not bits else 0, ranks)
            )
    exchanges = [
        (kind, rows * size, rows * size if away is None else away * size, away)
        for kind, rows, values, away, item, _ in hops
        for size in sizes(values, item)
    ]
    coded = [  # in whole blocks
        (rows * whole(values), arriving * whole(values))
        for _, rows, values, _, item, arriving in hops
        if not item
    ]
    encoded, decoded = (sum(pair[side] for pair in coded) for side in (0, 1))
    return (
        exchanges,
        encoded,
        decoded,
        2 * shards * len(coded),
    )  # a separate kernel encodes and decodes each shard


STAGES = ("", "stage=ag", "stage=rs")
SPECS = {
    "all_reduce": [
        "one_shot",
        *(
            f"{name}({stage})" if stage else name
            for name in ("two_shot", "ring", "semi_ring")
            for stage in STAGES
        ),
        *(f"hierarchical(node=4{', ' * bool(stage)}{stage})" for stage in STAGES),
        "hierarchical(node=2)",
    ],
    "reduce_scatter": [
        "direct",
        "ring",
        "semi_ring",
        "hierarchical(node=4)",
        "hierarchical(node=2)",
    ],
    "all_gather": ["direct"],
    "all_to_all": ["direct"],
    "broadcast": ["direct"],
}
"""Every algorithm and stage."""
SHARDED = {
    "all_reduce": [
        "one_shot(shards=2)",
        "two_shot(shards=4)",
        "two_shot(shards=3, stage=ag)",
        "two_shot(shards=2, stage=rs)",
        "ring(shards=2)",
        "semi_ring(shards=2, stage=ag)",
        "hierarchical(node=4, shards=2)",
    ],
    "reduce_scatter": ["direct(shards=2)", "semi_ring(shards=3)", "hierarchical(node=2, shards=2)"],
    "all_gather": ["direct(shards=2)"],
    "all_to_all": ["direct(shards=3)"],
    "broadcast": ["direct(shards=64)"],
}


def ring_hops(spec: str, ranks: int) -> int:
    """A ring passes each of the others; in both directions at once, the farther half."""
    return {"ring": ranks - 1, "semi_ring": ranks // 2}.get(parameters(spec)[0], 0)


def fits(spec: str, ranks: int) -> bool:
    node = int(parameters(spec)[1].get("node", 1))
    return ring_hops(spec, ranks) <= MOST_HOPS and (
        node == 1 or (ranks % node == 0 and ranks > node)
    )


CASES = [(kind, spec) for kind, specs in SPECS.items() for spec in specs]


def test_every_algorithm_has_a_second_formula():
    """Except ``sparse`` and ``native``, which have separate tests."""
    for kind in COMPRESSIBLE:
        assert {parameters(spec)[0] for spec in SPECS[kind]} == {
            a.name for a in algorithms_of(kind)
        } - {"sparse", "native"}


def taken_us(size: int, kind: str, to: Any, ranks: int, gbytes: float, factors: dict) -> float:
    """Return the time for which an exchange occupies the link."""
    return exchange_us(kind, size, ranks, 0.0, gbytes, factors.get(kind, 1.0), to)


def check_formulas(kind: str, spec: str, ranks: int, dtype: str) -> None:
    alpha, gbytes = 7.0, 1.25
    factors = {"reduce_scatter": 2.0, "all_to_all": 1.5}
    a_profile = profile(Link(alpha, gbytes, factors))
    codecs = [("int8", 256, 8), ("int4(block=64)", 64, 4), ("raw", 1, 0)]
    for (codec, block, bits), per_rank in itertools.product(codecs, [1, 300, 40_000]):
        numel = per_rank * ranks
        planned = one(site(kind, numel, ranks, dtype), forced(codec, spec), a_profile)
        exchanges, encoded, decoded, kernels = work(spec, kind, numel, ranks, block, bits, dtype)
        rate = KERNELS.rates.get(codec.partition("(")[0], KERNELS.other)
        expected = sum(
            exchange_us(k, size, ranks, alpha, gbytes, factors.get(k, 1.0), to)
            for k, _, size, to in exchanges
        )
        expected += (
            kernels * KERNELS.launch_us
            + (encoded * rate.encode_ns + decoded * rate.decode_ns) / 1000
        )
        plain = exchange_us(kind, numel * ITEM[dtype], ranks, alpha, gbytes, factors.get(kind, 1.0))
        assert (planned.codec, planned.algorithm) == (codec, spec)
        if "shards=" in spec:  # coding may overlap with exchanges, but takes no less
            coded = kernels * KERNELS.launch_us
            coded += (encoded * rate.encode_ns + decoded * rate.decode_ns) / 1000
            least = max(
                coded,
                sum(taken_us(size, k, to, ranks, gbytes, factors) for k, _, size, to in exchanges),
            )
            assert least - 1e-3 <= planned.predicted_us <= expected + 1e-3
        else:
            assert planned.predicted_us == pytest.approx(expected, rel=1e-9, abs=1e-3)
        assert planned.plain_us == pytest.approx(plain, rel=1e-9, abs=1e-3)
        assert planned.wire_bytes == sum(size for _, size, _, _ in exchanges)
        assert planned.dynamic_bytes == 0
        assert planned.bytes == numel * ITEM[dtype]


@pytest.mark.rest_slow(1)
@pytest.mark.few(13)
@pytest.mark.parametrize(
    ("kind", "spec", "ranks", "dtype"),
    thinned(
        [(*case, ranks) for case in CASES for ranks in RANKS if fits(case[1], ranks)],
        ITEM,
        one_in=4,
    ),
)
def test_predicted_times_and_bytes_are_those_of_the_formulas(kind, spec, ranks, dtype):
    check_formulas(kind, spec, ranks, dtype)


@pytest.mark.rest_slow(1)
@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("kind", "spec", "ranks", "dtype"),
    thinned(
        [
            (kind, spec, n)
            for kind, specs in SHARDED.items()
            for spec in specs
            for n in (2, 3, 8, 48, 1024)
            if fits(spec, n)
        ],
        ["float32", "bfloat16"],
        one_in=3,
    ),
)
def test_micro_shards_are_exchanges_and_kernels_of_their_own(kind, spec, ranks, dtype):
    check_formulas(kind, spec, ranks, dtype)


@pytest.mark.parametrize("kind", COMPRESSIBLE)
def test_values_that_are_not_coded_cost_no_kernels(kind):
    """Whatever kernels cost, a wire of unchanged values costs the same; a stage of them costs the
    kernels of the other stage."""
    free, dear = (
        Profile("test", SLOW, kernels=Kernels(launch, KernelRate(ns, ns)), margin=0.0)
        for launch, ns in ((0.0, 0.0), (1e6, 1e3))
    )
    for spec in [*SPECS[kind], *SHARDED[kind]]:
        if fits(spec, 8):
            least, most = (
                one(site(kind), forced("raw", spec), a_profile) for a_profile in (free, dear)
            )
            assert least.compressed
            assert least.predicted_us == most.predicted_us
    if kind == "all_reduce":
        for stage, kernels in (("ag", 2), ("rs", 14)):
            least, most = (
                one(site(kind), forced("int8", f"ring(stage={stage})"), a_profile)
                for a_profile in (free, dear)
            )
            encoded, decoded = (
                (1 << 20) // 8 * (kernels // 2),
                (1 << 20 if stage == "ag" else (1 << 20) // 8 * 7),
            )
            assert most.predicted_us - least.predicted_us == pytest.approx(
                kernels * 1e6 + encoded + decoded
            )


RINGS = [
    (kind, spec)
    for kind in SHARED_OUT[:1] + COMPRESSIBLE[:1]
    for spec in SPECS[kind]
    if ring_hops(spec, 8)
]


@pytest.mark.parametrize("ranks", [1000, 1024])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("kind", "spec"), RINGS)
def test_ring_of_too_many_hops_is_refused_with_their_number(kind, spec, force, ranks):
    policy = Policy(codecs="int8", algorithms=spec, rules=[Rule(force=force)])
    planned = one(site(kind, 1 << 24, ranks), policy, profile())
    assert not planned.compressed
    for part in (
        spec,
        f"{ranks} ranks",
        f"{ring_hops(spec, ranks)} hops",
        f"more than {MOST_HOPS}",
    ):
        assert part in planned.reason
    assert one(
        site(kind, 1 << 24, ranks), Policy(codecs="int8"), profile(Link(0.0, 0.001))
    ).compressed  # by another algorithm


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(("name", "most"), [("ring", 65), ("semi_ring", 129)])
def test_rings_end_at_64_hops(name, most, kind):
    assert ring_hops(name, most) == MOST_HOPS < ring_hops(name, most + 1)
    for ranks, compressed in ((most - 1, True), (most, True), (most + 1, False)):
        assert (
            one(site(kind, 1 << 16, ranks), forced("int8", name), profile()).compressed
            is compressed
        )


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_codec_between_nodes_may_be_another_and_its_blocks_too(kind, ranks):
    numel, node = 40_000 * ranks, 4
    shard = math.ceil(40_000 / 256) * 256  # whole blocks of both codecs
    inner, outer = (256, 8, 4), (64, 4, 4)
    expected = node * wire_bytes(ranks // node * shard, *inner) + ranks // node * wire_bytes(
        shard, *outer
    )
    expected += wire_bytes(shard, *outer) if kind == "all_reduce" else 0
    planned = one(
        site(kind, numel, ranks),
        forced("int8", "hierarchical(node=4, between=int4(block=64))"),
        profile(),
    )
    assert planned.wire_bytes == expected
    errors = [
        commpass.codec("int8").relative_error(),
        *[commpass.codec("int4(block=64)").relative_error()] * 2,
    ]
    assert planned.error == pytest.approx(
        math.hypot(*errors[: 3 if kind == "all_reduce" else 2]), abs=1e-6
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_sparse_hands_over_one_row_and_decodes_what_all_selected(ranks):
    numel, density = 1_000_000, 0.01
    coder = commpass.codec(f"topk(density={density})")
    planned = one(
        site(numel=numel, ranks=ranks, stateless=None), forced(coder.spec), profile(Link(7.0, 1.25))
    )
    wire = coder.wire_bytes(numel, torch.float32)
    expected = exchange_us("all_gather", wire, ranks, 7.0, 1.25) + 3 * KERNELS.launch_us
    dense = density * ranks >= 1  # rows are decoded whole, else by index; its own row always is
    decoded = numel + numel * ranks * (1 if dense else density)
    expected += (numel * KERNELS.other.encode_ns + decoded * KERNELS.other.decode_ns) / 1000
    assert (planned.algorithm, planned.wire_bytes) == ("sparse", wire)
    assert density * numel * 4 < wire < density * numel * 8.5
    assert planned.predicted_us == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
)
def test_link_costs_start_ups_and_bytes(kind, ranks):
    for alpha, gbytes, factor, nbytes in (
        (0.0, 1.0, 1.0, 10**6),
        (60.0, 1.25, 2.0, 10**6),
        (60.0, 1.25, 2.0, 0),
    ):
        expected = exchange_us(kind, nbytes, ranks, alpha, gbytes, factor)
        assert Link(alpha, gbytes, {kind: factor}).time_us(kind, nbytes, ranks) == pytest.approx(
            expected
        )
        assert Link(alpha, gbytes).time_us(kind, nbytes, ranks) == pytest.approx(
            exchange_us(kind, nbytes, ranks, alpha, gbytes)
        )
        for peers in (1, 2, ranks - 1):
            few = exchange_us(kind, nbytes, ranks, alpha, gbytes, factor, peers)
            assert Link(alpha, gbytes, {kind: factor}).time_us(
                kind, nbytes, ranks, peers
            ) == pytest.approx(few)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_alone_sends_nothing(kind):
    assert Link(60.0, 1.0).time_us(kind, 1 << 20, 1) == 0.0
    assert Link(60.0, 1.0).time_us(kind, 1 << 20, 2) > 60.0


def test_ethernet_is_gloo_over_that_many_bits():
    """gloo's reduce_scatter sends everything twice, and its all_to_all is half duplex beyond 256
    KiB; its all_reduce follows the formula."""
    link = ethernet(10, alpha_us=60.0).link_of("any")
    for kind, factor in (
        ("all_reduce", 1),
        ("all_gather", 1),
        ("reduce_scatter", 2),
        ("all_to_all", 2),
    ):
        both_ways = 262144 / 1250 if kind == "all_to_all" else 0.0
        assert link.time_us(kind, 1 << 24, 8) == pytest.approx(
            exchange_us(kind, 1 << 24, 8, 60.0, 1.25, factor) - both_ways
        )
    assert link.time_us("all_to_all", 1 << 18, 8) == exchange_us(
        "all_to_all", 1 << 18, 8, 60.0, 1.25, 1
    )
    assert default_profile("cpu").link == ethernet(10).link
    assert default_profile("cuda").link.gbytes_per_s > link.gbytes_per_s


def test_kernel_costs_its_launch_and_its_values():
    assert KERNELS.time_us("int8", "encode", 1000) == pytest.approx(3.0 + 0.125)
    assert KERNELS.time_us("int8", "decode", 2000) == pytest.approx(3.0 + 0.125)
    assert KERNELS.time_us("int8(block=64)", "encode", 1000) == KERNELS.time_us(
        "int8", "encode", 1000
    )
    called = dataclasses.replace(KERNELS, call_us=40.0)
    assert called.time_us("int8", "decode", 2000) == pytest.approx(40.0 + 3.0 + 0.125)
    assert called.compute_us(1e6, 0) == KERNELS.compute_us(1e6, 0)
    assert KERNELS.time_us("rotated", "encode", 1000) == pytest.approx(3.0 + 0.5)
    assert KERNELS.time_us("rotated", "decode", 1000) == pytest.approx(3.0 + 0.25)


LABELS = {"tp": 1.0, "tp_inner": 1.0, "dp": 2.0, "dp0": 3.0, "pp": 4.0, "": 4.0, "ep.1": 5.0}


@pytest.mark.parametrize("label", LABELS)
def test_first_link_whose_glob_fits_the_groups_label_counts(label):
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
    assert planned.plain_us == pytest.approx(
        exchange_us("all_reduce", planned.bytes, 2, LABELS[label], 1.0), abs=1e-3
    )


def test_groups_on_links_of_their_own_are_decided_on_their_own():
    a_profile = profile(FAST, links={"dp": SLOW})
    tp, dp = decide(
        [site(group_label="tp"), site(group_label="dp")], Policy(codecs="int8"), a_profile
    )
    assert (tp.codec, dp.codec) == (NONE, "int8")


def choices(kind: str) -> list[str]:
    """Return the choices for a kind if no algorithm is named."""
    return [spec for spec in DEFAULTS if spec in SPECS[kind]]


# --- a pure function that never makes a plan slower -----------------------------------------------


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


# --- what is allowed ------------------------------------------------------------------------------


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


# --- all-to-all whose ranks hold different sizes --------------------------------------------------

SCORED = 1024
"""Entries per rank pair for which times are predicted."""


def exchanges(matrix, width: int | None = 4096, dtype: str = "float32", **changes) -> list[Site]:
    """Return the site of each rank if rank i sends ``matrix[i][j]`` entries to rank j."""
    ranks, of_one = len(matrix), 1 if width is None else width
    found = []
    for rank in range(ranks):
        sent, received = tuple(matrix[rank]), tuple(row[rank] for row in matrix)
        known = all(isinstance(n, int) for n in sent)
        entries = sum(sent) if known else " + ".join(map(str, sent))
        facts = {
            "shape": (entries,) if width is None else (entries, width),
            "width": of_one,
            "splits": (sent, received),
            "bytes": entries * of_one * ITEM[dtype] if known else -1,
        }
        found.append(site("all_to_all", 0, ranks, dtype, **facts | changes))
    return found


def decided(sites: list[Site], policy: Policy, a_profile: Profile) -> list[Plan]:
    """Return each rank's plan, made only from its own site."""
    return [
        Plan(
            graph=str(rank),
            direction="forward",
            policy=policy.name,
            profile="test",
            sites=decide([a_site], policy, a_profile),
        )
        for rank, a_site in enumerate(sites)
    ]


LENGTHS = st.integers(0, 3) | st.integers(0, 5000)
MATRICES = st.integers(2, 6).flatmap(
    lambda ranks: st.lists(
        st.lists(LENGTHS, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks
    )
)
WIDTHS = st.sampled_from([None, 1, 7, 512, 4096])


@pytest.mark.few(1)
@pytest.mark.parametrize("codec", [*CODECS, "exponent"])
@tried
@given(MATRICES, WIDTHS, st.sampled_from(list(ITEM)), LINKS, st.sampled_from([0.0, 0.1]))
@example([[1, 0], [0, 1]], None, "float32", SLOW, 0.0)
def test_ranks_that_hold_different_sizes_decide_alike(codec, matrix, width, dtype, link, margin):
    """Law 5, if no rank knows what another holds."""
    sites = exchanges(matrix, width, dtype)
    assume(
        len({a_site.uneven for a_site in sites}) == 1
    )  # except in test_rank_whose_own_lengths_are_alike
    plans = decided(sites, Policy(codecs=codec), profile(link, margin))
    assert len({(plan.sites[0].codec, plan.sites[0].algorithm) for plan in plans}) == 1
    assert len({plan.digest() for plan in plans}) == 1
    if sites[0].uneven:
        assert len({(plan.sites[0].predicted_us, plan.sites[0].plain_us) for plan in plans}) == 1


@pytest.mark.parametrize("codec", [*CODECS, "exponent"])
@pytest.mark.parametrize("link", [SLOW, Link(5.0, 1.0), FAST], ids=["slow", "middling", "fast"])
@pytest.mark.parametrize("width", [512, 4096])
def test_ranks_that_know_no_sizes_decide_alike_whatever_their_sizes_are_called(width, link, codec):
    sites = exchanges([[f"u{3 * rank + to}" for to in range(3)] for rank in range(3)], width)
    sites[1] = dataclasses.replace(sites[1], bytes=12 * width)  # the one that has a hint
    plans = decided(sites, Policy(codecs=codec), profile(link))
    assert len({plan.digest() for plan in plans}) == 1


def test_rank_that_has_no_entries_at_all_decides_as_the_others_do():
    matrix = [[0, 0, 0], [0, 2000, 10], [0, 10, 2000]]
    for policy in (Policy(codecs="int8"), forced("int8")):
        plans = decided(exchanges(matrix, 64), policy, profile(Link(5.0, 1.0)))
        assert len({plan.digest() for plan in plans}) == 1


def test_rank_whose_own_lengths_are_alike_may_decide_otherwise_which_its_plans_outline_tells():
    """It cannot know better: the ranks find out when they compare their plans (test_agreement)."""
    matrix = [[1, 1, 1], [1, 2000, 10], [1, 10, 2000]]
    plans = decided(exchanges(matrix, 64), Policy(codecs="int8"), profile(Link(5.0, 1.0)))
    assert len({plan.digest() for plan in plans}) == 2
    outlines = {
        outline(one_site, plan) for one_site, plan in zip(exchanges(matrix, 64), plans, strict=True)
    }
    assert len(outlines) == 1
    assert outline(exchanges(matrix, 64, "bfloat16")[0], plans[0]) not in outlines


def outline(one_site: Site, plan: Plan) -> str:
    return Part("", "", None, (), False, (one_site,), plan).outline


@pytest.mark.parametrize(("above", "covered"), [(0, True), (1, False)])
def test_rule_for_large_sites_covers_an_uneven_exchange_on_all_ranks_or_on_none(above, covered):
    """The bytes are those of the same number of rows for each rank, independent of this rank's
    rows."""
    for matrix in ([[9, 9], [1, 2]], [[0, 5000], [1, 0]], [["u0", "u1"], ["u2", "u3"]]):
        least = SCORED * 2 * 4096 * 4 + above
        plans = decided(
            exchanges(matrix),
            Policy(rules=[Rule(codec="int8", min_bytes=least, force=True)]),
            profile(),
        )
        assert [plan.sites[0].compressed for plan in plans] == [covered] * 2
        assert len({plan.digest() for plan in plans}) == 1


SAID = "for 1,024 entries from each rank to each, since ranks may hold different numbers"
INT8 = KERNELS.rates["int8"]
WHETHER_LONG = [(None, False), (40, False), (512, False), (4096, True), (5000, True)]
"""Widths, and whether an entry is encoded separately: if it takes at most a twentieth more bytes
than in a large tensor."""


def blocks(values: int) -> int:
    """Return the values in whole blocks that are encoded and decoded."""
    return math.ceil(values / 256) * 256


def one_way(rows: list[int]) -> int:
    return sum(wire_bytes(row, 256, 8, 4) for row in rows)


@pytest.mark.rest_slow(1)
@pytest.mark.few(7)
@pytest.mark.parametrize("ranks", [2, 8, 1024])
@pytest.mark.parametrize(("width", "by_entries"), WHETHER_LONG)
def test_uneven_exchanges_are_scored_for_so_many_rows_a_rank_and_the_reason_says_so(
    width, by_entries, ranks
):
    sent = [2, 6] * (ranks // 2)
    a_site, *_ = exchanges([sent, *[[4] * ranks] * (ranks - 1)], width)
    of_one = width or 1
    launch = KERNELS.launch_us if by_entries else 0.0  # kernels of parts: below
    a_profile = profile(Link(7.0, 1.25), kernels=dataclasses.replace(KERNELS, launch_us=launch))
    planned = one(a_site, forced("int8"), a_profile)
    wire = one_way([of_one] * SCORED * ranks if by_entries else [SCORED * of_one] * ranks)
    numel = SCORED * ranks * of_one
    coded = SCORED * ranks * blocks(of_one) if by_entries else ranks * blocks(SCORED * of_one)
    expected = exchange_us("all_to_all", wire, ranks, 7.0, 1.25) + 2 * launch
    expected += coded * (INT8.encode_ns + INT8.decode_ns) / 1000
    assert planned.predicted_us == pytest.approx(expected, rel=1e-9, abs=1e-3)
    assert planned.plain_us == pytest.approx(
        exchange_us("all_to_all", 4 * numel, ranks, 7.0, 1.25), rel=1e-9, abs=1e-3
    )
    assert planned.wire_bytes == one_way(
        [of_one] * sum(sent) if by_entries else [entries * of_one for entries in sent]
    )
    assert SAID in planned.reason
    left = one(a_site, Policy(codecs="int8"), profile(FAST, 0.9))
    assert not left.compressed
    assert SAID in left.reason
    assert left.wire_bytes == a_site.bytes


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_uneven_exchange_of_parts_is_charged_two_kernels_for_each(ranks):
    a_site, *_ = exchanges([[2, 6] * (ranks // 2), *[[4] * ranks] * (ranks - 1)], 512)
    free, dear = (
        one(
            a_site,
            forced("int8"),
            profile(SLOW, kernels=dataclasses.replace(KERNELS, launch_us=launch)),
        )
        for launch in (0, 5)
    )
    assert dear.predicted_us - free.predicted_us == pytest.approx(2 * ranks * 5, abs=0.01)


def exchange_work(
    spec: str, codec: str, sent: tuple, received: tuple, width: int, **changes
) -> Stages:
    request = Request("0", len(sent), sent=sent, received=received, **changes)
    payload = Payload(sum(sent) * width, width, torch.float32)
    return read_stages("all_to_all", spec, codec, payload, request)


def coding(found: Stages) -> tuple[int, int, int]:
    """Return the values encoded and decoded, and the number of kernels."""
    kernels = sum(stage.role in ("encode", "decode") for stage in found)
    return found.values("encode"), found.values("decode"), kernels


@pytest.mark.parametrize("spec", ["direct", "direct(shards=2)"])
@pytest.mark.parametrize(
    ("sent", "received", "kernels"),
    [
        ((3, 3, 3), (3, 3, 3), 2),
        ((3, 3, 3), (3, 3, 4), 6),
        ((1, 2, 6), (3, 3, 3), 6),
        ((0, 9, 0), (0, 1, 0), 6),
    ],
)
def test_short_entries_go_by_parts_each_a_row_of_its_own_and_never_in_micro_shards(
    sent, received, kernels, spec
):
    for width in (1, 40, 512):
        found = exchange_work(spec, "int8", sent, received, width)
        assert [(stage.kind, stage.nbytes, stage.dynamic) for stage in found.exchanges] == [
            ("all_to_all", one_way([entries * width for entries in sent]), False)
        ]
        coded = [sum(blocks(entries * width) for entries in some) for some in (sent, received)]
        assert coding(found) == (*coded, kernels)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize(
    ("sent", "unknown", "width"), [((3, 3), False, 4096), ((1, 5), False, 4096), ((3, 3), True, 40)]
)
def test_entries_that_are_rows_go_in_micro_shards(sent, unknown, width, shards):
    found = exchange_work(f"direct(shards={shards})", "int8", sent, sent, width, unknown=unknown)
    length = math.ceil(width / shards / 256) * 256
    codes, scales = length, math.ceil(length // 256 * 4 / 128) * 128
    expected = (
        [6 * shards * scales, *[6 * codes] * shards] if shards > 1 else [6 * (codes + scales)]
    )
    assert [stage.nbytes for stage in found.exchanges] == expected
    assert coding(found) == (6 * length * shards, 6 * length * shards, 2 * shards)


def test_stages_of_a_lossless_code_count_with_its_measured_bits():
    """A gather of 2^20 values, on each of 8 ranks: one row leaves each."""
    payload, request = Payload(1 << 20, 1 << 20, torch.bfloat16), Request("0", 8)
    sent = {
        spec: sum(
            stage.nbytes
            for stage in read_stages("all_gather", "direct", spec, payload, request).exchanges
        )
        * 8
        / (1 << 20)
        for spec in ("exponent", "exponent(bits=12.5)", "exponent(bits=15.0)")
    }
    plain = sent.pop("exponent")
    assert plain == pytest.approx(10.69, abs=0.02)
    assert list(sent.values()) == pytest.approx([12.5, 15], abs=0.01)


@pytest.mark.parametrize("sent", [(3, 3, 3), (1, 2, 6)])
def test_lossless_code_sends_two_parts_of_each_row_in_two_exchanges(sent):
    coder, width = commpass.codec("exponent"), 80
    rows = [entries * width for entries in sent]
    static = sum(coder.parts(row, torch.float32)[0] for row in rows)
    both = sum(coder.expected_bytes(row, torch.float32) for row in rows)
    for spec, expected in (
        ("direct", [(static, False), (both - static, True)]),
        ("direct(first=sizes)", [(8 * len(sent), False), (both, True)]),
    ):
        found = exchange_work(spec, "exponent", sent, sent, width)
        assert [(stage.nbytes, stage.dynamic) for stage in found.exchanges] == expected
        assert found.dynamic_bytes == expected[1][0]


def test_lossless_code_of_parts_of_which_the_last_is_empty():
    assert len(exchange_work("direct", "exponent", (1, 0), (1, 1), 40).exchanges) == 2


def test_lossless_code_of_parts_of_which_the_first_is_empty():
    full, first_empty = (
        exchange_work("direct", "exponent", sent, (1, 1), 40) for sent in ((1, 1), (0, 1))
    )
    assert len(first_empty.exchanges) == 2
    assert 2 * first_empty.wire_bytes == full.wire_bytes
    assert 2 * first_empty.dynamic_bytes == full.dynamic_bytes


@pytest.mark.parametrize("splits", [None, ((5,) * 8, (5,) * 8)], ids=["no splits", "splits alike"])
@pytest.mark.parametrize("width", [40, 512, 4096])
def test_exchanges_of_even_parts_are_scored_as_they_are(width, splits):
    a_site = site("all_to_all", 40 * width, shape=(40, width), width=width, splits=splits)
    assert not a_site.uneven
    planned = one(a_site, forced("int8"), profile(Link(7.0, 1.25)))
    wire = one_way([width] * 40 if splits and width == 4096 else [5 * width] * 8)
    expected = exchange_us("all_to_all", wire, 8, 7.0, 1.25) + 2 * KERNELS.launch_us
    coded = 40 * width if splits and width == 4096 else 8 * blocks(5 * width)
    expected += coded * (INT8.encode_ns + INT8.decode_ns) / 1000
    assert planned.predicted_us == pytest.approx(expected, abs=1e-3)
    assert planned.wire_bytes == wire
    assert "1,024" not in planned.reason.replace(f"{planned.plain_us:,.0f}", "")


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("width", [None, 1, 40, 512, 4096])
def test_exchanges_of_unknown_sizes_are_scored_entry_by_entry_as_they_run(width, ranks):
    """The lengths of parts are unknown: each entry is a row, whether short or long."""
    a_site, *_ = exchanges([[f"u{n}" for n in range(ranks)]] * ranks, width)
    planned = one(a_site, forced("int8"), profile(Link(7.0, 1.25)))
    of_one, entries = width or 1, SCORED * ranks
    expected = (
        exchange_us("all_to_all", entries * one_way([of_one]), ranks, 7.0, 1.25)
        + 2 * KERNELS.launch_us
    )
    expected += entries * blocks(of_one) * (INT8.encode_ns + INT8.decode_ns) / 1000
    assert planned.predicted_us == pytest.approx(expected, rel=1e-9, abs=1e-3)
    plain = exchange_us("all_to_all", entries * of_one * 4, ranks, 7.0, 1.25)
    assert planned.plain_us == pytest.approx(plain, rel=1e-9, abs=1e-3)
    assert SAID in planned.reason


def test_bytes_of_an_unknown_size_are_not_known_but_it_is_decided():
    a_site, *_ = exchanges([["u0", "u1"], ["u2", "u3"]], 4096)
    planned = one(a_site, Policy(codecs="int8"), profile())
    assert (planned.codec, planned.algorithm, planned.bytes, planned.wire_bytes) == (
        "int8",
        "direct",
        -1,
        -1,
    )
    assert planned.dynamic_bytes == 0
    assert SAID in planned.reason
    hinted = one(
        dataclasses.replace(a_site, bytes=100 * 4096 * 4), Policy(codecs="int8"), profile()
    )
    assert hinted.wire_bytes == 100 * wire_bytes(4096, 256, 8, 4)
    assert hinted.predicted_us == planned.predicted_us
    even = one(site("all_to_all", bytes=-1, shape=("s0",)), Policy(codecs="int8"), profile())
    assert "size is not known" in even.reason


@pytest.mark.parametrize("width", [None, 8, 40])
def test_short_entries_of_unknown_splits_are_not_sent_at_more_bytes_than_they_have(width):
    """Law 10: each is padded to a separate block."""
    a_site, *_ = exchanges([["u0", "u1"], ["u2", "u3"]], width)
    a_site = dataclasses.replace(a_site, bytes=4096 * 4 * (width or 1))
    planned = one(a_site, Policy(codecs="int8"), profile())
    assert not planned.compressed
    assert planned.wire_bytes == planned.bytes
    anyway = one(a_site, forced("int8"), profile())
    assert anyway.wire_bytes == 4096 * wire_bytes(width or 1, 256, 8, 4) > anyway.bytes


def test_sites_of_which_ranks_know_different_sizes_share_no_kernels():
    """One rank's sizes are equal for all three sites, another's are not: both must do the same."""
    lowerings = []
    for rank in range(2):
        sites = [exchanges([[8, 4], [6, many]], 512)[rank] for many in (2, 4, 10)]
        lowerings.append(
            [site.lowering for site in decide(sites, forced("int8"), profile(), kernels=True)]
        )
    assert lowerings == [["inline"] * 3] * 2


def test_sites_of_another_group_do_not_count_towards_shared_kernels():
    """A rank of the other group has other sites, and must find the same for this one."""
    own = [site(numel=1 << 16, name=f"a{n}") for n in range(2)]
    others = [dataclasses.replace(each, group="1") for each in own]
    for sites, form in ((own, "inline"), (own + others, "inline"), (own + own, "kernel")):
        planned = decide(sites, forced("int8"), profile(), kernels=True)
        assert {each.lowering for each in planned} == {form}


def test_codec_that_is_named_twice_is_one_candidate():
    (found,) = options([site()], Policy(codecs=("int8", "int8", "int8(block=256)")), profile())
    named = [(each.codec, each.algorithm) for each in found.candidates]
    assert len(named) == len(set(named))


# --- hierarchies ----------------------------------------------------------------------------------


NODES = profile(Link(50.0, 0.5), ranks_per_host=8, intra_host_link=Link(5.0, 200.0))


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_hierarchy_is_a_choice_only_where_the_ranks_of_a_node_are_known(kind):
    a_site, named = site(kind, 1 << 24, 64), Policy(codecs="int8", algorithms="hierarchical")
    unknown = one(a_site, named, profile())
    assert not unknown.compressed
    assert "hierarchical(node=8)" in unknown.reason
    assert "Profile(ranks_per_host=8)" in unknown.reason
    for spec, a_profile in (
        ("hierarchical(node=8)", profile()),
        ("hierarchical", profile(ranks_per_host=8)),
    ):
        planned = one(a_site, dataclasses.replace(named, algorithms=spec), a_profile)
        assert (planned.codec, planned.algorithm) == ("int8", "hierarchical(node=8)")
    said = one(
        a_site,
        dataclasses.replace(named, algorithms="hierarchical(node=4)"),
        profile(ranks_per_host=8),
    )
    assert said.algorithm == "hierarchical(node=4)"  # the more specific annotation
    staged = one(
        a_site,
        Policy(codecs="int8", algorithms="hierarchical(between=int4)"),
        profile(ranks_per_host=8),
    )
    assert staged.algorithm == "hierarchical(between=int4, node=8)"


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_hierarchy_wins_where_the_link_inside_is_fast_and_the_one_between_slow(kind):
    a_site = site(kind, 1 << 26, 64)
    policy = Policy(codecs="int8")
    assert one(a_site, policy, NODES).algorithm == "hierarchical(node=8)"
    for changes in (
        {"ranks_per_host": 0},
        {"intra_host_link": Link(500.0, 0.05)},
        {"ranks_per_host": 7},
        {"ranks_per_host": 64},
    ):
        assert (
            "hierarchical"
            not in one(a_site, policy, dataclasses.replace(NODES, **changes)).algorithm
        )


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("node", [2, 4, 8, 16, 32])
def test_hierarchy_on_one_link_sends_as_many_bytes_in_fewer_messages(node, kind):
    """(node - 1) * nodes + nodes - 1 rows leave a rank, one per other rank, but it sends to only
    node + nodes - 2 of them."""
    a_site, ranks, free = site(kind, 1 << 24, 64), 64, Kernels(0.0, KernelRate(0.0, 0.0))
    for alpha in (0.0, 50.0):
        flat, high = (
            one(
                a_site,
                forced("int8", spec),
                Profile("test", Link(alpha, 0.5), kernels=free, margin=0.0),
            )
            for spec in (
                "two_shot" if kind == "all_reduce" else "direct",
                f"hierarchical(node={node})",
            )
        )
        messages = (ranks - 1) - (node - 1 + ranks // node - 1)
        assert flat.predicted_us - high.predicted_us == pytest.approx(alpha * messages, abs=0.01)
    coding_twice = one(a_site, Policy(codecs="int8"), profile(Link(0.0, 0.5), ranks_per_host=node))
    assert "hierarchical" not in coding_twice.algorithm
    dear_messages = one(
        a_site, Policy(codecs="int8"), profile(Link(500.0, 0.5), ranks_per_host=node)
    )
    assert dear_messages.algorithm == f"hierarchical(node={node})"


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_hops_inside_a_node_take_the_link_inside_and_the_others_the_groups(kind):
    outer, inner, ranks, node, numel = Link(50.0, 0.5), Link(5.0, 200.0), 64, 8, 1 << 20
    a_profile = Profile(
        "test",
        Link(9.0, 9.0),
        links={"tp": outer},
        kernels=KERNELS,
        ranks_per_host=node,
        intra_host_link=inner,
    )
    planned = one(site(kind, numel, ranks), forced("int8", "hierarchical"), a_profile)
    hops, encoded, decoded, kernels = work(
        "hierarchical(node=8)", kind, numel, ranks, 256, 8, "float32"
    )
    expected = kernels * KERNELS.launch_us
    expected += (
        encoded * KERNELS.rates["int8"].encode_ns + decoded * KERNELS.rates["int8"].decode_ns
    ) / 1000
    for (name, _, size, peers), link in zip(hops, [inner, outer, outer], strict=False):
        expected += exchange_us(name, size, ranks, link.alpha_us, link.gbytes_per_s, 1.0, peers)
    assert planned.predicted_us == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("ranks", "node"), [(8, 3), (8, 8), (8, 16), (8, 1), (1000, 64), (7, 2)])
def test_node_that_does_not_divide_the_ranks_is_refused_by_number(ranks, node):
    planned = one(site(ranks=ranks), forced("int8", f"hierarchical(node={node})"), profile())
    assert not planned.compressed
    assert f"{ranks} ranks are not several nodes of {node}" in planned.reason
    assert one(
        site(ranks=ranks), Policy(codecs="int8"), profile(ranks_per_host=node)
    ).compressed  # by another algorithm


# --- lossless codecs, and domains -----------------------------------------------------------------

REDUCTIONS = ("all_reduce", "reduce_scatter")


@pytest.mark.few(17)
@pytest.mark.parametrize("dtype", ITEM)
@pytest.mark.parametrize("kind", COMPRESSIBLE)
@pytest.mark.parametrize("codec", ["exponent", "raw", *CODECS])
def test_bytes_depend_on_the_values_with_a_lossless_code_alone(codec, kind, dtype):
    planned = one(site(kind, 1 << 20, 8, dtype), forced(codec), profile())
    assert planned.codec == codec
    assert (planned.dynamic_bytes > 0) == (
        codec == "exponent" and dtype != "float64"
    )  # whose exponents are sent as they are
    assert planned.dynamic_bytes < planned.wire_bytes
    if codec in ("exponent", "raw"):
        assert planned.error == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lossless_code_is_expected_to_need_what_a_gaussian_does(dtype):
    numel = 1 << 20
    planned = one(site("all_gather", numel, 8, dtype), forced("exponent"), profile())
    sample = (
        torch.randn(numel, generator=torch.Generator().manual_seed(1))
        .to(getattr(torch, dtype))
        .reshape(1, -1)
    )
    coder = commpass.codec("exponent")
    used = int(coder.used_bytes(coder.encode_rows(sample), numel, sample.dtype))
    assert planned.wire_bytes == pytest.approx(used, rel=0.02)
    assert planned.wire_bytes < planned.bytes
    sizes = one(
        site("all_gather", numel, 8, dtype), forced("exponent", "direct(first=sizes)"), profile()
    )
    assert sizes.wire_bytes == planned.wire_bytes + 8
    assert sizes.dynamic_bytes == planned.wire_bytes  # the static part is then sent with the rest


@pytest.mark.parametrize("codec", ["exponent", "raw"])
@pytest.mark.parametrize("kind", COMPRESSIBLE)
def test_codecs_that_lose_nothing_still_sum_in_another_order_which_may_be_forbidden(kind, codec):
    a_site = site(kind)
    assert one(a_site, forced(codec), profile()).codec == codec
    strict = one(a_site, forced(codec, reassociate=False), profile())
    assert strict.compressed is (kind not in REDUCTIONS)
    if kind in REDUCTIONS:
        for spec in choices(kind):
            assert (
                f"{codec} by {spec} sums in another order, which reassociate=False forbids"
                in strict.reason
            )
    assert (
        one(a_site, forced("int8", reassociate=False), profile()).codec == "int8"
    )  # an explicitly allowed error is different


DOMAINS = {
    "rotated": {
        "one_shot": "hadamard",
        "two_shot": "hadamard",
        "two_shot(stage=rs)": "hadamard",
        "two_shot(stage=ag)": "",
        "ring": "hadamard",
        "ring(stage=rs)": "hadamard",
        "ring(stage=ag)": "",
        "semi_ring": "hadamard",
        "hierarchical(node=4)": "hadamard",
    },
    "int8": dict.fromkeys(SPECS["all_reduce"], ""),
    "raw": dict.fromkeys(SPECS["all_reduce"], ""),
}


@pytest.mark.parametrize(
    ("codec", "spec", "domain"),
    [(c, spec, name) for c, of in DOMAINS.items() for spec, name in of.items()],
)
def test_sums_are_made_in_the_codecs_domain_where_coded_values_are_summed(codec, spec, domain):
    planned = one(site(), forced(codec, spec), profile())
    assert (planned.algorithm, planned.domain) == (spec, domain)
    assert (f"sums in the {domain} domain" in planned.reason) == (domain != "")
    assert ("domain" in planned.reason) == (domain != "")


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "broadcast"])
def test_domain_is_absent_where_nothing_is_summed(kind):
    assert one(site(kind), forced("rotated"), profile()).domain == ""
    assert one(site("reduce_scatter"), forced("rotated"), profile()).domain == "hadamard"


# --- the library's own collective on casts --------------------------------------------------------


REDUCTIONS = ("all_reduce", "reduce_scatter")


def native_us(kind: str, values: int, ranks: int, link: Link) -> float:
    """A cast of all values, the plain collective on bf16, and widening what arrives."""
    back = values if kind == "all_reduce" else values // ranks
    rate = KERNELS.other
    us = exchange_us(kind, 2 * values, ranks, link.alpha_us, link.gbytes_per_s)
    return us + 2 * KERNELS.launch_us + (values * rate.encode_ns + back * rate.decode_ns) / 1000


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_native_costs_the_plain_collective_on_two_bytes_a_value_and_two_casts(kind, ranks):
    numel = 64 * 100 * ranks  # a row of whole 128 bytes
    planned = one(site(kind, numel, ranks), forced("bf16", "native"), profile())
    assert (planned.codec, planned.algorithm) == ("bf16", "native")
    assert planned.wire_bytes == 2 * numel
    assert [stage.kind for stage in planned.stages if stage.role == "exchange"] == [kind]
    assert planned.predicted_us == pytest.approx(native_us(kind, numel, ranks, SLOW), abs=1e-3)
    once = commpass.codec("bf16").relative_error()
    partial = sum(k / ranks for k in range(2, ranks + 1))  # shares of what is rounded in between
    assert planned.error == pytest.approx(once * math.sqrt(1 + partial), abs=2e-6)


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("spec", ["bf16", "fp16", "cast(fp16)", "cast"])
def test_native_is_chosen_only_where_it_is_named(kind, spec):
    """This holds even on a link on which it is by far the fastest."""
    slow = profile(Link(0.0, 0.05, {"all_to_all": 100.0, "all_gather": 100.0}))
    fastest, other = (one(site(kind), forced(spec, name), slow) for name in ("native", None))
    assert fastest.predicted_us < 0.1 * other.predicted_us
    named = Rule(codec=spec, algorithm="native")
    word = Annotation(codec=spec, algorithm="native").to_json()
    for policy, a_site in (
        (Policy(rules=[named]), site(kind)),
        (Policy(), site(kind, annotation=word)),
        (Policy(codecs=spec, algorithms="native"), site(kind)),
    ):
        assert one(a_site, policy, slow).algorithm == "native"
    for policy in (
        Policy(codecs=spec),
        Policy(rules=[Rule(codec=spec, force=True)]),
        Policy(codecs=spec, algorithms="direct" if kind == "all_reduce" else "one_shot"),
        *(dataclasses.replace(preset, codecs=spec) for preset in PRESETS.values()),
    ):
        (found,) = options([site(kind)], policy, slow)
        assert "native" not in [each.algorithm for each in found.candidates]


@pytest.mark.parametrize("codec", ["int8", "rotated", "raw", "exponent", "topk"])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_native_is_refused_for_codes_that_no_library_can_sum(kind, codec):
    planned = one(site(kind), forced(codec, "native"), profile())
    assert not planned.compressed
    assert f"the library cannot sum what {codec} sends" in planned.reason
    assert "write codec='bf16'" in planned.reason


def test_native_is_within_the_budget_or_not_taken():
    """On many ranks partial sums are rounded often."""
    policy = forced("bf16", "native", max_error=0.005)
    assert one(site(ranks=8), policy, profile()).compressed
    many = one(site(ranks=64), policy, profile())
    assert not many.compressed
    assert "bf16 by native: error" in many.reason


# --- casts among the candidates -------------------------------------------------------------------


LOSSY = ("balanced", "aggressive")


@pytest.mark.parametrize("name", LOSSY)
def test_preset_takes_a_cast_where_coding_takes_longer_than_it_saves(name):
    """2^22 values on each of two ranks, 2^21 of which are sent to the other rank.

    int8 is encoded in 0.65 ns and decoded in 0.25, a cast in 0.30 and 0.40: 0.20 ns less for each
    of the 2^22, which is 839 us. int8 and its scales take 2 - 1 - 1/64 bytes less for each of the
    2^21, which 25 Gbit/s, 3125 bytes per microsecond, carry in 661 us.
    """
    a_site, link = site("all_to_all", 1 << 22, 2, by_messages=True), ethernet(25)
    cast = KernelRate(0.30, 0.40)
    rates = {"int8": KernelRate(0.65, 0.25), "bf16": cast, "fp16": cast}
    kernels = Kernels(2.0, KernelRate(3.0, 3.0), rates, call_us=40.0)
    link = dataclasses.replace(link, kernels=kernels)
    chosen = one(a_site, dataclasses.replace(PRESETS[name], chunks=1), link)
    assert (chosen.codec, chosen.algorithm) == ("bf16", "direct")
    alpha, busy = link.link.alpha_us, link.link.overhead_us
    assert chosen.predicted_us == pytest.approx(
        alpha + busy + 2 * (2 + 40) + 2**22 * 0.7 / 1e3 + 2**22 / 3125, abs=5.0
    )
    int8 = one(a_site, forced("int8", chunks=1), link)
    assert int8.predicted_us - chosen.predicted_us == pytest.approx(839 - 661, abs=1.0)


@pytest.mark.parametrize("name", LOSSY)
def test_preset_leaves_casts_out_where_fewer_bytes_gain_more(name):
    """At 1 Gbit/s the same byte takes 25 times as long."""
    a_site = site("all_to_all", 1 << 22, 2, by_messages=True)
    chosen = one(a_site, PRESETS[name], ethernet(1))
    assert chosen.compressed
    assert chosen.codec != "bf16"


@pytest.mark.parametrize("name", LOSSY)
def test_preset_takes_a_cast_where_the_budget_of_a_rule_is_below_all_others(name):
    policy = dataclasses.replace(PRESETS[name], rules=(Rule(max_error=0.003),))
    assert one(site(), policy, profile()).codec == "bf16"
    below = dataclasses.replace(PRESETS[name], rules=(Rule(max_error=0.001),))
    assert not one(site(), below, profile()).compressed


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("kind", COMPRESSIBLE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_of_16_bits_are_not_cast(kind, dtype, name):
    """It would save nothing, and float16 would lose three bits."""
    for kernels in (KERNELS, Kernels(0.0, KernelRate(9.0, 9.0), {"bf16": KernelRate(0.0, 0.0)})):
        slow = profile(kernels=kernels)
        assert one(site(kind, 1 << 22, 2, dtype), PRESETS[name], slow).codec != "bf16"
        only = one(site(kind, 1 << 22, 2, dtype), Policy(codecs=["bf16", "fp16"]), slow)
        assert not only.compressed
        assert f"bf16 sends no fewer bytes than the values of {dtype} are" in only.reason
        for wider in ("float32", "float64"):
            assert one(site(kind, 1 << 22, 2, wider), Policy(codecs="bf16"), slow).compressed
    assert one(site(kind, 1 << 22, 2, dtype), forced("bf16"), profile()).codec == "bf16"


def test_casts_have_one_rate_whatever_they_are_called():
    for role in ("encode", "decode"):
        rates = {CPU.time_us(name, role, 1e6) for name in ("bf16", "fp16", "cast", "cast(to=fp16)")}
        assert len(rates) == 1
        assert max(rates) < CPU.time_us("other", role, 1e6)


# --- hosts ----------------------------------------------------------------------------------------


INSIDE = Link(5.0, 200.0)
ON_HOSTS = Profile(
    "test",
    Link(50.0, 0.5),
    links={"named": Link(20.0, 1.0)},
    kernels=KERNELS,
    ranks_per_host=4,
    intra_host_link=INSIDE,
)
PLACED = {
    "one host": ((4, 5, 6, 7), 5.0),
    "a part of one": ((4, 6), 5.0),
    "one rank a host": ((1, 5, 9, 13), 50.0),
    "two hosts, whole": ((0, 1, 2, 3, 4, 5, 6, 7), 50.0),
    "two hosts, three and one": ((1, 2, 3, 4), 50.0),
    "two hosts, one rank first": ((3, 4), 50.0),
}


@pytest.mark.parametrize("where", PLACED)
def test_link_of_a_group_is_the_inner_one_only_if_all_its_ranks_are_on_one_host(where):
    ranks, alpha = PLACED[where]
    planned = one(site(ranks=len(ranks), members=ranks), Policy(), ON_HOSTS)
    link = INSIDE if alpha == 5.0 else ON_HOSTS.link
    expected = exchange_us("all_reduce", planned.bytes, len(ranks), alpha, link.gbytes_per_s)
    assert planned.plain_us == pytest.approx(expected, abs=1e-3)
    named = one(site(ranks=len(ranks), members=ranks, group_label="named"), Policy(), ON_HOSTS)
    assert named.plain_us == pytest.approx(
        exchange_us("all_reduce", named.bytes, len(ranks), 20.0, 1.0), abs=1e-3
    )


HIERARCHIES = {
    "whole hosts": (range(16), 4),
    "every second rank": (range(0, 16, 2), 2),
    "one rank a host": (range(1, 32, 4), 0),
    "one host": (range(4), 0),
    "as many on each, but not in a row": ((0, 4, 1, 5, 2, 6, 3, 7), 0),
    "hosts of different numbers": ((0, 1, 2, 4, 8, 9, 10, 12), 0),
    "hosts that come twice": ((0, 1, 4, 5, 2, 3, 6, 7), 0),
}


@pytest.mark.parametrize("where", HIERARCHIES)
def test_hierarchy_follows_the_hosts_that_a_groups_ranks_are_on(where):
    ranks, node = HIERARCHIES[where]
    a_site = site(numel=1 << 20, ranks=len(ranks), members=tuple(ranks))
    planned = one(a_site, forced("int8", "hierarchical"), ON_HOSTS)
    assert planned.algorithm == (f"hierarchical(node={node})" if node else NONE)


@pytest.mark.parametrize(
    ("ranks", "node", "alpha"),
    [(range(16), 4, 5.0), (range(16), 2, 5.0), (range(0, 64, 4), 4, 50.0), (range(16), 8, 50.0)],
)
def test_inner_hops_of_a_hierarchy_that_someone_named_take_the_inner_link_only_on_one_host(
    ranks, node, alpha
):
    numel, link = 1 << 20, INSIDE if alpha == 5.0 else ON_HOSTS.link
    a_site = site(numel=numel, ranks=len(ranks), members=tuple(ranks))
    planned = one(a_site, forced("int8", f"hierarchical(node={node})"), ON_HOSTS)
    hops, encoded, decoded, kernels = work(
        f"hierarchical(node={node})", "all_reduce", numel, 16, 256, 8, "float32"
    )
    expected = kernels * KERNELS.launch_us
    expected += (
        encoded * KERNELS.rates["int8"].encode_ns + decoded * KERNELS.rates["int8"].decode_ns
    ) / 1000
    for (name, _, size, peers), used in zip(
        hops, [link, ON_HOSTS.link, ON_HOSTS.link], strict=False
    ):
        expected += exchange_us(name, size, 16, used.alpha_us, used.gbytes_per_s, 1.0, peers)
    assert planned.predicted_us == pytest.approx(expected, abs=1e-3)


# --- valid profiles -------------------------------------------------------------------------------


NO_NUMBERS = (-1, math.nan, math.inf, -math.inf, "fast", None, True)


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0])
def test_speed_that_cannot_be_is_refused(value):
    for attempt in (
        lambda: ethernet(value),
        lambda: Link(1.0, value),
        lambda: Link(1.0, 1.0, {"all_reduce": value}),
    ):
        with pytest.raises(PolicyError, match="must be a number above 0") as error:
            attempt()
        assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_time_or_a_share_that_cannot_be_is_refused(value):
    rate, link = KernelRate(1.0, 1.0), Link(1.0, 1.0)
    for attempt in (
        lambda: Link(value, 1.0),
        lambda: ethernet(1, value),
        lambda: KernelRate(value, 1.0),
        lambda: KernelRate(1.0, value),
        lambda: Kernels(value, rate),
        lambda: Profile("p", link, margin=value),
    ):
        with pytest.raises(PolicyError, match="must be a number of at least 0") as error:
            attempt()
        assert repr(value) in str(error.value)


def test_numbers_at_the_edge_are_taken():
    assert Link(0, 1e-9).time_us("all_reduce", 0, 2) == 0.0
    assert Kernels(0, KernelRate(0, 0)).time_us("int8", "encode", 1) == 0.0
    assert Profile("p", Link(1, 1), margin=0, ranks_per_host=0).on_each_host((0, 1)) == 0


WRONG = {
    "link": (lambda: Profile("p", 3.0), "Link(alpha_us, gbytes_per_s)"),
    "links": (lambda: Profile("p", SLOW, links=[SLOW]), "globs over group labels"),
    "a link of links": (lambda: Profile("p", SLOW, links={"tp": 3}), "tp is 3"),
    "inside": (lambda: Profile("p", SLOW, intra_host_link="nvlink"), "intra_host_link is 'nvlink'"),
    "kernels": (lambda: Profile("p", SLOW, kernels={}), "Kernels(launch_us"),
    "a rate": (lambda: Kernels(1.0, KernelRate(1.0, 1.0), {"int8": 2.0}), "int8 is 2.0"),
    "rates": (lambda: Kernels(1.0, KernelRate(1.0, 1.0), [1]), "names of codecs"),
    "node": (lambda: Profile("p", SLOW, ranks_per_host=-1), "ranks_per_host=-1"),
    "half a node": (lambda: Profile("p", SLOW, ranks_per_host=1.5), "ranks_per_host=1.5"),
    "name": (lambda: Profile(SLOW, SLOW), "must be a text"),
    "factor": (lambda: Link(1.0, 1.0, {"allreduce": 2.0}), "did you mean 'all_reduce'?"),
    "no mapping of factors": (lambda: Link(1.0, 1.0, 2.0), "kinds of collectives"),
}


@pytest.mark.parametrize("what", WRONG)
def test_field_of_another_type_is_refused_with_what_belongs_there(what):
    attempt, part = WRONG[what]
    with pytest.raises(PolicyError) as error:
        attempt()
    assert part in str(error.value)


def test_profiles_have_names():
    assert profile_named("nvlink").link.gbytes_per_s == 200.0
    assert profile_named("ethernet-2.5g") == ethernet(2.5)
    assert profile_named(NODES) is NODES
    assert profile_named(None) is None
    for wrong, part in (
        ("nvlnk", "did you mean 'nvlink'?"),
        ("ethernet-10", "did you mean 'ethernet-10g'?"),
        ("ethernet-0g", "above 0"),
        (10, "commpass.Profile(...)"),
    ):
        for attempt in (
            lambda wrong=wrong: profile_named(wrong),
            lambda wrong=wrong: commpass.backend(profile=wrong),
            lambda wrong=wrong: commpass.rewrite(
                trace(lambda x: x + 1, torch.ones(2)), [], profile=wrong
            ),
        ):
            with pytest.raises(PolicyError) as error:
                attempt()
            assert part in str(error.value)
    assert commpass.backend(profile="nvlink").profile.name == "nvlink"


@pytest.mark.parametrize("value", [2, 1.01, math.inf, math.nan, -0.1])
def test_error_budget_above_the_whole_is_refused(value):
    for attempt in (
        lambda: Rule(max_error=value),
        lambda: Policy(max_error=value),
        lambda: commpass.compress(max_error=value),
    ):
        with pytest.raises(PolicyError, match="must be a share such as"):
            attempt()
    assert Policy(max_error=1).max_error == 1


@pytest.mark.parametrize(("numel", "chunks"), [(8 * 256, 1), (8 * 256 * 3, 3), (1 << 20, 64)])
def test_plan_says_how_many_chunks_there_are(numel, chunks):
    """If 64 are named, there are only as many as a rank's row has blocks."""
    policy = Policy(rules=[Rule(codec="int8", algorithm="two_shot", force=True, chunks=64)])
    planned = one(site("all_reduce", numel, 8), policy, profile(SLOW))
    assert planned.chunks == chunks
    assert sum(stage.role == "exchange" for stage in planned.stages) == 2 * chunks


# --- chunks chosen by the model, or requested in vain ---------------------------------------------


MIB = 1 << 20


def chunks_of(a_site: Site, policy: Policy) -> set[int]:
    """Return into how many chunks candidates split a site."""
    (found,) = options([a_site], policy, profile(ethernet(1).link))
    assert found.possible
    return {each.chunks for each in found.possible}


def large(kind: str = "all_reduce", **changes) -> Site:
    """16 MiB on two ranks, with coded exchanges as messages."""
    return site(kind, 4 * MIB, 2, **({"by_messages": True} | changes))


DIVIDED = [
    ("all_reduce", "one_shot"),
    ("all_reduce", "two_shot"),
    ("reduce_scatter", "direct"),
    ("all_gather", "direct"),
    ("all_to_all", "direct"),
]


@pytest.mark.parametrize(("kind", "name"), DIVIDED)
def test_large_sites_are_divided_unasked_where_exchanges_go_as_messages(kind, name):
    policy = Policy(codecs="int8", algorithms=name)
    assert chunks_of(large(kind), policy) == {1, 2, 4, 8}
    assert one(large(kind), policy, ethernet(1)).chunks > 1
    assert chunks_of(large(kind, bytes=4 * MIB, shape=(MIB,)), policy) == {1, 2}


UNASKED = {
    "not as messages": (large(by_messages=False), "int8", "two_shot"),
    "a small tensor": (large(bytes=4 * MIB - 4, shape=(MIB - 1,)), "int8", "two_shot"),
    "a size that is not fixed": (large(shape=("s0", 4)), "int8", "two_shot"),
    "splits": (large("all_to_all", splits=((9, 3), (9, 3))), "int8", "direct"),
    "a wire that depends on values": (large(dtype="bfloat16"), "exponent", "two_shot"),
    "blocks that must be alike": (large(), "equarx", "two_shot"),
    "many hops": (large(), "int8", "semi_ring"),
    "the library's sum": (large(), "bf16", "native"),
    "shards": (large(), "int8", "two_shot(shards=2)"),
    "a word": (large(annotation=Annotation(chunks=1).to_json()), "int8", "two_shot"),
}


def test_rings_are_divided_unasked_where_their_messages_take_long():
    """int8 takes one byte and 1/64 per value, which 0.1 Gbit/s carry in 81 ns, and 1 Gbit/s in 8.1.

    Encode and decode take 0.9 ns, and 84 us besides, which is 0.64 ns for each value of an eighth
    of 4 MiB.
    """
    a_site = site("all_reduce", 4 * MIB, 4, by_messages=True)
    policy = Policy(codecs="int8", algorithms="ring")
    for gbit, expected in ((0.1, {1, 2, 4, 8}), (1, {1})):
        (found,) = options([a_site], policy, ethernet(gbit))
        assert {each.chunks for each in found.possible} == expected
    (found,) = options([dataclasses.replace(a_site, by_messages=False)], policy, ethernet(0.1))
    assert {each.chunks for each in found.possible} == {1}


@pytest.mark.parametrize("what", UNASKED)
def test_model_divides_nothing_unasked(what):
    a_site, codec, name = UNASKED[what]
    assert chunks_of(a_site, Policy(codecs=codec, algorithms=name)) == {1}


@pytest.mark.parametrize(
    "what", ["not as messages", "a small tensor", "blocks that must be alike", "many hops"]
)
def test_rule_may_divide_what_the_model_does_not(what):
    a_site, codec, name = UNASKED[what]
    policy = Policy(rules=[Rule(codec=codec, algorithm=name, chunks=4, force=True)])
    planned = one(a_site, policy, ethernet(1))
    assert planned.chunks == 4
    assert "chunks=" not in planned.reason


WHOLE = {
    "send": (site("send", ranks=2, peer=1), "int8", "direct", "send by direct is sent whole"),
    "recv": (site("recv", ranks=2, peer=1), "int8", "direct", "recv by direct is sent whole"),
    "sparse": (
        site(direction="backward", stateless=None),
        "topk",
        "sparse",
        "all_reduce by sparse is sent whole",
    ),
    "native": (site(), "bf16", "native", "all_reduce by native is sent whole"),
    "shards": (site(), "int8", "two_shot(shards=2)", "two_shot(shards=2) has shards instead"),
    "chunks": (site(), "int8", "two_shot(chunks=3)", "the algorithm was named with chunks=3"),
}


@pytest.mark.parametrize("what", WHOLE)
def test_chunks_that_do_not_apply_are_reported_in_the_reason(what):
    a_site, codec, name, why = WHOLE[what]
    told = f"; chunks=4 does not apply: {why}"
    rule = Rule(codec=codec, algorithm=name, chunks=4, force=True)
    for policy in (
        Policy(rules=[rule]),
        Policy(chunks=4, rules=[dataclasses.replace(rule, chunks=None)]),
    ):
        planned = one(a_site, policy, profile())
        assert planned.chunks == (3 if what == "chunks" else 1)
        assert planned.reason.endswith(told)
    for chunks in (None, 3 if what == "chunks" else 1):  # others are not requested
        policy = Policy(rules=[dataclasses.replace(rule, chunks=chunks)])
        assert "chunks=" not in one(a_site, policy, profile()).reason.replace(name, "")
    kept = one(a_site, Policy(rules=[Rule(keep=True)], chunks=4), profile())
    assert "does not apply" not in kept.reason  # it is not even compressed


def test_chunks_of_the_chosen_algorithm_are_reported():
    rule = Rule(codec="bf16", algorithm=["native", "two_shot"], chunks=4)
    slow = profile(Link(0.0, 0.05, {"all_to_all": 100.0, "all_gather": 100.0}))
    assert one(site(), Policy(rules=[rule]), slow).reason.endswith("is sent whole")
    other = one(site(), Policy(rules=[rule]), profile(Link(0.0, 0.05, {"all_reduce": 9.0})))
    assert (other.algorithm, other.chunks) == ("two_shot", 4)
    assert "does not apply" not in other.reason


def test_codec_may_have_a_time_of_a_call_of_its_own():
    """Two calls, an encode and a decode, of 100 us each instead of 40."""
    own = KernelRate(0.125, 0.0625, call_us=100.0)
    same, slower = (
        profile(kernels=dataclasses.replace(KERNELS, call_us=40.0, rates={"int8": rate}))
        for rate in (KernelRate(0.125, 0.0625), own)
    )
    a_site = site("all_gather", 1 << 16, 2)
    took = [one(a_site, forced("int8", chunks=1), each).predicted_us for each in (same, slower)]
    assert took[1] - took[0] == pytest.approx(2 * 60.0)
    with pytest.raises(PolicyError, match="call_us"):
        KernelRate(1.0, 1.0, call_us=-1.0)


@pytest.mark.parametrize(
    ("kind", "numel"),
    [("reduce_scatter", 64 * 16), ("all_to_all", 64 * 64), ("all_gather", 64)],
)
def test_codec_whose_padded_row_is_not_smaller_is_refused_unless_forced(kind, numel):
    """A row has a block of 256 codes, and 128 bytes with its scale."""
    one = site(kind, numel, ranks=64, dtype="bfloat16")
    row = numel // 64 if kind != "all_gather" else numel
    (found,) = options([one], Policy(codecs="int8"), profile())
    refused = {each.refused for each in found.candidates if each.codec != NONE}
    refused = {why for why in refused if not why.startswith("hierarchical needs")}
    assert refused == {f"int8 sends 384 bytes for each {row} values of bfloat16, no fewer"}
    assert decide([one], Policy(codecs="int8"), profile())[0].codec == NONE
    rules = [Rule(codec="int8", force=True)]
    assert decide([one], Policy(rules=rules), profile())[0].codec == "int8"
    larger = site(kind, numel * 16, ranks=64, dtype="bfloat16")
    assert decide([larger], Policy(codecs="int8"), profile())[0].codec == "int8"
