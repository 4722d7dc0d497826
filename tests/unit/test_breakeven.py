"""The size from which a candidate gains, compared with a search with the choice itself."""

from __future__ import annotations

import dataclasses
from math import inf

import pytest
from deciding import decide

import commpass
from commpass import Policy
from commpass.collectives.table import ALGORITHMS
from commpass.costmodel import KernelRate, Kernels, Link, Profile, profile_named
from commpass.passes.breakeven import break_even, explanation
from commpass.plan import NONE, Site

NEAR = 1.5


def site(kind: str = "all_reduce", nbytes: int = 1 << 20, ranks: int = 4, **more) -> Site:
    facts = {
        "name": "s",
        "kind": kind,
        "reduce_op": "sum" if kind in ("all_reduce", "reduce_scatter") else None,
        "group": "0",
        "group_size": ranks,
        "dtype": "float32",
        "shape": (nbytes // 4,),
        "bytes": nbytes,
    }
    return Site(**facts | more)


@pytest.mark.parametrize("profile", ["ethernet-1g", "ethernet-10g", "nvlink-4", "pcie-4"])
@pytest.mark.parametrize(
    ("kind", "spec"), [("all_reduce", "two_shot"), ("all_reduce", "ring"), ("all_gather", "direct")]
)
def test_just_above_it_is_chosen_and_just_below_it_is_not(kind, spec, profile):
    known = profile_named(profile)
    found = break_even(site(kind), spec, "int8", known)
    policy = Policy(codecs="int8", algorithms=spec)

    def chosen(nbytes: float) -> bool:
        like = site(kind, round(nbytes / 16) * 16)
        return decide([like], policy, known)[0].codec != NONE

    if found == inf:
        assert not any(chosen(1 << power) for power in range(8, 34))
        return
    # codes come in blocks: just below the limit some sizes may gain, and others not
    assert all(chosen(found * NEAR * 2**power) for power in range(10))
    if found:
        assert not chosen(found / NEAR)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (kind, spec)
        for kind, some in ALGORITHMS.items()
        for spec in some
        if kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
    ],
)
def test_each_algorithm_has_a_size(kind, spec):
    """Also those that are never divided into chunks."""
    code = {"native": "bf16", "sparse": "topk"}.get(spec, "int8")
    facts = {"hierarchical": "hierarchical(node=2)"}
    for named in ("ethernet-0.1g", "nvlink-4"):
        found = break_even(site(kind), facts.get(spec, spec), code, profile_named(named))
        assert found is not None
        assert found >= 0


def test_two_lines_meet_where_the_formula_says():
    """One-shot on 2 ranks sends 65/256 of the bytes; encoding takes 1/4 ns per byte."""
    free = Kernels(launch_us=0.0, other=KernelRate(1.0, 0.0))
    profile = Profile("lines", Link(0.0, 1.0), kernels=free, margin=0.0)
    assert break_even(site(ranks=2), "one_shot", "int8", profile) < 1024  # a block or two
    late = dataclasses.replace(profile, kernels=dataclasses.replace(free, call_us=1000.0))
    found = break_even(site(ranks=2), "one_shot", "int8", late)
    # plain B/1000; coded 2000 (encode, decode) + B/4 * 1e-3 + B * 65/256 / 1000
    assert found == pytest.approx(2000 / (1 / 1000 - 0.25e-3 - 65 / 256 / 1000), rel=0.03)


def test_codecs_that_never_gain():
    slow = Kernels(launch_us=0.0, other=KernelRate(1e6, 1e6))
    assert break_even(site(), "two_shot", "int8", Profile("x", Link(1, 1), kernels=slow)) == inf


def test_sites_without_a_size():
    uneven = site("all_to_all", splits=((1, 2, 3, 4), (1, 1, 1, 1)))
    assert break_even(uneven, "direct", "int8", commpass.ethernet(1)) is None


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (("s0", 4096), "16384*s0 > 1,300,000 bytes, s0 >= 80"),
        (("s0", "s1"), "4*s0*s1 > 1,300,000 bytes"),
        (("2*s0", 8), "64*s0 > 1,300,000 bytes, s0 >= 20313"),
        (("s0 + 1", 8), "32*s0 + 32 > 1,300,000 bytes"),
        (("__import__('os').getcwd()", 8), "32*__import__('os').getcwd() > 1,300,000 bytes"),
        (("what is it?", 8), "32*what is it? > 1,300,000 bytes"),
        ((4096,), ""),
    ],
)
def test_sentences_are_those_of_a_graph(shape, said):
    found = explanation(site(shape=shape), 1.3e6)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_nothing_is_said_of_sizes_that_do_not_matter():
    assert explanation(site(shape=("s0",)), 0.0) == explanation(site(shape=("s0",)), inf) == ""
