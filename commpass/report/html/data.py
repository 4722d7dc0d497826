"""The data of the page: the template uses it directly, the scripts as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commpass.plan import PlannedSite
from commpass.plan.dump import Dump
from commpass.plan.timeline import Timeline
from commpass.report.candidate_table import refused, scored
from commpass.report.html.drawing import drawing
from commpass.report.html.sparklines import Strip, sparklines
from commpass.report.layer_patterns import Pattern, patterns
from commpass.report.run import Run
from commpass.report.site_text import described, group_of, kind_of, tensor_of
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


@dataclass(frozen=True)
class Graph:
    """One graph of a run, by itself, and its drawing as HTML."""

    run: Run
    drawing: str

    @property
    def dump(self) -> Dump:
        return self.run.first


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
class Part:
    """The part of the page about one run. ``key`` is its letter."""

    key: str
    run: Run
    graphs: tuple[Graph, ...]
    tables: Tables

    @property
    def drawn(self) -> bool:
        return any(graph.drawing for graph in self.graphs)


def part(key: str, run: Run) -> Part:
    """Collect everything about one run, under a letter."""
    found = _Tables(run)
    groups = tuple(found.group(each) for each in patterns(run.plans))
    return Part(
        key=key,
        run=run,
        graphs=tuple(
            Graph(Run((dump,), run.source, run.timelines), drawing(dump, f"{key}-{dump.number}-"))
            for dump in run.dumps
        ),
        tables=Tables(
            groups=groups,
            choices=tuple(found.choices),
            texts=tuple(found.texts),
            rules=_rules(run.dumps),
            strips=sparklines(run.dumps, run.timelines),
            measured=bool(run.timelines),
        ),
    )


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


class _Tables:
    """Build rows of sites. Texts and choices that many sites share are stored once."""

    def __init__(self, run: Run):
        self.dumps = dumps = run.dumps
        self._executed = [plan.executed for plan in run.plans]
        self.texts: dict[str, int] = {}
        self.choices: dict[tuple[Option, ...], int] = {}
        self._known: dict[Any, int] = {}
        self._considered = [
            {name: at for at, each in enumerate(dump.considered) for name in each.sites}
            for dump in dumps
        ]
        self._before = [_before(dump) for dump in dumps]
        measured = (run.timelines.get(dump.number) for dump in dumps)
        # a note: the trace does not identify sites
        self._measured = [None if each is None or each.note else each for each in measured]

    def group(self, pattern: Pattern) -> Group:
        sites = [self._executed[at][number - 1] for at, number in pattern.numbers]
        first, fallback = sites[0], bool(self.dumps[pattern.numbers[0][0]].plan.fallback)
        return Group(
            module=pattern.module,
            direction=first.direction,
            kind=kind_of(first),
            group=group_of(first),
            tensor=tensor_of(first),
            choice="untouched" if fallback else described(first),
            compressed=first.compressed,
            fallback=fallback,
            error=max(site.error for site in sites),
            sites=tuple(
                self._row(site, at, number)
                for site, (at, number) in zip(sites, pattern.numbers, strict=True)
            ),
        )

    def _row(self, site: PlannedSite, at: int, number: int) -> Row:
        measured = self._measured[at]
        return Row(
            graph=self.dumps[at].number,
            number=number,
            name=site.name,
            module=site.module,
            bytes=site.bytes,
            wire_bytes=site.wire_bytes,
            plain_us=site.plain_us,
            predicted_us=site.predicted_us,
            exposed_us=_exposed(self.dumps[at].timeline, site),
            measured_us=None if measured is None else _exposed(measured, site),
            reason=self._text(site.reason),
            missed=self._text(site.missed),
            choice=self._choice(self.dumps[at].plan.sites[number - 1], at),
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
    possible = [
        Option(
            what=described(site if why == "chosen" else each),
            wire_bytes=each.wire_bytes,
            share=each.wire_bytes / site.bytes if min(each.wire_bytes, site.bytes) > 0 else None,
            error=each.error,
            us=each.predicted_us,
            why=why,
        )
        for each, why in scored(dump, site)
    ]
    impossible = [
        Option(what=", ".join(map(described, some)), why=why)
        for why, some in refused(dump, site).items()
    ]
    return (*possible, *impossible)


def _before(dump: Dump) -> dict[str, tuple[str, ...]]:
    """Return the original sites that were grouped or split into a site, by its name."""
    found = {each.into: each.sites for each in dump.plan.grouped}
    return found | {name: (each.site,) for each in dump.plan.split for name in each.into}


def _exposed(timeline: Timeline | None, site: PlannedSite) -> float:
    """Return how long the rank waits for a site.

    The time of a coalesced collective is that of the first of its sites.
    """
    return float(timeline.exposed_of(site.name.removesuffix(".0"))) if timeline else 0.0
