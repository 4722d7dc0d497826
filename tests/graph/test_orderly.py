"""Choices depend on their inputs only, such as links and budgets, and in the right direction."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from deciding import decide, options
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import examples

import commpass
from commpass import Policy, Rule
from commpass.costmodel import KernelRate, Kernels, Link, Profile
from commpass.passes import GraphInput, run
from commpass.passes.divide import SURE
from commpass.passes.timeline import whole_us
from commpass.plan import Site

CODECS = ("bf16", "int8", "int4", "fp8", "rotated", "taco")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@st.composite
def sites(draw) -> Site:
    kind, ranks = draw(st.sampled_from(KINDS)), draw(st.sampled_from((2, 4, 8, 64)))
    values = draw(st.sampled_from((1, 30, 1024, 40_000))) * ranks * 256
    splits = ((values // ranks,) * ranks,) * 2 if kind == "all_to_all" else None
    return Site(
        name="s",
        kind=kind,
        reduce_op="sum" if kind in ("all_reduce", "reduce_scatter") else None,
        group="0",
        group_size=ranks,
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        shape=(values,),
        bytes=values * 4,
        splits=splits,
        by_messages=draw(st.booleans()),
    )


@st.composite
def profiles(draw) -> Profile:
    rate = KernelRate(draw(st.floats(1e-4, 0.5)), draw(st.floats(1e-4, 0.5)))
    link = Link(draw(st.floats(0, 200)), draw(st.sampled_from((0.01, 0.1, 1.0, 40.0, 400.0))))
    own = {name: KernelRate(*2 * [draw(st.floats(1e-4, 0.5))]) for name in ("int4", "taco", "fp8")}
    kernels = Kernels(draw(st.floats(0, 40)), rate, own, gbytes_per_s=draw(st.floats(1, 3000)))
    return Profile("some", link, kernels=kernels, margin=draw(st.sampled_from((0.0, 0.1))))


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(10, 60))
@given(sites(), profiles(), st.sampled_from(CODECS), st.floats(1.0, 1000.0))
def test_faster_link_never_makes_fewer_bytes_more_attractive(site, profile, codec, times):
    """Compare what a candidate saves if it puts fewer bytes on the link than the plain collective.

    A one-shot sends in one step, and more bytes than a ring of many ranks: there the opposite
    holds, and rightly so.
    """
    link = dataclasses.replace(profile.link, gbytes_per_s=profile.link.gbytes_per_s * times)
    faster = dataclasses.replace(profile, link=link)
    free = dataclasses.replace(profile, link=Link(0.0, 1e-3))
    terms = Policy(codecs=codec, max_error=1.0)
    (slow,), (fast,) = (options([site], terms, each) for each in (profile, faster))
    assume(slow.possible)
    for before in slow.possible:
        if before.chunks > 1:  # the number of chunks depends on the link
            continue
        (after,) = (each for each in fast.possible if _same(each, before))
        on_link = [profile_us(free, site, each, terms) for each in (before, slow.uncompressed)]
        if on_link[0] > on_link[1]:
            continue
        gained = slow.uncompressed.predicted_us - before.predicted_us
        assert fast.uncompressed.predicted_us - after.predicted_us <= gained + 0.01


def profile_us(profile, site, candidate, terms) -> float:
    """Return the microseconds of a candidate if neither messages nor codes take time."""
    free = dataclasses.replace(
        profile, kernels=Kernels(0.0, KernelRate(0.0, 0.0), gbytes_per_s=1e12)
    )
    (found,) = options([site], terms, free)
    return next(
        e.predicted_us for e in (found.uncompressed, *found.possible) if _same(e, candidate)
    )


def _same(one, other) -> bool:
    return (one.codec, one.algorithm, one.chunks) == (other.codec, other.algorithm, other.chunks)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(40, 400))
@given(sites(), profiles(), st.sampled_from((0.003, 0.01, 0.03, 0.1)), st.sampled_from((1, 4, 30)))
def test_larger_budget_never_makes_a_plan_slower(site, profile, budget, times):
    """Except for the share that fewer chunks may cost."""
    small, large = (
        decide([site], Policy(codecs=CODECS, max_error=each), profile)[0]
        for each in (budget, min(1.0, budget * times))
    )
    assert small.error <= budget + 1e-6
    assert large.predicted_us <= small.predicted_us * (1 + SURE) + 1e-3


CASES = [
    *(("all_reduce", way) for way in ("one_shot", "two_shot", "ring")),
    ("all_gather", "direct"),
    ("reduce_scatter", "direct"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("profile", ["nvlink-4", "ethernet-10g"])
@pytest.mark.parametrize("codec", ["bf16", "int8", "rotated"])
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_site_alone_takes_on_the_timeline_what_it_was_chosen_for(
    kind, way, codec, profile, fake_group
):
    import torch
    from graphs import ops, trace

    fake_group(4)
    calls = {
        "all_reduce": lambda x: ops.all_reduce(x, "sum", "0"),
        "all_gather": lambda x: ops.all_gather_into_tensor(x, 4, "0"),
        "reduce_scatter": lambda x: ops.reduce_scatter_tensor(x, "sum", 4, "0"),
    }
    gm = trace(lambda x: ops.wait_tensor(calls[kind](x)), torch.ones(512, 512))
    policy = Policy(rules=[Rule(codec=codec, algorithm=way, force=True)])
    known = commpass.costmodel.profile_named(profile)
    road = GraphInput(gm=gm, direction="forward", policy=policy, profile=known)
    (site,) = run(road, "0", strict=True).plan
    assert site.codec == codec
    assert whole_us(gm, known) == pytest.approx(site.predicted_us, rel=1e-3)


SHUFFLED = """
import sys
sys.path[:0] = {path!r}
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size=4)
from test_orderly import whole_plan
print(whole_plan())
"""


def whole_plan() -> str:
    """Return the plan of a graph that contains something for every pass."""
    import torch
    from graphs import ops, trace

    wait = ops.wait_tensor
    names = {"tp": "int8", "dp": "rotated", "ep": "fp8"}
    rules = [Rule(codec=codec, module=f"*.{name}") for name, codec in set(names.items())]

    def function(x, w):
        found = []
        for number in range(6):
            x = torch.relu(wait(ops.all_reduce(x @ w, "sum", "0")))
            found.append(wait(ops.all_reduce(x.t() @ x * number, "sum", "0")))
            found.append(wait(ops.all_gather_into_tensor(x[:1] + number, 4, "0")))
        return x, found

    road = GraphInput(
        gm=trace(function, torch.ones(512, 512), torch.ones(512, 512)),
        direction="backward",
        policy=Policy(codecs=("int8", "bf16"), rules=sorted(rules, key=repr), max_error=0.05),
        profile=commpass.ethernet(1),
        hidden={},
        hides=True,
    )
    return run(road, "0", strict=True).plan.to_json()


@pytest.mark.every
def test_plan_is_the_same_under_every_hash_seed_and_on_every_rank():
    here = Path(__file__).parent
    said = []
    for seed, rank in (("1", 0), ("2", 3)):
        code = SHUFFLED.format(path=[str(here), str(here.parent)], rank=rank)
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(here.parents[1]), "HOME": "/tmp"},
        )
        said.append(done.stdout)
    assert said[0] == said[1]
    assert {each["codec"] for each in json.loads(said[0])["sites"]} >= {"none", "int8"}
