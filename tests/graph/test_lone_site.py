"""The predicted time of a site agrees with that of a graph that has no other site."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from graphs import as_rank, ops, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from commpass import groups
from commpass.codecs import codec
from commpass.collectives import algorithm
from commpass.costmodel import KernelRate, Kernels, Link, Profile, Region
from commpass.costmodel.links import ONE, SEVERAL
from commpass.passes import GraphInput, run
from commpass.passes.candidates import coded_us, plain_us
from commpass.passes.timeline import whole_us
from commpass.policy import Policy, policy_named
from commpass.policy.rules import Rule

NANOSECOND = 2e-3
"""The rounding of times in plans, in microseconds, and a little more."""
SITES = {
    "all_reduce": lambda x, ranks: ops.all_reduce(x, "sum", "0"),
    "all_gather": lambda x, ranks: ops.all_gather_into_tensor(x, ranks, "0"),
    "reduce_scatter": lambda x, ranks: ops.reduce_scatter_tensor(x, "sum", ranks, "0"),
    "all_to_all": lambda x, ranks: ops.all_to_all_single(
        x, [x.shape[0] // ranks] * ranks, [x.shape[0] // ranks] * ranks, "0"
    ),
    "broadcast": lambda x, ranks: ops.broadcast(x, 0, "0"),
}
ALGORITHMS = {
    "all_reduce": [
        *("one_shot", "two_shot", "ring", "semi_ring"),
        *("hierarchical(node=2)", "hierarchical(node=3)", "hierarchical(node=4)"),
        *("two_shot(stage=ag)", "ring(stage=rs)", "hierarchical(node=2, stage=ag)"),
        *("two_shot(shards=2)", "hierarchical(node=4, between=int4)"),
    ],
    "reduce_scatter": ["direct", "ring", "semi_ring", "hierarchical(node=2)"],
    "all_gather": ["direct", "direct(shards=2)"],
    "all_to_all": ["direct"],
    "broadcast": ["direct"],
}
WAYS = [(kind, spec) for kind, specs in ALGORITHMS.items() for spec in specs]

alphas, rates = st.floats(0, 200), st.floats(0.01, 400)
regions = st.builds(
    lambda alpha, rate, other, begin: (Region(0, alpha, rate), Region(begin, 2 * alpha, other)),
    *(alphas, rates, rates, st.integers(1, 1 << 18)),
)
links = st.builds(
    Link,
    alphas,
    rates,
    factor=st.sampled_from([{}, {"all_to_all": 2.0, "reduce_scatter": 1.5}]),
    overhead_us=st.sampled_from([0.0, 30.0]),
    contention_bytes=st.sampled_from([0.0, 5000.0]),
    buffered_bytes=st.sampled_from([0.0, 9000.0]),
    measured=st.dictionaries(st.sampled_from([*SITES, ONE, SEVERAL]), regions, max_size=3),
)
kernels = st.builds(
    lambda launch, ns: Kernels(launch_us=launch, other=KernelRate(ns, 2 * ns)),
    st.sampled_from([0.0, 5.0]),
    st.sampled_from([0.0, 0.5]),
)
profiles = st.builds(
    lambda link, inside, node, ports, kernels: Profile(
        "drawn",
        link,
        intra_host_link=inside,
        ranks_per_host=node,
        ports=ports if node else 0,
        kernels=kernels,
    ),
    *(links, st.none() | links, st.sampled_from([0, 1, 2, 3, 4, 8]), st.integers(0, 2), kernels),
)


def planned(kind: str, entries: int, ranks: int, policy: Policy, profile: Profile):
    """Return the only site of a graph that does nothing else, and that graph."""
    x = torch.empty(ranks * entries, 8)
    gm = trace(lambda x: ops.wait_tensor(SITES[kind](x, ranks)), x)
    outcome = run(GraphInput(gm=gm, direction="forward", policy=policy, profile=profile), "0")
    assert outcome.error is None, outcome.error
    (site,) = outcome.plan.sites
    return site, gm


@contextmanager
def ranks_that(messages: bool, place: tuple[int, int]):
    """Make this process one of some ranks, whose exchanges are sent as ``messages`` or not."""
    with as_rank(*place), mock.patch.object(groups, "sends_messages", return_value=messages):
        yield


def forced(code: str, spec: str, chunks: int) -> Policy:
    more = {"chunks": chunks} if chunks > 1 else {}
    return Policy(rules=[Rule(codec=code, algorithm=spec, force=True, **more)])


QUICK = [
    ("all_reduce", "hierarchical(node=2)", "int8", 1, (4, 6), False),
    ("all_reduce", "hierarchical(node=4)", "bf16", 1, (7, 12), True),
    ("all_reduce", "two_shot", "bf16", 3, (1, 4), True),
    ("all_reduce", "semi_ring", "bf16", 1, (4, 6), False),
    ("all_gather", "direct", "int8", 1, (1, 4), True),
    ("all_to_all", "direct", "rotated", 1, (0, 2), False),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "spec", "code", "chunks", "place", "messages"), QUICK)
def test_lone_site_takes_what_its_choice_was_given(kind, spec, code, chunks, place, messages):
    """With any profile, for any rank, whole and in chunks."""
    with ranks_that(messages, place):
        policy = dataclasses.replace(forced(code, spec, chunks), skip=("move",))
        site, gm = planned(kind, 300, place[1], policy, Profile("first", Link(1.0, 1.0)))
        plain, untouched = planned(
            kind, 300, place[1], policy_named("off"), Profile("f", Link(1, 1))
        )
        named = algorithm(kind, spec, chunks=site.chunks) if chunks > 1 else algorithm(kind, spec)

        @settings(max_examples=examples(16, 50), deadline=None)
        @given(profiles)
        def check(profile: Profile) -> None:
            us = coded_us(site, named, codec(code), profile)
            assert whole_us(gm, profile) == pytest.approx(us, rel=1e-6, abs=NANOSECOND)
            us = plain_us(plain, profile)
            assert whole_us(untouched, profile) == pytest.approx(us, rel=1e-6, abs=NANOSECOND)

        check()


@pytest.mark.every
@settings(max_examples=examples(33, 100), deadline=None)
@given(
    way=st.sampled_from(WAYS),
    code=st.sampled_from(["int8", "bf16", "rotated", "int4(block=64)"]),
    chunks=st.sampled_from([1, 1, 2, 3]),
    entries=st.integers(1, 3000),
    place=st.sampled_from([(0, 2), (1, 4), (4, 6), (5, 8), (4, 9), (7, 12), (15, 16)]),
    messages=st.booleans(),
    profile=profiles,
)
def test_plan_and_timeline_of_a_lone_site_agree(
    way, code, chunks, entries, place, messages, profile
):
    kind, spec = way
    with ranks_that(messages, place):
        policy = forced(code, spec, chunks)
        in_order = dataclasses.replace(policy, skip=("move",))
        site, gm = planned(kind, entries, place[1], in_order, profile)
        us = whole_us(gm, profile)
        _, moved = planned(kind, entries, place[1], policy, profile)
        moved_us = whole_us(moved, profile)
        plain, untouched = planned(kind, entries, place[1], policy_named("off"), profile)
        plain_us = whole_us(untouched, profile)
    assert us == pytest.approx(site.predicted_us, rel=1e-6, abs=NANOSECOND)
    assert moved_us <= us * (1 + 1e-6) + NANOSECOND  # an exchange may start before an encode
    assert plain_us == pytest.approx(plain.plain_us, rel=1e-6, abs=NANOSECOND)
    assert site.plain_us == plain.plain_us
