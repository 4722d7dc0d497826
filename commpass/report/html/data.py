"""The data of the page: the template uses it directly, the scripts as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commpass.plan import NONE, Candidate, PlannedSite
from commpass.plan.dump import Dump
from commpass.plan.timeline import Timeline
from commpass.report import candidate_table
from commpass.report.html.drawing import drawing
from commpass.report.html.runs import Read
from commpass.report.html.sparklines import Strip, sparklines
from commpass.report.html.totals import Times, Totals, predicted_us, times, totals, wire_bytes
from commpass.report.layer_patterns import Pattern, patterns
from commpass.utils.printable import brief


@dataclass(frozen=True, kw_only=True)
class Row:
    """One site.

    ``graph`` is the number of its dump, and ``number`` its own number there, from 1. ``reason`` and
    ``missed`` are indices into the run's texts, and ``choice`` into its choices, -1 if the dump has
    no candidates. ``measured_us`` is how long the rank waited, None if that was not measured.
    """

    graph: int
    number: int
    name: str
    module: str
    bytes: int
    wire_bytes: int
    plain_us: float
    predicted_us: float
    exposed_us: float
    measured_us: float | None
    reason: int
    missed: int
    choice: int
    before: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Group:
    """Sites of one pattern, and what they have in common."""

    module: str
    direction: str
    kind: str
    group: str
    tensor: str
    choice: str
    compressed: bool
    fallback: bool
    error: float
    sites: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A candidate, or several that are refused for one reason. ``why`` it lost, or ``chosen``."""

    what: str
    wire_bytes: int = -1
    share: float | None = None
    error: float | None = None
    us: float | None = None
    why: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The steps of one rule of simplify: graph, site, result and saved bytes of each."""

    rule: str
    count: int
    saved_bytes: int
    steps: tuple[tuple[int, str, str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One graph of a run, with its sums. ``measured`` is None without a trace; ``drawing`` is
    HTML."""

    dump: Dump
    drawing: str
    totals: Totals
    predicted: Times | None
    measured: Times | None


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The data of a run for the scripts."""

    groups: tuple[Group, ...]
    choices: tuple[tuple[Option, ...], ...]
    texts: tuple[str, ...]
    rules: tuple[Rule, ...]
    strips: tuple[Strip, ...]
    measured: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: ``key`` is its letter on the page, and ``source`` the path that it was read from."""

    key: str
    source: str
    graphs: tuple[Graph, ...]
    totals: Totals
    predicted: Times | None
    measured: Times | None
    tables: Tables

    @property
    def first(self) -> Dump:
        return self.graphs[0].dump

    @property
    def policies(self) -> str:
        """The policies of all graphs, in order."""
        return ", ".join(dict.fromkeys(graph.dump.plan.policy for graph in self.graphs))

    @property
    def drawn(self) -> bool:
        return any(graph.drawing for graph in self.graphs)

    @property
    def dumps(self) -> tuple[Dump, ...]:
        return tuple(graph.dump for graph in self.graphs)


def run(key: str, read: Read) -> Run:
    """Collect everything about one run, under a letter."""
    dumps, measured = read.dumps, read.measured
    found = _Tables(dumps, measured)
    groups = tuple(found.group(each) for each in patterns([dump.plan for dump in dumps]))
    return Run(
        key=key,
        source=read.source,
        graphs=tuple(
            Graph(
                dump=dump,
                drawing=drawing(dump, f"{key}-{dump.number}-"),
                totals=totals([dump.plan]),
                predicted=times(_predicted([dump])),
                measured=times([measured[dump.number]] if dump.number in measured else []),
            )
            for dump in dumps
        ),
        totals=totals([dump.plan for dump in dumps]),
        predicted=times(_predicted(dumps)),
        measured=times([measured[dump.number] for dump in dumps if dump.number in measured]),
        tables=Tables(
            groups=groups,
            choices=tuple(found.choices),
            texts=tuple(found.texts),
            rules=_rules(dumps),
            strips=sparklines(dumps, measured),
            measured=bool(measured),
        ),
    )


def _predicted(dumps: Sequence[Dump]) -> list[Timeline]:
    return [dump.timeline for dump in dumps if dump.timeline is not None]


def _rules(dumps: Sequence[Dump]) -> tuple[Rule, ...]:
    """Return the simplifications by rule, the one that saves most first."""
    steps: dict[str, list[tuple[int, str, str, int]]] = {}
    for dump in dumps:
        for step in dump.plan.simplified:
            row = (dump.number, step.site, step.into, step.saved_bytes)
            steps.setdefault(step.rule, []).append(row)
    found = [
        Rule(rule=rule, count=len(rows), saved_bytes=sum(row[3] for row in rows), steps=tuple(rows))
        for rule, rows in steps.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.saved_bytes))


def described(choice: Candidate) -> str:
    """Return a candidate as text."""
    if choice.codec == NONE:
        return "left alone"
    more = f", {choice.chunks} chunks" if choice.chunks > 1 else ""
    more += ", fused" if choice.fused else ""
    more += ", kernel" if choice.lowering == "kernel" else ""
    return f"{brief(choice.codec)} by {choice.algorithm}{more}"


class _Tables:
    """Build rows of sites. Texts and choices that many sites share are stored once."""

    def __init__(self, dumps: Sequence[Dump], measured: Mapping[int, Timeline]):
        self.dumps = dumps
        self.texts: dict[str, int] = {}
        self.choices: dict[tuple[Option, ...], int] = {}
        self._known: dict[Any, int] = {}
        self._considered = [
            {name: at for at, each in enumerate(dump.considered) for name in each.sites}
            for dump in dumps
        ]
        self._before = [_before(dump) for dump in dumps]
        self._predicted = [_exposed(dump.timeline) for dump in dumps]
        self._measured = [_measured_totals(measured.get(dump.number)) for dump in dumps]

    def group(self, pattern: Pattern) -> Group:
        first = pattern.first
        fallback = bool(self.dumps[pattern.numbers[0][0]].plan.fallback)
        choice = "untouched" if fallback else described(first)
        return Group(
            module=pattern.module,
            direction=first.direction,
            kind=first.kind + (f"({first.reduce_op})" if first.reduce_op else ""),
            group=f"{first.group_label or first.group}/{first.group_size}",
            tensor=f"{first.dtype}[{', '.join(map(str, first.shape))}]",
            choice=choice,
            compressed=first.compressed and not fallback,
            fallback=fallback,
            error=0.0 if fallback else max(site.error for site in pattern.sites),
            sites=tuple(
                self._row(site, at, number, fallback)
                for site, (at, number) in zip(pattern.sites, pattern.numbers, strict=True)
            ),
        )

    def _row(self, site: PlannedSite, at: int, number: int, fallback: bool) -> Row:
        predicted, measured = self._predicted[at], self._measured[at]
        return Row(
            graph=self.dumps[at].number,
            number=number,
            name=site.name,
            module=site.module,
            bytes=site.bytes,
            wire_bytes=wire_bytes(site, fallback),
            plain_us=site.plain_us,
            predicted_us=predicted_us(site, fallback),
            exposed_us=predicted.get(site.name, 0.0),
            measured_us=None if measured is None else measured.get(site.name, 0.0),
            reason=self._text(site.reason),
            missed=self._text(site.missed),
            choice=self._choice(site, at),
            before=self._before[at].get(site.name, ()),
        )

    def _text(self, text: str) -> int:
        return self.texts.setdefault(brief(text), len(self.texts))

    def _choice(self, site: PlannedSite, at: int) -> int:
        considered = self._considered[at].get(site.name)
        if considered is None:
            return -1
        chosen = (site.codec, site.algorithm, site.chunks, site.lowering, site.fused)
        key = (at, considered, *chosen, site.bytes, site.predicted_us, site.plain_us)
        if key not in self._known:
            found = options(self.dumps[at], site)
            self._known[key] = self.choices.setdefault(found, len(self.choices))
        return self._known[key]


def options(dump: Dump, site: PlannedSite) -> tuple[Option, ...]:
    """Return the candidates of a site, best first, and why each lost.

    Refused candidates follow, once for each reason.
    """
    possible, refused = [], dict[str, list[str]]()
    for each in candidate_table.candidates(dump, site):
        if each.refused:
            refused.setdefault(each.refused, []).append(described(each))
            continue
        reason = candidate_table.lost(each, site)
        possible.append(
            Option(
                what=described(site if reason == "chosen" else each),
                wire_bytes=each.wire_bytes,
                share=each.wire_bytes / site.bytes
                if min(each.wire_bytes, site.bytes) > 0
                else None,
                error=each.error,
                us=each.predicted_us,
                why=reason,
            )
        )
    impossible = [Option(what=", ".join(names), why=text) for text, names in refused.items()]
    return (*possible, *impossible)


def _before(dump: Dump) -> dict[str, tuple[str, ...]]:
    """Return the original sites that were grouped or split into a site, by its name."""
    found = {each.into: each.sites for each in dump.plan.grouped}
    return found | {name: (each.site,) for each in dump.plan.split for name in each.into}


def _exposed(timeline: Timeline | None) -> dict[str, float]:
    """Return how long the rank waits for each site.

    A coalesced collective's time is stored at the first of its sites.
    """
    found: dict[str, float] = {}
    for event in timeline.events if timeline is not None else ():
        if event.exposed:
            found[event.site] = found.get(event.site, 0.0) + event.us
    return found | {f"{name}.0": us for name, us in found.items()}


def _measured_totals(measured: Timeline | None) -> dict[str, float] | None:
    """Return the measured waits; None without a measurement, or if the trace does not identify
    sites."""
    return None if measured is None or measured.note else _exposed(measured)
