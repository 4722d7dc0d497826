"""Combine sites that differ only in the number of their layer: ``layers.*.mlp.down`` x 32."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from commpass.plan import Plan, PlannedSite

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
ALIKE = ("kind", "reduce_op", "direction", "dtype", "codec", "algorithm", "chunks")
"""Facts that sites of one pattern share, in addition to module, group and shape."""


@dataclass(frozen=True)
class Pattern:
    """Sites that differ only in the numbers in their module's path, in graph order.

    ``numbers`` has for each site the index of its graph among the given ones, and its number in
    that graph (from 1).
    """

    module: str
    sites: tuple[PlannedSite, ...]
    numbers: tuple[tuple[int, int], ...]

    @property
    def first(self) -> PlannedSite:
        return self.sites[0]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(site.module for site in self.sites))

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
    found: dict[tuple, list[tuple[PlannedSite, tuple[int, int]]]] = {}
    for graph, plan in enumerate(plans):
        for number, site in enumerate(plan.sites, 1):
            where = (without_numbers(site.module), site.group_label or site.group, plan.fallback)
            # Unknown sizes have another name in each layer; their bytes distinguish them.
            shape = tuple("?" if isinstance(size, str) else size for size in site.shape)
            hint = site.bytes if "?" in shape else None
            key = (*where, shape, hint, *(getattr(site, name) for name in ALIKE))
            found.setdefault(key, []).append((site, (graph, number)))
    return [
        Pattern(
            module if len({site.module for site, _ in some}) > 1 else some[0][0].module,
            tuple(site for site, _ in some),
            tuple(number for _, number in some),
        )
        for (module, *_), some in found.items()
    ]
