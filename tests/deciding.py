"""Plans of sites that no graph has: candidates, then the choice."""

from __future__ import annotations

from collections.abc import Iterable

from commpass import Policy
from commpass.costmodel import Profile
from commpass.passes.candidates import Options, candidates
from commpass.passes.choose import choose
from commpass.plan import PlannedSite, Site


def options(sites: Iterable[Site], policy: Policy, profile: Profile) -> list[Options]:
    """What may be done to each site."""
    return [
        candidates(site, policy.allowed(site)[0], profile, policy.reassociate) for site in sites
    ]


def decide(
    sites: Iterable[Site], policy: Policy, profile: Profile, *, kernels: bool = False
) -> tuple[PlannedSite, ...]:
    """What is done to each."""
    sites = tuple(sites)
    allowed = [policy.allowed(site)[0] for site in sites]
    return choose(sites, options(sites, policy, profile), allowed, profile, kernels=kernels)
