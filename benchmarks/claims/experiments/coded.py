"""Check the plans of an experiment: they contain the codec, and nothing fell back."""

from __future__ import annotations

from collections.abc import Sequence

import commpass
from commpass.plan import NONE, Plan, PlannedSite


def forced(codec: str, algorithm: str, **named: object) -> commpass.Policy:
    """Return a policy that compresses every site with one codec by one algorithm, whatever the cost
    model predicts."""
    rule = commpass.Rule(codec=codec, algorithm=algorithm, force=True, max_error=1.0, **named)
    return commpass.Policy(rules=[rule])


def coded_sites(plans: Sequence[Plan], codecs: Sequence[str], many: int) -> list[PlannedSite]:
    """Return the coded sites of plans.

    Raise RuntimeError if a plan fell back, if a site is uncompressed or has a codec that is not one
    of ``codecs``, or if their number is not ``many``. The parts of a site that was split by rows
    count as one site.
    """
    wanted = {commpass.codec(each).spec for each in codecs}
    for plan in plans:
        if plan.fallback:
            raise RuntimeError(f"a graph was compiled untouched: {plan.fallback}")
        for site in plan.sites:
            if site.codec == NONE or site.codec not in wanted:
                raise RuntimeError(f"{site.name} has codec {site.codec[:60]}: {site.reason}")
    found = [site for plan in plans for site in plan.sites]
    parts = sum(len(split.into) - 1 for plan in plans for split in plan.split)
    if len(found) - parts != many:
        raise RuntimeError(f"{len(found) - parts} sites are coded, not {many}")
    return found
