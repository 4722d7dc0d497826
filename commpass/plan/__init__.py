"""Sites, plans and their JSON: what was found in a graph, and what was decided about it."""

from __future__ import annotations

from commpass.plan.difference import Difference, diff
from commpass.plan.plan import Grouped, Plan, Simplification, Split
from commpass.plan.site import (
    AGREED_FIELDS,
    ALIKE,
    NOBODY,
    NONE,
    OLD_UNCOMPRESSED,
    ROWS,
    SINGLE_KERNEL,
    UNCOMPRESSED,
    Candidate,
    PlannedSite,
    Site,
    planned,
    uncompressed,
)

__all__ = [
    "AGREED_FIELDS",
    "ALIKE",
    "NOBODY",
    "NONE",
    "OLD_UNCOMPRESSED",
    "ROWS",
    "SINGLE_KERNEL",
    "UNCOMPRESSED",
    "Candidate",
    "Difference",
    "Grouped",
    "Plan",
    "PlannedSite",
    "Simplification",
    "Site",
    "Split",
    "diff",
    "planned",
    "uncompressed",
]
