"""Totals of the graphs of a run: sites, bytes, and times, predicted and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commpass.plan import Plan, PlannedSite
from commpass.plan.timeline import Timeline
from commpass.report import sent_bytes


@dataclass(frozen=True, kw_only=True)
class Times:
    """Microseconds of some timelines: until the rank is done, of exchanges, and of waiting."""

    us: float
    travel_us: float
    exposed_us: float

    @property
    def hidden_us(self) -> float:
        return max(0.0, self.travel_us - self.exposed_us)

    @property
    def hidden(self) -> float | None:
        """The share of the exchange time during which the rank does not wait, 0 to 1.

        None if there are no exchanges.
        """
        return self.hidden_us / self.travel_us if self.travel_us else None


def times(timelines: Sequence[Timeline]) -> Times | None:
    """Return the sum of timelines; None if there are none."""
    return (
        Times(
            us=sum(each.us for each in timelines),
            travel_us=sum(each.travel_us for each in timelines),
            exposed_us=sum(each.exposed_us for each in timelines),
        )
        if timelines
        else None
    )


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over some plans.

    ``bytes`` and ``wire_bytes`` are what one rank hands to the collectives without and with
    commpass, of those sites of which both are known (``unknown`` others). ``sent_plain`` and
    ``sent`` are what leaves the rank, so that algorithms can be compared (``untold`` sites not
    counted). ``plain_us`` and ``predicted_us`` are the summed predicted times of the single
    collectives. ``saved_bytes`` are those of simplified collectives, which are in neither of the
    byte counts.
    """

    sites: int
    compressed: int
    bytes: int
    wire_bytes: int
    unknown: int
    sent_plain: int
    sent: int
    untold: int
    plain_us: float
    predicted_us: float
    simplified: int
    saved_bytes: int


def totals(plans: Sequence[Plan]) -> Totals:
    """Add up plans. A graph that fell back counts as it was before."""
    sites = [(site, bool(plan.fallback)) for plan in plans for site in plan.sites]
    sizes = [(site.bytes, wire_bytes(site, fallback)) for site, fallback in sites]
    known = [(before, after) for before, after in sizes if before >= 0 and after >= 0]
    steps = [step for plan in plans for step in plan.simplified]
    sent_plain, sent_coded, untold = sent_bytes.of_plans(plans)
    return Totals(
        sites=len(sites),
        compressed=sum(len(plan.compressed) for plan in plans),
        bytes=sum(before for before, _ in known),
        wire_bytes=sum(after for _, after in known),
        unknown=len(sizes) - len(known),
        sent_plain=sent_plain,
        sent=sent_coded,
        untold=untold,
        plain_us=sum(site.plain_us for site, _ in sites),
        predicted_us=sum(predicted_us(site, fallback) for site, fallback in sites),
        simplified=len(steps),
        saved_bytes=sum(step.saved_bytes for step in steps),
    )


def wire_bytes(site: PlannedSite, fallback: bool) -> int:
    """Return the bytes that one rank hands to the collectives of a site as it was really
    compiled."""
    return site.bytes if fallback else site.wire_bytes


def predicted_us(site: PlannedSite, fallback: bool) -> float:
    """Return the predicted time of a site as it was really compiled."""
    return site.plain_us if fallback else site.predicted_us
