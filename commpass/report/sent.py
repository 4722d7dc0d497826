"""What leaves a rank: bytes on its link, so that a ring and a direct exchange compare like for
like. What is *handed* to a collective (``bytes``, ``wire_bytes``) does not: of n bytes an
all_reduce sends 2 (p - 1) / p n by a ring, an all_gather (p - 1) n."""

from __future__ import annotations

from collections.abc import Iterable

from commpass.costmodel.links import steps
from commpass.plan import Plan, PlannedSite
from commpass.plan.stage import Stage


def plain(site: PlannedSite) -> int:
    """Bytes that leave the rank if the site is left alone; -1 where nobody knows its size."""
    if site.bytes < 0:
        return -1
    return round(_of_collective(site.kind, site.group_size, site.bytes))


def planned(site: PlannedSite) -> int:
    """Bytes that leave the rank with the chosen candidate: those of its stages, which may be of
    another size than its own (then in proportion). -1 where the size or the stages are not
    known."""
    if not site.compressed:
        return plain(site)
    exchanges = [stage for stage in site.stages if stage.role == "exchange"]
    handed = sum(stage.nbytes for stage in exchanges)
    if site.wire_bytes < 0 or not exchanges:
        return -1
    sent = sum(_of_stage(stage, site.group_size) for stage in exchanges)
    return round(sent * site.wire_bytes / handed) if handed else 0


def of_plans(plans: Iterable[Plan]) -> tuple[int, int, int]:
    """Bytes that leave a rank, before and after, of the sites of which both are known; and how many
    are left out. A graph that fell back sends what it did before."""
    before = after = unknown = 0
    for plan in plans:
        for site in plan.sites:
            was = plain(site)
            now = was if plan.fallback else planned(site)
            if was < 0 or now < 0:
                unknown += 1
            else:
                before, after = before + was, after + now
    return before, after, unknown


def _of_stage(stage: Stage, ranks: int) -> float:
    """Those of one exchange. With ``peers`` its stage has counted them."""
    if stage.peers is not None:
        return stage.leaving
    return _of_collective(stage.kind, ranks, stage.leaving)


def _of_collective(kind: str, ranks: int, nbytes: int) -> float:
    """Bytes one rank sends when each of ``ranks`` ranks hands over ``nbytes`` (docs: cost model).
    A receiver sends none."""
    return 0.0 if kind == "recv" or ranks <= 1 else steps(kind, ranks, nbytes)[1]
