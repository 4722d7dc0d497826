"""Graphs of one exchange each, as doors make one for each module of a model, as one graph: sites of
repeated layers are then one line in it, as they are in a compiled graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from commpass.plan.dump import Dump

FEW = 8
"""Nodes of a graph that does nothing but its exchange."""


@dataclasses.dataclass(frozen=True)
class Merged:
    """One graph, or what several with one exchange each come to. ``numbers`` are theirs."""

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
    """The graphs in their order, those with one exchange each where the first of them was: one for
    each run, direction, policy and profile. Sites keep their names with a number behind them."""
    found: dict[object, list[Dump]] = {}
    for dump in dumps:
        plan = dump.plan
        like = (dump.run, dump.rank, plan.direction, plan.policy, plan.profile)
        found.setdefault(like if is_exchange(dump) else dump.number, []).append(dump)
    return [Merged(tuple(one.number for one in some), _joined(some)) for some in found.values()]


def is_exchange(dump: Dump) -> bool:
    """Whether a graph does nothing but one exchange, as that of a hook."""
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
