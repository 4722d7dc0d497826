"""Sums over plans: sites, bytes and predicted times, as the graphs run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from commpass.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over some plans, each graph called once. A graph that fell back is uncompressed.

    - ``sites`` and ``compressed``: collectives. One that is sent in chunks of rows counts once.
    - ``bytes`` and ``wire_bytes``: what one rank hands to the collectives without and with
      commpass, without the ``unknown`` sites of unknown size.
    - ``plain_us`` and ``predicted_us``: the predicted times of the single collectives without and
      with commpass, in microseconds.
    - ``exposed_us`` and ``unmoved_us``: how long the rank is predicted to wait, in the order that
      runs and in the original one.
    - ``grouped`` and ``split``: the number of original sites that were.
    - ``saved_bytes``: those of the ``simplified`` collectives, which no other number includes.
    """

    graphs: int
    fallbacks: int
    sites: int
    compressed: int
    bytes: int
    wire_bytes: int
    unknown: int
    plain_us: float
    predicted_us: float
    exposed_us: float
    unmoved_us: float
    simplified: int
    grouped: int
    split: int
    saved_bytes: int


def totals(plans: Iterable[Plan]) -> Totals:
    """Return the sums over some plans."""
    plans = tuple(plans)
    sites = [site for plan in plans for site in plan.executed]
    known = [site for site in sites if min(site.bytes, site.wire_bytes) >= 0]
    steps = [step for plan in plans for step in plan.simplified]
    return Totals(
        graphs=len(plans),
        fallbacks=sum(bool(plan.fallback) for plan in plans),
        sites=sum(plan.collectives(plan.executed) for plan in plans),
        compressed=sum(
            plan.collectives(site for site in plan.executed if site.compressed) for plan in plans
        ),
        bytes=sum(site.bytes for site in known),
        wire_bytes=sum(site.wire_bytes for site in known),
        unknown=len(sites) - len(known),
        plain_us=sum(site.plain_us for site in sites),
        predicted_us=sum(site.predicted_us for site in sites),
        exposed_us=sum(site.exposed_us for site in sites),
        unmoved_us=sum(site.unmoved_us for site in sites),
        simplified=len(steps),
        grouped=sum(len(each.sites) for plan in plans for each in plan.grouped),
        split=sum(len(plan.split) for plan in plans),
        saved_bytes=sum(step.saved_bytes for step in steps),
    )
