"""Timelines: what a rank computes, what its links carry, and where the rank waits.

They are predicted by the cost model, or read from a torch.profiler trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

Span = tuple[float, float]
"""Begin and end, in microseconds."""

HOST = "host"
"""The lane of computation. Every other lane is a link."""
COMPUTE, EXCHANGE, WAIT = "compute", "exchange", "wait"


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event that starts at ``begin_us`` and takes ``us`` microseconds. The data of an exchange
    is available ``latency_us`` later.

    ``what`` is compute, exchange (on the host: the hand-over), or wait. Other nodes inserted for a
    site have their mark's role: encode, decode, sum, or several for a kernel that does them at once
    (``decode+sum+encode``). ``lane`` is ``HOST`` or the label of the group whose link is used.
    ``hop`` and ``chunk`` identify the exchange of the site.
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
        """Whether the rank waits."""
        return self.what == WAIT


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The events of one graph, by lane and time.

    ``us`` is the time when the rank is done. ``note`` says why there are no events, or what is
    unknown. ``slack_us`` says by site how much later each of its exchanges could start without the
    graph ending later. It is 0 on the critical path. Measured timelines and those of older versions
    have none.
    """

    events: tuple[Event, ...] = ()
    us: float = 0.0
    note: str = ""
    slack_us: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def exposed_us(self) -> float:
        """Microseconds that the rank waits."""
        return sum(event.us for event in self.events if event.exposed)

    @cached_property
    def travel_us(self) -> float:
        """Microseconds in which any data is in flight or waited for. Concurrent transfers count
        once."""
        found = (event for event in self.events if event.travels or event.exposed)
        return length(union((event.begin_us, event.end_us) for event in found))

    @cached_property
    def start_us(self) -> float:
        """Microseconds that the rank spends handing over data."""
        return sum(e.us for e in self.events if e.what == EXCHANGE and e.lane == HOST)

    def exposed_of(self, site: str) -> float:
        """Return the microseconds that the rank waits for a site."""
        return sum(event.us for event in self._by_site.get(site, ()) if event.exposed)

    def slack_of(self, site: str) -> float | None:
        """Return the slack of a site, or of its coalesced collective; None if unknown."""
        return self.slack_us.get(site, self.slack_us.get(site.rpartition(".")[0]))

    def travel_of(self, site: str) -> float:
        """Return the microseconds in which any data of a site is in flight."""
        found = (event for event in self._by_site.get(site, ()) if event.travels)
        return length(union((event.begin_us, event.end_us) for event in found))

    @cached_property
    def _by_site(self) -> dict[str, list[Event]]:
        """The events by site, cached because there may be thousands of sites."""
        found: dict[str, list[Event]] = {}
        for event in self.events:
            found.setdefault(event.site, []).append(event)
        return found

    @property
    def tracks(self) -> tuple[str, ...]:
        """The host, and the links in the order of their first use."""
        return tuple(dict.fromkeys((HOST, *(event.lane for event in self.events))))


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as ordered spans that do not overlap."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def subtract(spans: Iterable[Span], excluded: Iterable[Span]) -> list[Span]:
    """Return the time of spans outside of all excluded ones, as ordered spans."""
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
    """Return the total microseconds of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)
