"""Count the bytes that leave a rank on its link, so that algorithms can be compared.

What is *handed* to a collective (``bytes``, ``wire_bytes``) does not allow that. Of n bytes an
all_reduce sends 2 (p - 1) / p n by a ring, and an all_gather (p - 1) n.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from commpass.costmodel.links import sent_by, sent_bytes
from commpass.plan import Plan, PlannedSite


class Sent(NamedTuple):
    """Bytes that leave a rank without and with commpass, without ``unknown`` sites."""

    before: int
    after: int
    unknown: int


def plain(site: PlannedSite) -> int:
    """Return the bytes that leave the rank if the site is uncompressed; -1 if its size is
    unknown."""
    if site.bytes < 0:
        return -1
    return round(sent_bytes(site.kind, site.group_size, site.bytes))


def planned(site: PlannedSite) -> int:
    """Return the bytes that leave the rank with the chosen candidate.

    They are those of its stages. If these have another size than the site, they are scaled. Return
    -1 if the size or the stages are unknown.
    """
    if not site.compressed:
        return plain(site)
    exchanges = [stage for stage in site.stages if stage.role == "exchange"]
    handed = sum(stage.nbytes for stage in exchanges)
    if site.wire_bytes < 0 or not exchanges:
        return -1
    sent = sum(sent_by(stage, site.group_size) for stage in exchanges)
    return round(sent * site.wire_bytes / handed) if handed else 0


def of_plans(plans: Iterable[Plan]) -> Sent:
    """Return the bytes of all sites for which both numbers are known."""
    both = [(plain(site), planned(site)) for plan in plans for site in plan.executed]
    known = [each for each in both if min(each) >= 0]
    before, after = (sum(column) for column in zip(*known, strict=True)) if known else (0, 0)
    return Sent(before, after, len(both) - len(known))
