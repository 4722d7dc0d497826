"""The choice with any valid profile."""

from __future__ import annotations

import math

import pytest
import torch
from deciding import SLOW, one, profile, site
from graphs import trace

import commpass
from commpass.costmodel import (
    KernelRate,
    Kernels,
    Link,
    Profile,
    ethernet,
    profile_named,
)
from commpass.errors import PolicyError
from commpass.policy import Policy
from commpass.policy.rules import Rule

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
    own = profile()
    assert profile_named(own) is own
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
