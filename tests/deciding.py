"""Sites, policies and profiles for tests of the choice, and plans for sites without a graph:
candidates, then the choice."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from tiers import examples

from commpass import Policy
from commpass.costmodel import KernelRate, Kernels, Link, Profile
from commpass.passes.candidates import candidates
from commpass.passes.choose import choose
from commpass.passes.results import Options
from commpass.plan import PlannedSite, Site
from commpass.policy.rules import Rule

COMPRESSIBLE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SHARED_OUT = ("reduce_scatter", "all_to_all")
"""Kinds whose input has a part for every rank."""
RANKS = [2, 3, 8, 48, 64, 65, 1000, 1024]
MOST_HOPS = 64
"""The largest number of hops of a ring."""
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
CODECS = ("int8", "int4(block=64)", "fp8", "rotated")
KERNELS = Kernels(
    launch_us=3.0,
    other=KernelRate(0.5, 0.25),
    rates={"int8": KernelRate(0.125, 0.0625), "int4": KernelRate(0.375, 0.75)},
)
MIB = 1 << 20
FAST, SLOW = Link(5.0, 500.0), Link(50.0, 0.05)
LINKS = st.builds(
    Link,
    st.floats(0, 500),
    st.floats(0.001, 1000),
    st.sampled_from([{}, {"all_to_all": 2.0, "reduce_scatter": 2.0}]),
)
tried = settings(max_examples=examples(26, 80), deadline=None)


def profile(
    link: Link = SLOW, margin: float = 0.0, kernels: Kernels = KERNELS, **changes
) -> Profile:
    return Profile("test", link, kernels=kernels, margin=margin, **changes)


def site(
    kind: str = "all_reduce",
    numel: int = 1 << 20,
    ranks: int = 8,
    dtype: str = "float32",
    **changes,
) -> Site:
    reduces = {"all_reduce": "sum", "reduce_scatter": "avg"}
    facts = {
        "name": "site",
        "kind": kind,
        "reduce_op": reduces.get(kind),
        "group": "0",
        "group_label": "tp",
        "group_size": ranks,
        "dtype": dtype,
        "shape": (numel,),
        "bytes": numel * ITEM.get(dtype, 1),
    }
    return Site(**(facts | changes))


def forced(codec: str, named: str | None = None, **more) -> Policy:
    return Policy(rules=[Rule(codec=codec, algorithm=named, force=True)], **more)


def options(sites: Iterable[Site], policy: Policy, profile: Profile) -> list[Options]:
    """Return the candidates of each site."""
    return [
        candidates(site, policy.allowed(site)[0], profile, policy.reassociate) for site in sites
    ]


def decide(
    sites: Iterable[Site], policy: Policy, profile: Profile, *, kernels: bool = False
) -> tuple[PlannedSite, ...]:
    """Return the decision for each site."""
    sites = tuple(sites)
    allowed = [policy.allowed(site)[0] for site in sites]
    return choose(sites, options(sites, policy, profile), allowed, profile, kernels=kernels)


def one(a_site: Site, policy: Policy, a_profile: Profile) -> PlannedSite:
    (planned,) = decide([a_site], policy, a_profile)
    return planned
