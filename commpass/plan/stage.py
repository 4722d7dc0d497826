"""One step of an algorithm on one rank: plain data, for plans and for those who time them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ALL, NEXT, BLOCK, STRIDE = "all", "next", "block", "stride"
"""Whom each rank of a group sends to, as ``Stage.reach`` says it."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one rank does in one step, and after which other steps of its algorithm (``after``,
    their numbers from 0).

    ``role`` is ``encode``, ``decode``, ``sum``, ``enter``, ``leave`` (a codec's domain) or
    ``exchange``. The first five take or give ``values`` values, the first two by ``codec`` and in
    whole blocks. An
    exchange is a collective of ``kind`` to which the rank hands ``nbytes`` bytes, of which
    ``leaving`` go to other ranks: to all, or to so many ``peers`` alone. ``reach`` says who those
    are, the same on all ranks: ``all``; the ``next`` ranks of the group, on one side or on both; or
    all ranks of the part of the group that the rank is in: a ``block`` of ranks that follow one
    another, or a ``stride``, ranks of equal distances over the whole group. ``by_messages``: it
    goes as messages between pairs, and not by the library's own collective. ``dynamic``: the number
    of bytes depends on the values; this is what a Gaussian needs. Numbers may be symbolic.
    """

    role: str
    values: int = 0
    codec: str = ""
    kind: str = ""
    nbytes: int = 0
    leaving: int = 0
    peers: int | None = None
    reach: str = ALL
    by_messages: bool = False
    dynamic: bool = False
    after: tuple[int, ...] = ()

    @property
    def inside(self) -> bool:
        """Whether it stays among ranks that follow one another and are not the whole group."""
        return self.reach == BLOCK


def all_to_all(
    nbytes: Any, sent: Sequence[Any], received: Sequence[Any], rank: int, *, by_messages: bool
) -> Stage:
    """The exchange in which ``rank`` hands over ``nbytes`` as rows of one size, of which
    ``sent[r]`` go to rank r of its group and ``received[r]`` come from it. Numbers may be symbolic:
    one of rows then counts as some."""
    to, source = (
        {at for at, rows in enumerate(some) if type(rows) is not int or rows}
        for some in (sent, received)
    )
    rows = sum(sent)
    of_a_row = 0 if type(rows) is int and rows == 0 else nbytes // rows
    return Stage(
        role="exchange",
        kind="all_to_all",
        nbytes=nbytes,
        leaving=nbytes - of_a_row * sent[rank],
        peers=len(to - {rank}),
        reach=_reach(to, source, rank, len(sent)),
        by_messages=by_messages,
    )


def _reach(to: set[int], source: set[int], rank: int, ranks: int) -> str:
    """Whom all ranks of a group send to, judged by one of them. One that sends a row to itself as
    well is one of several that exchange rows among themselves."""
    size = len(to)
    if rank in to:
        if to != source or size == ranks or ranks % size:
            return ALL
        if to == set(range(rank // size * size, (rank // size + 1) * size)):
            return BLOCK
        return STRIDE if to == set(range(rank % (ranks // size), ranks, ranks // size)) else ALL
    beside = {(rank + 1) % ranks, (rank - 1) % ranks}
    return NEXT if to and to <= beside and source <= beside and size < ranks - 1 else ALL
