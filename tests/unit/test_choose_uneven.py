"""The choice for an all_to_all whose ranks hold different sizes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from choice_formulas import exchange_us, wire_bytes
from deciding import (
    CODECS,
    FAST,
    ITEM,
    KERNELS,
    LINKS,
    SLOW,
    decide,
    forced,
    one,
    options,
    profile,
    site,
    tried,
)
from hypothesis import assume, example, given
from hypothesis import strategies as st

import commpass
from commpass.collectives import (
    Payload,
    Request,
    Stages,
    read_stages,
)
from commpass.costmodel import (
    Link,
    Profile,
)
from commpass.distributed.parts import Part
from commpass.plan import Plan, Site
from commpass.policy import Policy
from commpass.policy.rules import Rule

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
