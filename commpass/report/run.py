"""One run as data: its graphs and their sums, which tables, pages and JSON print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from commpass.errors import CommpassError
from commpass.plan import Plan
from commpass.plan.dump import Dump
from commpass.plan.timeline import Timeline
from commpass.plan.totals import Totals, totals
from commpass.report.exchange_graphs import Merged, is_exchange, merged
from commpass.report.measured_timeline import measured
from commpass.report.numbers import ordinal
from commpass.report.sent_bytes import Sent, of_plans
from commpass.utils.printable import plural


@dataclass(frozen=True)
class Times:
    """Microseconds of some timelines: until the rank is done, of exchanges, and of waiting."""

    us: float
    travel_us: float
    exposed_us: float

    @property
    def overlapped_us(self) -> float:
        return max(0.0, self.travel_us - self.exposed_us)

    @property
    def overlapped(self) -> float | None:
        """The share of the exchange time during which the rank does not wait, 0 to 1.

        None if there are no exchanges.
        """
        return self.overlapped_us / self.travel_us if self.travel_us else None


def times(timelines: Iterable[Timeline | None]) -> Times | None:
    """Return the sum of timelines; None if there are none."""
    if not (some := [each for each in timelines if each is not None]):
        return None
    columns = zip(*((each.us, each.travel_us, each.exposed_us) for each in some), strict=True)
    return Times(*map(sum, columns))


@dataclass(frozen=True)
class Run:
    """Graphs of one run, in order.

    ``source`` are the paths that they were read from, for display. ``timelines`` are measured ones
    by the number of the graph, none without a trace.
    """

    dumps: tuple[Dump, ...]
    source: str = ""
    timelines: Mapping[int, Timeline] = field(default_factory=dict)

    @property
    def first(self) -> Dump:
        return self.dumps[0]

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(dump.plan for dump in self.dumps)

    @property
    def policies(self) -> str:
        """The policies of all graphs, in order."""
        return ", ".join(dict.fromkeys(plan.policy for plan in self.plans))

    @cached_property
    def totals(self) -> Totals:
        return totals(self.plans)

    @cached_property
    def sent(self) -> Sent:
        return of_plans(self.plans)

    @cached_property
    def predicted(self) -> Times | None:
        return times(dump.timeline for dump in self.dumps)

    @cached_property
    def measured(self) -> Times | None:
        return times(self.timelines.get(dump.number) for dump in self.dumps)

    @cached_property
    def merged(self) -> tuple[Merged, ...]:
        return tuple(merged(self.dumps))

    @cached_property
    def by_name(self) -> dict[str, Dump]:
        """The graphs by direction and order ("1st forward graph"), which runs of one model share.

        Graphs of one exchange each count as one graph.
        """
        seen = Counter[str]()
        found = {}
        for dump in (one.dump for one in self.merged):
            seen[dump.plan.direction] += 1
            found[f"{ordinal(seen[dump.plan.direction])} {dump.plan.direction} graph"] = dump
        return found

    @property
    def original_sites(self) -> tuple[int, int]:
        """The number of original collectives, and how many of them need not be sent.

        Grouped or split collectives count as the original ones.
        """
        found = gone = 0
        for dump in self.dumps:
            plan = dump.plan
            were = {node.site.partition(".")[0] for node in dump.before if node.site}
            parts = {name: split.site for split in plan.split for name in split.into}
            members = {each.into: each.sites for each in plan.grouped}
            left = {
                name.partition(".")[0]
                for site in plan.sites
                for name in members.get(site.name, (parts.get(site.name, site.name),))
            }
            found += len(were)
            gone += max(0, len(were) - len(left)) if plan.simplified else 0
        return found, gone


def runs(found: Iterable[tuple[Path, Sequence[Dump]]], traces: Sequence[Path] = ()) -> list[Run]:
    """Group the dumps of some paths into runs.

    Files of one run are combined; a graph number that exists already begins another run. The first
    trace belongs to the first run, and so on. Raise CommpassError for more traces than runs, and
    TraceError for a trace of another program.
    """
    groups: list[dict[int, tuple[Path, Dump]]] = []
    for path, dumps in found:
        for dump in dumps:
            for group in groups:
                if dump.number not in group and dump.run == next(iter(group.values()))[1].run:
                    break
            else:
                groups.append(group := {})
            group[dump.number] = path, dump
    if len(traces) > len(groups):
        raise CommpassError(
            f"{len(traces)} traces for {plural(len(groups), 'run')}: --measured names one for each"
            " run at most"
        )
    made = []
    for at, group in enumerate(groups):
        dumps = tuple(group[number][1] for number in sorted(group))
        source = ", ".join(dict.fromkeys(str(path) for path, _ in group.values()))
        timelines = measured(traces[at], dumps) if at < len(traces) else {}
        made.append(Run(dumps, source, timelines))
    return made


Slack = Sequence[float | None]
"""For each site of a graph, how many microseconds later its exchanges could begin without delaying
the end of the graph. None if that is unknown. Empty if it is unknown for all sites."""


def slack_of_sites(dump: Dump) -> Slack:
    """Return the slack of a graph's sites.

    It is empty for a graph that is one exchange of a hook, since compute that overlaps it is not in
    the graph.
    """
    timeline = dump.timeline
    if timeline is None or not timeline.slack_us:
        return ()
    if len(timeline.slack_us) == 1 and is_exchange(dump):
        return ()
    return [timeline.slack_of(site.name) for site in dump.plan.sites]
