"""Timelines: what a rank computes, what its links carry meanwhile, and where the rank stands
still. Predicted by the cost model, or read from a trace of torch.profiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

Span = tuple[float, float]
"""Begin and end, in microseconds."""

HOST = "host"
"""What carries out that which is computed; every other lane is a link."""
COMPUTE, EXCHANGE, WAIT = "compute", "exchange", "wait"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that takes time, from ``begin_us`` on for ``us`` microseconds. What an exchange
    brings can be used ``latency_us`` later.

    ``what`` is compute, exchange (on the host: handing it over), or wait: the rank stands still.
    Other nodes that were inserted for a site say their role, as in a mark: encode, decode, sum, or
    several for a kernel that does them at once (``decode+sum+encode``). ``lane`` is ``HOST`` or the
    label of the group whose link it is on. ``hop`` and ``chunk`` tell which exchange of the site it
    belongs to.
    """

    name: str
    what: str
    lane: str
    begin_us: float
    us: float
    latency_us: float = 0.0
    site: str = ""
    hop: int = 0
    chunk: int = 0
    module: str = ""

    @property
    def end_us(self) -> float:
        return self.begin_us + self.us + self.latency_us

    @property
    def travels(self) -> bool:
        """Whether it is an exchange on a link."""
        return self.what == EXCHANGE and self.lane != HOST

    @property
    def exposed(self) -> bool:
        """Whether the rank stands still."""
        return self.what == WAIT


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The events of one graph by lane and time. ``us`` is when the rank is done. ``note`` says why
    there are no events, or what is not known of them. ``slack_us`` says by site how much later each
    of its exchanges could begin without the graph ending later: it is 0 on the critical path, and
    what was measured, or written by an older commpass, has none."""

    events: tuple[Event, ...] = ()
    us: float = 0.0
    note: str = ""
    slack_us: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def exposed_us(self) -> float:
        """Microseconds for which the rank stands still."""
        return sum(event.us for event in self.events if event.exposed)

    @cached_property
    def travel_us(self) -> float:
        """Microseconds in which anything travels, or is waited for. What travels at once counts
        once."""
        found = (event for event in self.events if event.travels or event.exposed)
        return length(union((event.begin_us, event.end_us) for event in found))

    @cached_property
    def start_us(self) -> float:
        """Microseconds for which the rank is busy handing over what travels."""
        return sum(e.us for e in self.events if e.what == EXCHANGE and e.lane == HOST)

    def exposed_of(self, site: str) -> float:
        """Microseconds for which the rank stands still for a site."""
        return sum(event.us for event in self._by_site.get(site, ()) if event.exposed)

    def slack_of(self, site: str) -> float | None:
        """The slack of a site, or of the coalesced collective that it is part of; None where it is
        not known."""
        return self.slack_us.get(site, self.slack_us.get(site.rpartition(".")[0]))

    def travel_of(self, site: str) -> float:
        """Microseconds in which anything of a site travels."""
        found = (event for event in self._by_site.get(site, ()) if event.travels)
        return length(union((event.begin_us, event.end_us) for event in found))

    @cached_property
    def _by_site(self) -> dict[str, list[Event]]:
        """Looked for once: there may be thousands of sites."""
        found: dict[str, list[Event]] = {}
        for event in self.events:
            found.setdefault(event.site, []).append(event)
        return found

    @property
    def tracks(self) -> tuple[str, ...]:
        """The host, and the links in the order in which they are first used."""
        return tuple(dict.fromkeys((HOST, *(event.lane for event in self.events))))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def subtract(spans: Iterable[Span], excluded: Iterable[Span]) -> list[Span]:
    """The time of spans in which none of the others is, as spans in order."""
    found = []
    taken = union(excluded)
    for begin, end in union(spans):
        at = begin
        for other_begin, other_end in taken:
            if other_begin < end and other_end > at:
                if at < other_begin:
                    found.append((at, other_begin))
                at = other_end
        if at < end:
            found.append((at, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Microseconds of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)
