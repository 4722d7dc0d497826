"""The reason of an uncompressed site says which rule of simplify made it, or why one left it."""

from __future__ import annotations

import pytest
import torch
from functional_ops import ag, ar
from graphs import as_rank, trace

import commpass
from commpass.costmodel import Link, Profile
from commpass.plan import Plan
from commpass.policy import Policy

RANKS, ROWS, WIDTH = 4, 8, 64
FAST = Profile("fast", Link(50.0, 100.0))
"""A link on which only the number of messages counts."""
SLOW = Profile("slow", Link(1.0, 1e-4))
"""A link on which only bytes count."""


def codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = 448.0 / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def gathered(x):
    return codes(ag(x))


def also_returned(x):
    y = ag(x)
    return *codes(y), y


def scaled_by_an_input(x, scale):
    return (ag(x).float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def not_quantised(x):
    return ag(x) * 2.0


def summed(x):
    return codes(ar(x) + 1.0)


def also_multiplied(x, matrix):
    total = ar(x)
    return *codes(total + 1.0), total @ matrix


def planned(function, profile, policy: str | Policy = "lossless", others=()) -> Plan:
    x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    with as_rank(0, RANKS):
        gm = trace(function, x, *others)
        return commpass.rewrite(gm, [], policy, profile=profile, strict=True)


@pytest.mark.parametrize("policy", ["lossless", Policy(reassociate=False)], ids=["all", "exact"])
def test_reason_has_the_times_if_codes_would_take_longer(policy):
    (site,) = planned(gathered, FAST, policy).sites
    note = site.reason.split("; ")[1:]
    assert len(note) == 1  # both rules say the same
    words = note[0].split()
    assert note[0].startswith("quantised before gather, it would take ")
    assert float(words[6]) > float(words[-2]) > 0


@pytest.mark.parametrize(
    ("function", "others"),
    [(also_returned, ()), (scaled_by_an_input, (torch.ones(()),))],
    ids=["also an output", "a scale that may differ"],
)
def test_reason_says_that_values_are_quantised_but_needed(function, others):
    (site,) = planned(function, SLOW, others=others).sites
    assert "its values are quantised after it" in site.reason


def test_reason_is_that_of_the_policy_if_nothing_is_quantised():
    (site,) = planned(not_quantised, SLOW).sites
    assert site.reason == "policy 'lossless' allows no codec here"


def test_reason_of_codes_names_the_rule():
    plan = planned(gathered, SLOW)
    assert len(plan.simplified) == 1
    assert [site.dtype for site in plan.sites] == ["int32", "uint8"]
    for site in plan.sites:
        assert site.reason.endswith("they are codes or scales (quantised before gather)")


@pytest.mark.parametrize(
    ("function", "profile", "others", "words"),
    [
        (summed, FAST, (), "sequence parallel: it would take "),
        (also_multiplied, SLOW, (torch.zeros(WIDTH, 4, dtype=torch.bfloat16),), "the whole sum"),
    ],
    ids=["slower", "also multiplied"],
)
def test_reason_says_why_a_sum_stays(function, profile, others, words):
    policy = Policy(sequence_parallel=True)
    (site,) = planned(function, profile, policy, others).sites
    assert words in site.reason
    (site,) = planned(function, profile, others=others).sites
    assert "sequence parallel" not in site.reason  # it was not asked for
