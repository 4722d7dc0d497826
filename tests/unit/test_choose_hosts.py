"""The choice between hierarchies, and on several hosts."""

from __future__ import annotations

import dataclasses

import pytest
from choice_formulas import exchange_us, work
from deciding import KERNELS, forced, one, profile, site

from commpass.costmodel import (
    KernelRate,
    Kernels,
    Link,
    Profile,
)
from commpass.plan import NONE
from commpass.policy import Policy

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
