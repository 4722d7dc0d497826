"""One step of an algorithm on one rank: plain data, for plans and for those who time them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one rank does in one step, and after which other steps of its algorithm (``after``,
    their numbers from 0).

    ``role`` is ``encode``, ``decode``, ``sum``, ``enter``, ``leave`` (a codec's domain) or
    ``exchange``. The first five take or give ``values`` values, the first two by ``codec`` and in
    whole blocks. An
    exchange is a collective of ``kind`` to which the rank hands ``nbytes`` bytes, of which
    ``leaving`` go to other ranks: to all, or to so many ``peers`` alone. ``inside``: those and the
    rank itself follow one another in the group and are not all of it. ``by_messages``: it goes as
    messages between pairs, and not by the library's own collective. ``dynamic``: the number of
    bytes depends on the values; this is what a Gaussian needs. Numbers may be symbolic.
    """

    role: str
    values: int = 0
    codec: str = ""
    kind: str = ""
    nbytes: int = 0
    leaving: int = 0
    peers: int | None = None
    inside: bool = False
    by_messages: bool = False
    dynamic: bool = False
    after: tuple[int, ...] = ()
