"""What the policy allows each site: worked out once, when the sites are found, and kept through
what simplify makes of them.

A collective that a rule makes stands for others: it is allowed what they were, whatever rules of
the policy its own kind, size, group and module would match.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from commpass.passes.discover import GraphSite
from commpass.policy import Policy
from commpass.rules import Allowed

ALLOWED = "commpass_allowed"
"""Key in ``node.meta`` of a collective: by the position of its input, what it is allowed."""


def allow(sites: Iterable[GraphSite], policy: Policy) -> tuple[GraphSite, ...]:
    """The sites of a graph as it comes to the passes, each with what the policy allows it."""
    sites = tuple(sites)
    for each in sites:
        each.call.node.meta[ALLOWED] = {}
    for each in sites:
        each.call.node.meta[ALLOWED][each.position] = policy.allowed(each.site)[0]
    return still_allowed(sites, policy)


def still_allowed(sites: Iterable[GraphSite], policy: Policy) -> tuple[GraphSite, ...]:
    """The sites of a graph after simplify, each with what it, or what it stands for, is allowed; of
    one that stands for none, what the policy says."""

    def allowed(each: GraphSite) -> Allowed:
        known = each.call.node.meta.get(ALLOWED, {}).get(each.position)
        return known or policy.allowed(each.site)[0]

    return tuple(dataclasses.replace(each, allowed=allowed(each)) for each in sites)


def matched(sites: Iterable[GraphSite], policy: Policy) -> tuple[int, ...]:
    """The numbers of the rules that match a site."""
    found, rules = [each.site for each in sites], enumerate(policy.rules)
    return tuple(number for number, rule in rules if any(map(rule.matches, found)))
