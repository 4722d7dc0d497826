"""The cost model on named machines is monotonic in bandwidth, bytes, ranks and oversubscription."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commpass.costmodel import Profile, prices, profile_named
from commpass.costmodel.machines import machine_names
from commpass.passes.candidates import candidates
from commpass.passes.choose import choose
from commpass.plan import PlannedSite, Site
from commpass.policy import policy_named

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MACHINES = st.sampled_from(machine_names())
BYTES = st.integers(0, 1 << 32)
FACTORS = st.floats(1, 16)
SLACK = 1 + 1e-9
"""For rounding in sums of floats."""


@st.composite
def groups(draw) -> tuple[str, tuple[int, ...]]:
    """Return a machine and the ranks of a group: some GPUs of one host, or as many on each of
    several."""
    name = draw(MACHINES)
    gpus = profile_named(name).ranks_per_host
    stride = draw(st.sampled_from([each for each in (1, 2, 4, 8) if gpus % each == 0]))
    on_host = tuple(range(0, gpus, stride))
    hosts = draw(st.sampled_from([1, 2, 5, 64]))
    if hosts == 1:
        return name, on_host[: draw(st.integers(2, len(on_host)))] if len(on_host) > 1 else (0, 1)
    return name, tuple(gpus * host + rank for host in range(hosts) for rank in on_host)


def time_us(profile: Profile, kind: str, nbytes: float, members) -> float:
    return prices(profile, len(members), (), members).time_us(kind, nbytes)


def scaled(profile: Profile, factor: float) -> Profile:
    """Return a profile in which all links have ``factor`` times the bandwidth."""
    return dataclasses.replace(
        profile,
        link=profile.link.scaled(factor),
        intra_host_link=profile.intra_host_link.scaled(factor),
    )


@given(groups(), st.sampled_from(KINDS), BYTES, FACTORS)
@settings(max_examples=300, deadline=None)
def test_more_bandwidth_is_never_slower(group, kind, nbytes, factor):
    name, members = group
    profile = profile_named(name)
    faster = time_us(scaled(profile, factor), kind, nbytes, members)
    assert faster <= time_us(profile, kind, nbytes, members) * SLACK


@given(groups(), st.sampled_from(KINDS), BYTES, BYTES)
@settings(max_examples=300, deadline=None)
def test_more_bytes_are_never_faster(group, kind, one, other):
    name, members = group
    few, many = sorted((one, other))
    profile = profile_named(name)
    assert time_us(profile, kind, few, members) <= time_us(profile, kind, many, members) * SLACK


@given(groups(), st.sampled_from(KINDS), BYTES, FACTORS)
@settings(max_examples=300, deadline=None)
def test_oversubscription_never_helps(group, kind, nbytes, factor):
    name, members = group
    profile = profile_named(name)
    thin = dataclasses.replace(profile, link=profile.link.scaled(1 / factor))
    assert time_us(profile, kind, nbytes, members) <= time_us(thin, kind, nbytes, members) * SLACK


@given(MACHINES, st.sampled_from(KINDS[:3]), st.integers(1, 10), st.integers(1, 10), BYTES)
@settings(max_examples=300, deadline=None)
def test_more_replicas_never_communicate_faster(name, kind, one, other, nbytes):
    """Gradients of one size, and a rank of each group on each host. What a rank hands to an
    all_gather are parts of the weights."""
    profile = profile_named(name)
    few, many = sorted((2**one, 2**other))
    gpus = profile.ranks_per_host

    def averaged(ranks: int) -> float:
        handed = nbytes / ranks if kind == "all_gather" else nbytes
        return time_us(profile, kind, handed, range(0, gpus * ranks, gpus))

    assert averaged(few) <= averaged(many) * SLACK


def decided(profile: Profile, policy: str, kind: str, nbytes: int, members) -> PlannedSite:
    ranks = len(members)
    values = max(nbytes // 4 // ranks, 1) * ranks
    site = Site(
        name="s",
        kind=kind,
        reduce_op="sum" if kind in ("all_reduce", "reduce_scatter") else None,
        group="dp",
        group_size=ranks,
        members=tuple(members),
        dtype="float32",
        shape=(values,),
        bytes=values * 4,
        device="cuda",
        direction="backward",
    )
    chosen = policy_named(policy)
    allowed = chosen.allowed(site)[0]
    options = candidates(site, allowed, profile, chosen.reassociate)
    return choose([site], [options], [allowed], profile)[0]


@pytest.mark.slow
@given(groups(), st.sampled_from(KINDS), st.integers(1 << 10, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_choice_is_never_slower_than_off(group, kind, nbytes):
    name, members = group
    members = members[:64]
    profile = profile_named(name)
    off = decided(profile, "off", kind, nbytes, members).predicted_us
    for policy in ("lossless", "balanced", "aggressive"):
        assert decided(profile, policy, kind, nbytes, members).predicted_us <= off * SLACK


@pytest.mark.slow
@given(groups(), st.sampled_from(KINDS), st.integers(1 << 10, 1 << 30), FACTORS)
@settings(max_examples=25, deadline=None)
def test_choice_on_a_faster_link_is_never_slower(group, kind, nbytes, factor):
    """Without a margin: with one, a codec that no longer gains enough is given up."""
    name, members = group
    members = members[:64]
    profile = dataclasses.replace(profile_named(name), margin=0.0)
    times = [
        decided(each, "balanced", kind, nbytes, members).predicted_us
        for each in (scaled(profile, factor), profile)
    ]
    assert times[0] <= times[1] * (1 + 1e-5) + 0.01  # a plan has times to a nanosecond
