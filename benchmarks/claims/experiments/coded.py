"""What all experiments check of plans: that the codec is in them and that nothing fell back."""

from __future__ import annotations

from collections.abc import Sequence

import commpass
from commpass.plan import NONE, Plan, PlannedSite


def forced(codec: str, algorithm: str, **named: object) -> commpass.Policy:
    """Compresses every site with one codec by one algorithm, whatever the cost model says."""
    rule = commpass.Rule(codec=codec, algorithm=algorithm, force=True, max_error=1.0, **named)
    return commpass.Policy(rules=[rule])


def coded_sites(plans: Sequence[Plan], codecs: Sequence[str], many: int) -> list[PlannedSite]:
    """The coded sites of plans. Raises RuntimeError where a plan fell back, a site was left alone
    or has a codec that is not one of ``codecs``, or there are not so ``many``."""
    wanted = {commpass.codec(each).spec for each in codecs}
    for plan in plans:
        if plan.fallback:
            raise RuntimeError(f"a graph was compiled untouched: {plan.fallback}")
        for site in plan.sites:
            if site.codec == NONE or site.codec not in wanted:
                raise RuntimeError(f"{site.name} has codec {site.codec[:60]}: {site.reason}")
    found = [site for plan in plans for site in plan.sites]
    if len(found) != many:
        raise RuntimeError(f"{len(found)} sites are coded, not {many}")
    return found
