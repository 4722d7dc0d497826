"""Match the two ends of each message between two ranks, and find where they differ.

A rank's graph holds only its own ends. The n-th message that is sent on a channel (from, to, tag)
is the n-th that is received on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from commpass.plan import NONE, PlannedSite, Site

Channel = tuple[int, int, int]


def channel_of(site: Site, rank: int) -> Channel:
    """Return (from, to, tag) of a send or recv of one rank; ranks are numbers in the group."""
    assert site.peer is not None
    return (rank, site.peer, site.tag) if site.kind == "send" else (site.peer, rank, site.tag)


def terms(site: PlannedSite | End) -> dict[str, Any]:
    """Return what must be equal at both ends.

    Of the shape that is only the number of values, since they travel as one row.
    """
    sizes = [size for size in site.shape if isinstance(size, int)]
    values = math.prod(sizes) if len(sizes) == len(site.shape) else "symbolic"
    return {
        "dtype": site.dtype,
        "number of values": values,
        "codec": site.codec,
        "algorithm": site.algorithm,
    }


@dataclass(frozen=True)
class End:
    """One end of a message as its rank planned it; ranks are numbers in the group."""

    name: str
    kind: str
    channel: Channel
    dtype: str
    shape: tuple[int | str, ...]
    codec: str
    algorithm: str
    reason: str

    @property
    def compressed(self) -> bool:
        return self.codec != NONE

    def __str__(self) -> str:
        source, target, _ = self.channel
        does = f"rank {source} sends" if self.kind == "send" else f"rank {target} receives"
        return f"{does} {self.name}, {self.dtype}{list(self.shape)} ({self.reason})"


def endpoints(sites: Iterable[PlannedSite], rank: int) -> tuple[End, ...]:
    """Return the ends that one rank of a group has, in graph order."""
    return tuple(
        End(
            site.name,
            site.kind,
            channel_of(site, rank),
            site.dtype,
            site.shape,
            site.codec,
            site.algorithm,
            site.reason,
        )
        for site in sites
        if site.pairwise and site.peer is not None
    )


def mismatches(ends: Iterable[Iterable[End]]) -> list[str]:
    """Return how the two ends of messages differ.

    If nothing is compressed they need not be equal: torch lets shapes differ.
    """
    sides: dict[Channel, tuple[list[End], list[End]]] = {}
    for ends_of_rank in ends:
        for end in ends_of_rank:
            sides.setdefault(end.channel, ([], []))[end.kind == "recv"].append(end)
    found = []
    for (source, target, tag), (sent, received) in sorted(sides.items()):
        if not any(end.compressed for end in (*sent, *received)):
            continue
        where = f"from rank {source} to rank {target} with tag {tag}"
        for a, b in zip_longest(sent, received):
            if a is None or b is None:
                one = a or b
                missing = f"rank {target} receives" if b is None else f"rank {source} sends"
                found.append(f"{where}: {one}, but {missing} nothing for it in this graph")
                break
            left, right = terms(a), terms(b)
            what = [
                f"{key} is {left[key]!r} at the sender and {right[key]!r} at the receiver"
                for key in left
                if left[key] != right[key]
            ]
            if what:
                found.append(f"{where}: {', '.join(what)}\n    {a}\n    {b}")
                break
    return found
