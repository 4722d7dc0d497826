"""What each rank saw in a first run over all batches, and what it says of a model's places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commpass.calibration.measured_sites import Address, CountedSite
from commpass.calibration.probes import Probes
from commpass.codecs import codec
from commpass.codecs.wrappers.outlier import Channels, Running

KEEP = 1 / 64
"""The share of channels that ``outlier`` keeps (low-bit tensor-parallel inference, section 3)."""
INNER = ("int4",)
MOST_CHANNELS = 1 << 16


@dataclass(frozen=True)
class RankResults:
    """The results of one rank from a first run over all batches."""

    places: list[tuple[Address, list[CountedSite]]]
    merged: list[tuple[Address, Address]]
    channels: list[tuple[Address, list[float], list[float]]]
    sums: list[tuple[Address, list[float], list[float]]]
    group_ranks: list[tuple[Address, list[tuple[int, int]]]]
    uneven: list[Address]
    remarks: list[str]


def seen_by(probes: Probes, batches: int) -> RankResults:
    return RankResults(
        places=[
            (where, [CountedSite(site=site, calls=n / batches) for site, n in counter.items()])
            for where, counter in probes.sites.items()
        ],
        merged=sorted(probes.merged),
        channels=_ranges(probes.channels),
        sums=_ranges(probes.sums),
        group_ranks=[(where, sorted(each)) for where, each in probes.group_ranks.items()],
        uneven=[where for where, each in probes.channels.items() if each is None],
        remarks=list(probes.remarks),
    )


def _ranges(
    seen: Mapping[Address, Running | None],
) -> list[tuple[Address, list[float], list[float]]]:
    return [
        (where, each.low.tolist(), each.high.tolist())
        for where, each in seen.items()
        if each is not None
    ]


def clusters(seen: Sequence[RankResults]) -> list[tuple[Address, ...]]:
    """Return the places where anything was sent. Those that simplify merges are one place."""
    root: dict[Address, Address] = {}

    def find(address: Address) -> Address:
        while (above := root.setdefault(address, address)) != address:
            address = above
        return address

    sent = {where for each in seen for where, _ in each.places}
    for where in sorted(sent):
        find(where)
    for one, other in sorted({pair for each in seen for pair in each.merged}):
        a, b = sorted((find(one), find(other)))
        root[b] = a
    groups: dict[Address, list[Address]] = {}
    for where in sorted(root):
        groups.setdefault(find(where), []).append(where)
    return [tuple(group) for group in groups.values() if sent & set(group)]


def sites_of(group: tuple[Address, ...], seen: Sequence[RankResults]) -> tuple[CountedSite, ...]:
    """Return the sites of a place, from the first rank that sends anything there."""
    for each in seen:
        found = [site for where, sites in each.places if where in group for site in sites]
        if found:
            return tuple(sorted(found, key=repr))
    return ()


def channels_of(group: tuple[Address, ...], seen: Sequence[RankResults]) -> Channels | None:
    """Return the channel ranges of a place on each rank of its group, and of its sums.

    They are the largest over all groups. Return None if tensors differ in their channels.
    """
    by_rank: dict[int, list[list[float]]] = {}
    sizes, sums = set(), []
    for each in seen:
        if any(where in group for where in each.uneven):
            return None
        own = [one for where, ranks in each.group_ranks if where in group for one in ranks]
        sizes |= {size for _, size in own}
        rows = [_reach(low, high) for where, low, high in each.channels if where in group]
        for rank, _ in own:
            by_rank.setdefault(rank, []).extend(rows)
        sums += [_reach(low, high) for where, low, high in each.sums if where in group]
    rows = [row for of_rank in by_rank.values() for row in of_rank]
    widths = {len(row) for row in rows}
    if len(widths) != 1 or not 2 <= (width := next(iter(widths))) <= MOST_CHANNELS:
        return None
    if sizes == {len(by_rank)} and all(by_rank.values()):
        ranges = [_largest(by_rank[rank]) for rank in sorted(by_rank)]
    else:
        ranges = [_largest(rows)]
    total = [row for row in sums if len(row) == width]
    return Channels(width, (), tuple(ranges), _largest(total) if total else ())


def _reach(low: Sequence[float], high: Sequence[float]) -> list[float]:
    return [max(abs(a), abs(b)) for a, b in zip(low, high, strict=True)]


def _largest(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(max, zip(*rows, strict=True)))


def outlier_codecs(channels: Channels | None) -> list[str]:
    """Return codec ``outlier`` with the channels of a place that have the widest range on all
    ranks.

    The others have 4 bits: with scales for each block, and with static ones that all ranks share.
    """
    if channels is None:
        return []
    chosen = channels.keeping(KEEP)
    bare = Channels(channels.width, chosen.kept).to_text()
    dynamic = [codec(f"outlier(statistics={bare}, inner={inner})").spec for inner in INNER]
    static = codec(f"outlier(statistics={chosen.shared().to_text()})").spec
    return [*dynamic, static]
