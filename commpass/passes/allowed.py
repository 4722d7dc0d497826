"""What the policy allows each site.

This is computed once, when the sites are found, and kept through simplify. A collective that a rule
creates replaces others. It is allowed what they were, whatever policy rules its own kind, size,
group and module would match.

Lossy codecs are allowed for fields of similar values (``provenance``) that the next call does not
start from (``fed_back``), and for sites that a rule or an annotation names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import cache

from torch import fx

from commpass.passes.fed_back import fed_back_reason
from commpass.passes.fx.marks import ALLOWED
from commpass.passes.graph_site import GraphSite
from commpass.passes.provenance import Provenance, lossy_unsupported_reason, provenances
from commpass.policy import Policy
from commpass.policy.rules import Allowed


def allow(sites: Iterable[GraphSite], policy: Policy, direction: str) -> tuple[GraphSite, ...]:
    """Return the sites of an input graph, each with what the policy allows it."""
    sites, found = tuple(sites), _finder(direction)
    for each in sites:
        each.call.node.meta[ALLOWED] = {}
    for each in sites:
        each.call.node.meta[ALLOWED][each.position] = _allowed(each, policy, found)
    return still_allowed(sites, policy, direction)


def still_allowed(
    sites: Iterable[GraphSite], policy: Policy, direction: str
) -> tuple[GraphSite, ...]:
    """Return the sites of a graph after simplify, each with what it, or the site it replaces, is
    allowed. Apply the policy to sites that replace none."""
    found = _finder(direction)

    def allowed(each: GraphSite) -> Allowed:
        known = each.call.node.meta.get(ALLOWED, {}).get(each.position)
        return known or _allowed(each, policy, found)

    return tuple(dataclasses.replace(each, allowed=allowed(each)) for each in sites)


Finder = Callable[[fx.Graph], dict[fx.Node, tuple[Provenance, ...]]]


def _finder(direction: str) -> Finder:
    """Return ``provenances`` for that direction, cached per graph."""
    return cache(lambda graph: provenances(graph, direction))


def _allowed(each: GraphSite, policy: Policy, found: Finder) -> Allowed:
    """Return what the policy allows a site, given what it carries. The graph is inspected only for
    lossy codecs."""
    allowed = policy.allowed(each.site)[0]
    if allowed.names_site or not allowed.lossy:
        return allowed
    why = lossy_unsupported_reason(found(each.module.graph)[each.call.node][each.position])
    if why is None and (why := fed_back_reason(each)) is not None:
        return allowed.without_lossy(f"{why}; a rule with module='...' and a codec may force it")
    if why is None:
        return allowed
    return allowed.without_lossy(
        f"{why}: {allowed.source} compresses fields of like values only; a rule with module='...'"
        " and a codec may force it"
    )


def matched(sites: Iterable[GraphSite], policy: Policy) -> tuple[int, ...]:
    """Return the numbers of the rules that match a site."""
    found, rules = [each.site for each in sites], enumerate(policy.rules)
    return tuple(number for number, rule in rules if any(map(rule.matches, found)))
