"""One step of an algorithm on one rank, as plain data for plans and the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ALL, NEXT, BLOCK, STRIDE = "all", "next", "block", "stride"
"""The values of ``Stage.reach``: which ranks each rank of a group sends to."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of one rank. ``after`` has the numbers, from 0, of the earlier steps of its
    algorithm that it depends on.

    - ``role``: ``encode``, ``decode``, ``sum``, ``enter``, ``leave`` (a codec's domain) or
      ``exchange``.
    - ``values``: the number of values that the first five roles read or produce; encodes and
      decodes do so by ``codec`` and in whole blocks.
    - ``kind`` and ``nbytes``: an exchange's collective, and the bytes that the rank hands to it.
    - ``leaving``: the bytes of these that go to other ranks.
    - ``peers``: the number of ranks that they go to, or None for all.
    - ``reach``: which ranks these are, equal on all ranks. ``all``, or ``next``: the neighbours in
      the group, on one side or both. The other two are the part of the group that contains the
      rank: a ``block`` of consecutive ranks, or a ``stride`` of ranks at equal distances over the
      whole group.
    - ``by_messages``: whether it is sent as messages between pairs instead of the library's
      collective.
    - ``dynamic``: whether the number of bytes depends on the values. It is then what a Gaussian
      needs.
    - ``rounds``: in a single kernel for the whole algorithm, the number of tiles that each of its
      programs processes one after the other; 0 for a stage outside of such a kernel.

    Numbers may be symbolic.
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
    rounds: int = 0
    after: tuple[int, ...] = ()


def plain_exchange(kind: str, nbytes: Any, *, by_messages: bool = False) -> Stage:
    """Return the exchange of a collective to which the rank hands ``nbytes``, all of which may go
    to any other rank."""
    return Stage(role="exchange", kind=kind, nbytes=nbytes, leaving=nbytes, by_messages=by_messages)


def all_to_all(
    nbytes: Any, sent: Sequence[Any], received: Sequence[Any], rank: int, *, by_messages: bool
) -> Stage:
    """Return the exchange in which ``rank`` sends ``nbytes`` as rows of equal size.

    ``sent[r]`` rows go to rank r of its group, and ``received[r]`` come from it. Numbers may be
    symbolic; a symbolic number of rows counts as nonzero.
    """
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
    """Return which ranks of a group all ranks send to, derived from one rank. A rank that also
    sends to itself belongs to a subset that exchanges rows internally."""
    size = len(to)
    if rank in to:
        if to != source or size == ranks or ranks % size:
            return ALL
        if to == set(range(rank // size * size, (rank // size + 1) * size)):
            return BLOCK
        return STRIDE if to == set(range(rank % (ranks // size), ranks, ranks // size)) else ALL
    beside = {(rank + 1) % ranks, (rank - 1) % ranks}
    return NEXT if to and to <= beside and source <= beside and size < ranks - 1 else ALL
