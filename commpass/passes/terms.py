"""What the policy allows each site: worked out when the sites are found, and kept through what
simplify makes of them.

A collective that a rule makes stands for others: it is allowed what they were, whatever rules of
the policy its own kind, size, group and module would match.
"""

from __future__ import annotations

from collections.abc import Iterable

from commpass.passes.discover import Found
from commpass.policy import Policy, Terms

TERMS = "commpass_terms"
"""Key in ``node.meta`` of every collective that a rule of simplify made: the Terms of those that it
stands for."""


def terms_of(found: Iterable[Found], policy: Policy) -> tuple[Terms, ...]:
    return tuple(each.call.node.meta.get(TERMS) or policy.terms(each.site)[0] for each in found)


def forget(found: Iterable[Found]) -> None:
    """Sites of a graph that comes to the passes again are allowed what this policy says."""
    for each in found:
        each.call.node.meta.pop(TERMS, None)


def matched(found: Iterable[Found], policy: Policy) -> tuple[int, ...]:
    """The numbers of the rules that match a site."""
    sites, rules = [each.site for each in found], enumerate(policy.rules)
    return tuple(number for number, rule in rules if any(map(rule.matches, sites)))
