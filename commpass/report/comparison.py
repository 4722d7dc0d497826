"""The differences between two runs as data: graph by graph, site by site."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from commpass.plan import AGREED_FIELDS, Difference, Plan, diff
from commpass.report.run import Run
from commpass.report.site_filter import SiteFilter, check

FORECASTS = ("wire_bytes", "plain_us", "predicted_us", "error", "reason")
"""Fields that a diff shows besides the decisions: the cost model's predictions."""


@dataclass(frozen=True)
class GraphPair:
    """A graph of both runs, or of one of them, by its name ("1st forward graph"), and how it
    differs."""

    name: str
    left: Plan | None
    right: Plan | None
    rows: tuple[Difference, ...] = ()

    @property
    def only_in(self) -> str:
        return "" if self.left and self.right else "A" if self.left else "B"


def pairs(first: Run, right: Run) -> list[GraphPair]:
    """Return the graphs of two runs, side by side."""
    lefts, rights = ({n: d.plan for n, d in run.by_name.items()} for run in (first, right))
    names = dict.fromkeys((*lefts, *rights))
    return [GraphPair(name, lefts.get(name), rights.get(name)) for name in names]


def compared(first: Run, right: Run, site_filter: SiteFilter | None = None) -> list[GraphPair]:
    """Return every graph that differs.

    With a filter, only sites that it accepts in one of the runs count. Raise CommpassError if it
    accepts none.
    """
    site_filter = site_filter or SiteFilter()
    if not site_filter.everything:
        check([*first.dumps, *right.dumps], site_filter)
    found = []
    for pair in pairs(first, right):
        a, b = pair.left, pair.right
        if not site_filter.everything:
            names = {s.name for plan in (a, b) if plan for s in plan if site_filter.accepts(s)}
            a, b = (plan and _only(plan, names) for plan in (a, b))
            if not names:
                continue
        rows = () if a is None or b is None else diff(a, b, (*AGREED_FIELDS, *FORECASTS))
        if a is None or b is None or rows:
            found.append(GraphPair(pair.name, a, b, tuple(rows)))
    return found


def _only(plan: Plan, names: set[str]) -> Plan:
    """Return the plan of those sites alone, without fields of the whole graph."""
    sites = tuple(site for site in plan.sites if site.name in names)
    return dataclasses.replace(plan, sites=sites, simplified=(), grouped=(), split=(), reordered=())
