"""Make plans for sites without a graph: candidates, then the choice."""

from __future__ import annotations

from collections.abc import Iterable

from commpass import Policy
from commpass.costmodel import Profile
from commpass.passes.candidates import candidates
from commpass.passes.choose import choose
from commpass.passes.results import Options
from commpass.plan import PlannedSite, Site


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
