"""Compare two runs: their totals, and their different decisions, by pattern.

Sites are compared by key (graph, module without its layer's number, kind), and not by name: one
run may split or group what the other leaves whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commpass.plan import PlannedSite
from commpass.report.comparison import pairs
from commpass.report.layer_patterns import without_numbers
from commpass.report.run import Run
from commpass.report.site_text import described, kind_of, tensor_of
from commpass.utils.printable import brief

SiteKey = tuple[str, str, str]
"""Graph, module without numbers, and kind."""
Sites = list[PlannedSite]
"""Sites as they run."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Sites of one key in one of two runs.

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
    """Sites of one key whose decisions differ in two runs.

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
    """Two runs: sites that differ, the number of equal ones (``same``), and differences of whole
    graphs (``notes``)."""

    runs: tuple[Run, Run]
    changes: tuple[Change, ...]
    same: int
    notes: tuple[str, ...]


def compare(before: Run, right: Run) -> Comparison:
    """Return how the second run differs from the first."""
    by_key = _sites_by_key(before), _sites_by_key(right)
    changes = []
    every = list(dict.fromkeys((*by_key[0], *by_key[1])))
    for key in every:
        both = by_key[0].get(key, []), by_key[1].get(key, [])
        sides = tuple(_side(sites) if sites else None for sites in both)
        if what := _differences(*both):
            changes.append(_change(key, _module(*both), what, sides))
        elif _sizes(sides[0]) != _sizes(sides[1]):
            changes.append(_change(key, _module(*both), [], sides))
    return Comparison(
        runs=(before, right),
        changes=tuple(changes),
        same=len(every) - len(changes),
        notes=tuple(_notes(before, right)),
    )


def _sites_by_key(run: Run) -> dict[SiteKey, Sites]:
    found: dict[SiteKey, Sites] = {}
    for name, dump in run.by_name.items():
        for site in dump.plan.executed:
            key = (name, without_numbers(site.module), kind_of(site))
            found.setdefault(key, []).append(site)
    return found


def _module(*both: Sites) -> str:
    """Return the module of some sites; of several modules, the pattern of their names."""
    modules = {site.module for sites in both for site in sites}
    return modules.pop() if len(modules) == 1 else without_numbers(modules.pop())


def _change(key: SiteKey, module: str, fields: Sequence[str], sides: tuple) -> Change:
    graph, _, kind = key
    return Change(graph=graph, module=module, kind=kind, what=tuple(fields), sides=sides)


def _side(sites: Sites) -> Side:
    return Side(
        sites=len(sites),
        bytes=sum(max(0, site.bytes) for site in sites),
        wire_bytes=sum(max(0, site.wire_bytes) for site in sites),
        predicted_us=sum(site.predicted_us for site in sites),
        choice=_counted(map(described, sites)),
        reasons=tuple(dict.fromkeys(brief(site.reason) for site in sites)),
    )


def _sizes(side: Side | None) -> tuple[float, ...]:
    return () if side is None else (side.sites, side.bytes, side.wire_bytes, side.predicted_us)


def _differences(before: Sites, right: Sites) -> list[str]:
    """Return the decisions about sites that differ."""
    if not before or not right:
        return [f"only in {'A' if before else 'B'}"]
    found = []
    for what, of in FACTS.items():
        a, b = (_counted(map(of, sites)) for sites in (before, right))
        if a != b:
            found.append(f"{what}{a} → {b}")
    return found


FACTS = {"": described, "ranks: ": lambda site: str(site.group_size), "tensor: ": tensor_of}
"""What is compared, with the prefix of its text."""


def _counted(values: Iterator[str]) -> str:
    """Format ``int8 x24, uncompressed x8``; a single value has no count."""
    counts = Counter(values)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(
        f"{value} x{count}" if count > 1 else value for value, count in counts.most_common()
    )


def _notes(before: Run, right: Run) -> Iterator[str]:
    worlds = before.first.world_size, right.first.world_size
    if worlds[0] != worlds[1]:
        yield f"A ran on {worlds[0]} ranks, B on {worlds[1]}"
    for what in ("commpass", "torch"):
        a, b = getattr(before.first, what), getattr(right.first, what)
        if a != b:
            yield f"A was written with {what} {a}, B with {b}"
    for pair in pairs(before, right):
        a, b = pair.left, pair.right
        if a is None or b is None:
            yield f"the {pair.name} is only in {pair.only_in}"
            continue
        for what, of in OF_GRAPHS.items():
            if of(a) != of(b):
                yield f"{pair.name}, {what}: {of(a)} → {of(b)}"


OF_GRAPHS = {
    "simplified": lambda plan: _counted(step.rule for step in plan.simplified) or "nothing",
    "grouped sites": lambda plan: sum(len(each.sites) for each in plan.grouped),
    "split sites": lambda plan: len(plan.split),
    "order of exchanges": lambda plan: "moved" if plan.reordered else "the program's",
    "fallback": lambda plan: plan.fallback or "none",
}
