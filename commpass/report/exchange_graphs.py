"""Merge graphs of one exchange each into one graph.

Integrations create such a graph for each module of a model. Sites of repeated layers then share one
line, as in a compiled graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from commpass.plan.dump import Dump

FEW = 8
"""Most nodes of a graph that consists of one exchange."""


@dataclass(frozen=True)
class Merged:
    """One graph, or several merged ones with one exchange each. ``numbers`` are those of the
    graphs."""

    numbers: tuple[int, ...]
    dump: Dump

    @property
    def title(self) -> str:
        plan, (first, *others) = self.dump.plan, self.numbers
        if not others:
            return f"graph {first}: {plan.direction} ({plan.graph})"
        whole = list(self.numbers) == list(range(first, others[-1] + 1))
        named = f"{first}-{others[-1]}" if whole else ", ".join(map(str, self.numbers))
        return f"graphs {named}: {plan.direction}, one exchange each"


def merged(dumps: Sequence[Dump]) -> list[Merged]:
    """Return the graphs in order, with merged ones in place of the first of them.

    Graphs with one exchange each are merged by run, direction, policy and profile. Sites keep their
    names with a number appended.
    """
    found: dict[object, list[Dump]] = {}
    for dump in dumps:
        plan = dump.plan
        like = (dump.run, dump.rank, plan.direction, plan.policy, plan.profile)
        found.setdefault(like if is_exchange(dump) else dump.number, []).append(dump)
    return [Merged(tuple(one.number for one in some), _joined(some)) for some in found.values()]


def is_exchange(dump: Dump) -> bool:
    """Return whether a graph consists of one exchange, like that of a hook."""
    plan = dump.plan
    more = plan.simplified or plan.grouped or plan.split or plan.fallback
    return len(plan.sites) == 1 and len(dump.before) <= FEW and not more


def _joined(dumps: Sequence[Dump]) -> Dump:
    if len(dumps) == 1:
        return dumps[0]
    sites = [site for dump in dumps for site in dump.plan.sites]
    numbered = tuple(
        dataclasses.replace(site, name=f"{site.name}[{number}]")
        for number, site in enumerate(sites, 1)
    )
    return dataclasses.replace(
        dumps[0],
        plan=dataclasses.replace(dumps[0].plan, sites=numbered, reordered=()),
        passes_ms={"all": sum(sum(dump.passes_ms.values()) for dump in dumps)},
        before=(),
        after=(),
        lowered=(),
        timeline=None,
    )
