"""Predicted times and bytes equal those that are computed from the formulas."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from choice_formulas import (
    CASES,
    LABELS,
    RINGS,
    SHARDED,
    SPECS,
    check_formulas,
    exchange_us,
    fits,
    parameters,
    ring_hops,
    wire_bytes,
)
from deciding import (
    COMPRESSIBLE,
    FAST,
    ITEM,
    KERNELS,
    MOST_HOPS,
    RANKS,
    SLOW,
    decide,
    forced,
    one,
    profile,
    site,
)
from tiers import thinned

import commpass
from commpass.collectives import (
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
from commpass.plan import NONE
from commpass.plan.kinds import KINDS
from commpass.policy import Policy
from commpass.policy.rules import Rule


def test_every_algorithm_has_a_second_formula():
    """Except ``sparse`` and ``native``, which have separate tests."""
    for kind in COMPRESSIBLE:
        assert {parameters(spec)[0] for spec in SPECS[kind]} == {
            a.name for a in algorithms_of(kind)
        } - {"sparse", "native"}


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
