"""Combine sites that differ only in the number of their layer: ``layers.*.mlp.down`` x 32."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commpass.plan import Plan, PlannedSite

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
ALIKE = ("kind", "reduce_op", "direction", "dtype", "codec", "algorithm", "chunks")
"""Facts that sites of one pattern share, in addition to module, group and shape."""


@dataclass(frozen=True)
class Pattern:
    """Sites that differ only in the numbers in their module's path, in graph order.

    ``numbers`` has for each site the index of its graph among the given ones, and its number in
    that graph (from 1). ``title`` is its label or module, "" for the root module. ``count`` is
    the number of collectives: one that is sent in chunks of rows counts once.
    """

    module: str
    sites: tuple[PlannedSite, ...]
    numbers: tuple[tuple[int, int], ...]
    title: str
    count: int

    @property
    def first(self) -> PlannedSite:
        return self.sites[0]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(site.module for site in self.sites))

    def name(self, untitled: str) -> str:
        """Return ``layers.*.mlp.down x 32``, or ``... x 3 in 6 chunks``."""
        many = f" x {self.count}" if self.count > 1 else ""
        chunks = len(self.sites) > self.count
        return (self.title or untitled) + many + (f" in {len(self.sites)} chunks" * chunks)

    def total(self, field: str) -> float:
        return total(self.sites, field)


def total(sites: Iterable[PlannedSite], field: str) -> float:
    """Return the sum of known values: -1 is an unknown size."""
    return sum(max(0, getattr(site, field)) for site in sites)


def without_numbers(module: str) -> str:
    """Return ``layers.12.mlp`` as ``layers.*.mlp``."""
    return NUMBER.sub("*", module)


def patterns(plans: Iterable[Plan]) -> list[Pattern]:
    """Return the sites of some plans by pattern, in order of first appearance."""
    plans = tuple(plans)
    found: dict[tuple, list[tuple[PlannedSite, tuple[int, int]]]] = {}
    for graph, plan in enumerate(plans):
        for number, site in enumerate(plan.sites, 1):
            where = (without_numbers(site.module), site.group_label or site.group, plan.fallback)
            # Unknown sizes have another name in each layer; their bytes distinguish them.
            shape = tuple("?" if isinstance(size, str) else size for size in site.shape)
            hint = site.bytes if "?" in shape else None
            key = (
                *where,
                without_numbers(site.label),
                shape,
                hint,
                *(getattr(site, name) for name in ALIKE),
            )
            found.setdefault(key, []).append((site, (graph, number)))
    return [_pattern(plans, some) for some in found.values()]


def _pattern(plans: Sequence[Plan], some: Sequence[tuple[PlannedSite, tuple[int, int]]]) -> Pattern:
    sites, numbers = zip(*some, strict=True)
    by_graph: dict[int, list[PlannedSite]] = {}
    for site, (graph, _) in some:
        by_graph.setdefault(graph, []).append(site)
    title = sites[0].label or sites[0].module
    alike = not (_differ(sites, "label") or _differ(sites, "module"))
    return Pattern(
        module=without_numbers(sites[0].module) if _differ(sites, "module") else sites[0].module,
        sites=sites,
        numbers=numbers,
        title=title if alike else without_numbers(title),
        count=sum(plans[graph].collectives(each) for graph, each in by_graph.items()),
    )


def _differ(sites: Iterable[PlannedSite], field: str) -> bool:
    return len({getattr(site, field) for site in sites}) > 1
