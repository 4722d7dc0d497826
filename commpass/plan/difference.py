"""The differences between two plans of the same graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from commpass.plan.plan import Plan
from commpass.plan.site import AGREED_FIELDS


@dataclass(frozen=True)
class Difference:
    """One difference between two plans of a site, or a site that only one of them has."""

    site: str
    field: str
    left: Any
    right: Any

    def __str__(self) -> str:
        if self.field == "site":
            return (
                f"{self.site}: {'only in the second' if self.left is None else 'only in the first'}"
            )
        return (
            f"{self.site}: {self.field} is {self.left!r} in the first and {self.right!r} in the"
            " second"
        )


def diff(first: Plan, right: Plan, fields: Iterable[str] = AGREED_FIELDS) -> list[Difference]:
    """Return the differences between two plans of the same graph, site by site."""
    fields = tuple(fields)
    found = []
    lefts, rights = ({site.name: site for site in plan.sites} for plan in (first, right))
    for name in dict.fromkeys((*lefts, *rights)):
        a, b = lefts.get(name), rights.get(name)
        if a is None or b is None:
            found.append(Difference(name, "site", a and a.kind, b and b.kind))
            continue
        found += [
            Difference(name, field, getattr(a, field), getattr(b, field))
            for field in fields
            if getattr(a, field) != getattr(b, field)
        ]
    if first.direction != right.direction:
        found.append(Difference("(graph)", "direction", first.direction, right.direction))
    if not found and [*lefts] != [*rights]:
        found.append(Difference("(graph)", "order", ", ".join(lefts), ", ".join(rights)))
    if first.rules() != right.rules():
        found.append(
            Difference("(graph)", "simplified", "; ".join(first.rules()), "; ".join(right.rules()))
        )
    if first.splits() != right.splits():
        found.append(
            Difference("(graph)", "split", "; ".join(first.splits()), "; ".join(right.splits()))
        )
    if first.starts() != right.starts():
        orders = [", ".join(plan.reordered) or "the program's" for plan in (first, right)]
        found.append(Difference("(graph)", "order of exchanges", *orders))
    if first.groups() != right.groups():
        found.append(
            Difference("(graph)", "grouped", "; ".join(first.groups()), "; ".join(right.groups()))
        )
    if bool(first.fallback) != bool(right.fallback):
        found.append(Difference("(graph)", "fallback", first.fallback, right.fallback))
    return found
