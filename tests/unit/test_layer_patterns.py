"""Sites of repeated layers are shown in one line."""

from __future__ import annotations

import dataclasses

import pytest

from commpass.plan import Candidate, Plan, Site, Split, planned
from commpass.plan.totals import totals
from commpass.report.layer_patterns import patterns, without_numbers


def site(module: str, number: int = 0, codec: str = "int8", **more):
    found = Site(
        name=f"all_reduce_{number}",
        kind="all_reduce",
        group="0",
        group_size=2,
        dtype="float32",
        shape=(4, 8),
        bytes=128,
        module=module,
        **more,
    )
    return planned(found, Candidate(codec=codec, wire_bytes=36), "", 1.0)


def plan(*sites, direction: str = "forward") -> Plan:
    return Plan(
        graph="0", direction=direction, policy="balanced", profile="ethernet-1g", sites=sites
    )


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("layers.12.mlp", "layers.*.mlp"),
        ("0.1.2", "*.*.*"),
        ("layer12.mlp2.down", "layer12.mlp2.down"),
        ("", ""),
        ("h.3", "h.*"),
    ],
)
def test_number_is_one_where_it_is_a_whole_part_of_a_path(path, pattern):
    assert without_numbers(path) == pattern


def test_layers_that_are_alike_are_one_pattern_in_order():
    plans = [plan(*(site(f"layers.{n}.{part}", n) for n in range(3) for part in ("attn", "mlp")))]
    found = patterns(plans)
    assert [one.module for one in found] == ["layers.*.attn", "layers.*.mlp"]
    assert found[1].modules == ("layers.0.mlp", "layers.1.mlp", "layers.2.mlp")
    assert found[1].numbers == ((0, 2), (0, 4), (0, 6))
    assert found[1].total("bytes") == 3 * 128
    assert found[1].total("wire_bytes") == 3 * 36


def test_one_layer_keeps_its_number():
    (found,) = patterns([plan(site("layers.7.mlp"))])
    assert found.module == "layers.7.mlp"


@pytest.mark.parametrize(
    "change", [{"codec": "none"}, {"shape": (4, 9)}, {"kind": "all_gather"}, {"group": "1"}]
)
def test_sites_treated_otherwise_are_another_pattern(change):
    one, other = site("layers.0.mlp"), dataclasses.replace(site("layers.1.mlp"), **change)
    assert len(patterns([plan(one, other)])) == 2


def test_graphs_are_distinguished_by_their_place_and_sizes_that_nobody_knows_count_as_none():
    unknown = dataclasses.replace(site("a.1"), bytes=-1)
    (found,) = patterns([plan(site("a.0")), plan(unknown)])
    assert found.numbers == ((0, 1), (1, 1))
    assert found.total("bytes") == 128


def chunked() -> Plan:
    """Two layers: each first all_reduce is sent in two chunks of rows."""
    sites = [site(f"layers.{n // 3}.mlp", n) for n in range(6)]
    splits = [
        Split(site=f"start_{n}", into=(f"all_reduce_{n}", f"all_reduce_{n + 1}"), rows=(2, 2))
        for n in (0, 3)
    ]
    return dataclasses.replace(plan(*sites), split=tuple(splits))


def test_collective_in_chunks_counts_once():
    (found,) = patterns([chunked()])
    assert (found.count, len(found.sites)) == (4, 6)
    assert found.name("") == "layers.*.mlp x 4 in 6 chunks"
    of = totals([chunked(), chunked()])
    assert (of.sites, of.compressed) == (8, 8)
    assert (of.bytes, of.wire_bytes) == (12 * 128, 12 * 36)


def test_chunk_that_is_left_alone_is_not_counted_with_the_others():
    """Of a split site, one chunk of two is compressed: the collective counts as compressed."""
    first, *rest = chunked().sites
    alone = dataclasses.replace(first, codec="none", algorithm="none")
    of = totals([dataclasses.replace(chunked(), sites=(alone, *rest))])
    assert (of.sites, of.compressed) == (4, 4)


def test_buckets_are_named_by_their_parameters():
    first, last = (
        site("layers", n, label=f"layers.{n + 1}.up.weight to layers.{n}.down.bias, 3 parameters")
        for n in range(2)
    )
    (found,) = patterns([plan(first, last)])
    assert found.name("") == "layers.*.up.weight to layers.*.down.bias, 3 parameters x 2"
    (alone,) = patterns([plan(first)])
    assert alone.name("") == "layers.1.up.weight to layers.0.down.bias, 3 parameters"
    other = dataclasses.replace(last, label="head.weight")
    assert [each.name("") for each in patterns([plan(first, other)])] == [
        first.label,
        "head.weight",
    ]


def test_root_module_is_named_by_the_caller():
    (found,) = patterns([plan(site(""))])
    assert found.name("(the root module)") == "(the root module)"
