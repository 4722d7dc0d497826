"""Compare two runs: their totals, and their different decisions, by pattern.

Sites are compared by place (graph, module without its layer's number, kind), and not by name: one
run may split or group what the other leaves whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commpass.plan import PlannedSite
from commpass.plan.dump import Dump
from commpass.report.diff import named
from commpass.report.html.data import Run, described
from commpass.report.html.totals import predicted_us, wire_bytes
from commpass.report.layer_patterns import without_numbers
from commpass.utils.printable import brief

Place = tuple[str, str, str]
Sites = list[tuple[PlannedSite, bool]]
"""Sites, each with whether its graph fell back."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """The sites of a place in one of two runs.

    It has their number, the bytes that one rank hands to their collectives, and the sum of their
    predicted times.
    """

    sites: int
    bytes: int
    wire_bytes: int
    predicted_us: float
    choice: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A place where two runs differ.

    ``what`` lists the differences. It is empty if the decisions are equal but the bytes, the number
    of sites or the predicted times differ.
    """

    graph: str
    module: str
    kind: str
    what: tuple[str, ...]
    sides: tuple[Side | None, Side | None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs: places that differ, the number of equal ones (``same``), and differences of whole
    graphs (``notes``)."""

    runs: tuple[Run, Run]
    changes: tuple[Change, ...]
    same: int
    notes: tuple[str, ...]


def compare(before: Run, right: Run) -> Comparison:
    """Return how the second run differs from the first."""
    places = _places(before.dumps), _places(right.dumps)
    changes = []
    every = list(dict.fromkeys((*places[0], *places[1])))
    for place in every:
        both = places[0].get(place, []), places[1].get(place, [])
        sides = tuple(_side(sites) if sites else None for sites in both)
        if what := _differences(*both):
            changes.append(_change(place, what, sides))
        elif _sizes(sides[0]) != _sizes(sides[1]):
            changes.append(_change(place, [], sides))
    return Comparison(
        runs=(before, right),
        changes=tuple(changes),
        same=len(every) - len(changes),
        notes=tuple(_notes(before.dumps, right.dumps)),
    )


def _places(dumps: Sequence[Dump]) -> dict[Place, Sites]:
    found: dict[Place, Sites] = {}
    for name, dump in named(dumps).items():
        for site in dump.plan.sites:
            place = (name, without_numbers(site.module), _kind(site))
            found.setdefault(place, []).append((site, bool(dump.plan.fallback)))
    return found


def _kind(site: PlannedSite) -> str:
    return site.kind + (f"({site.reduce_op})" if site.reduce_op else "")


def _choice(site: PlannedSite, fallback: bool) -> str:
    return "left alone" if fallback else described(site)


def _change(place: Place, fields: Sequence[str], sides: tuple) -> Change:
    graph, module, kind = place
    return Change(graph=graph, module=module, kind=kind, what=tuple(fields), sides=sides)


def _side(sites: Sites) -> Side:
    return Side(
        sites=len(sites),
        bytes=sum(max(0, site.bytes) for site, _ in sites),
        wire_bytes=sum(max(0, wire_bytes(site, fallback)) for site, fallback in sites),
        predicted_us=sum(predicted_us(site, fallback) for site, fallback in sites),
        choice=_counted(_choice(site, fallback) for site, fallback in sites),
        reasons=tuple(dict.fromkeys(brief(site.reason) for site, _ in sites)),
    )


def _sizes(side: Side | None) -> tuple[float, ...]:
    return () if side is None else (side.sites, side.bytes, side.wire_bytes, side.predicted_us)


def _differences(before: Sites, right: Sites) -> list[str]:
    """Return the decisions about the sites of a place that differ."""
    if not before or not right:
        return [f"only in {'A' if before else 'B'}"]
    found = []
    for what, of in FACTS.items():
        a, b = (
            _counted(of(site, fallback) for site, fallback in sites) for sites in (before, right)
        )
        if a != b:
            found.append(f"{what}{a} → {b}")
    return found


FACTS = {
    "": _choice,
    "ranks: ": lambda site, _: str(site.group_size),
    "tensor: ": lambda site, _: f"{site.dtype}[{', '.join(map(str, site.shape))}]",
}
"""What is compared, with the prefix of its text."""


def _counted(values: Iterator[str]) -> str:
    """Format ``int8 x24, left alone x8``; a single value has no count."""
    counts = Counter(values)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(
        f"{value} x{count}" if count > 1 else value for value, count in counts.most_common()
    )


def _notes(before: Sequence[Dump], right: Sequence[Dump]) -> Iterator[str]:
    worlds = before[0].world_size, right[0].world_size
    if worlds[0] != worlds[1]:
        yield f"A ran on {worlds[0]} ranks, B on {worlds[1]}"
    for what in ("commpass", "torch"):
        a, b = getattr(before[0], what), getattr(right[0], what)
        if a != b:
            yield f"A was written with {what} {a}, B with {b}"
    lefts, rights = named(before), named(right)
    for name in dict.fromkeys((*lefts, *rights)):
        if name not in lefts or name not in rights:
            yield f"graph {name} is only in {'A' if name in lefts else 'B'}"
            continue
        a, b = lefts[name].plan, rights[name].plan
        for what, of in OF_GRAPHS.items():
            if of(a) != of(b):
                yield f"graph {name}, {what}: {of(a)} → {of(b)}"


OF_GRAPHS = {
    "simplified": lambda plan: _counted(step.rule for step in plan.simplified) or "nothing",
    "grouped sites": lambda plan: sum(len(each.sites) for each in plan.grouped),
    "split sites": lambda plan: len(plan.split),
    "order of exchanges": lambda plan: "moved" if plan.reordered else "the program's",
    "fallback": lambda plan: plan.fallback or "none",
}
