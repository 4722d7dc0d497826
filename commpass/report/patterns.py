"""Sites that differ in the number of their layer alone, as one line: ``layers.*.mlp.down`` x 32."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from commpass.plan import Plan, PlannedSite

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
ALIKE = ("kind", "reduce_op", "direction", "dtype", "codec", "algorithm", "chunks")
"""What sites of one pattern share, beside their module, group and shape."""


@dataclass(frozen=True)
class Pattern:
    """Sites that are alike but for the numbers in their module's path, in graph order, each with
    its number in its graph (from 1) and the place of that graph among those that were given."""

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
        """The sum of what is known: a size of -1 is one that nobody knows."""
        return sum(max(0, getattr(site, field)) for site in self.sites)


def without_numbers(module: str) -> str:
    """``layers.12.mlp`` as ``layers.*.mlp``."""
    return NUMBER.sub("*", module)


def patterns(plans: Iterable[Plan]) -> list[Pattern]:
    """The sites of some plans by pattern, those first that come first."""
    found: dict[tuple, list[tuple[PlannedSite, tuple[int, int]]]] = {}
    for graph, plan in enumerate(plans):
        for number, site in enumerate(plan.sites, 1):
            where = (without_numbers(site.module), site.group_label or site.group, plan.fallback)
            # Sizes that are not known have another name in each layer; their bytes tell them apart.
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
