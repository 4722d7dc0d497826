"""Sites of repeated layers are shown in one line."""

from __future__ import annotations

import dataclasses

import pytest

from commpass.plan import Candidate, Plan, Site, planned
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


def test_graphs_are_told_apart_by_their_place_and_sizes_that_nobody_knows_count_as_none():
    unknown = dataclasses.replace(site("a.1"), bytes=-1)
    (found,) = patterns([plan(site("a.0")), plan(unknown)])
    assert found.numbers == ((0, 1), (1, 1))
    assert found.total("bytes") == 128
