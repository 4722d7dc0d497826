"""The cost of an exchange: the alpha-beta model of a link.

Alpha is the time before the first byte of a message arrives, in microseconds, and beta the time of
one byte. The formulas are those of bandwidth-optimal algorithms on full-duplex links (SSFusion,
section 2; ZipCCL, section 4): ring for all_reduce and all_gather, direct for the others. They are
facts of the kinds (``plan.kinds``). A library of GPUs carries out a collective by the fastest of
its ``protocols``.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from commpass.costmodel.protocols import Protocol
from commpass.errors import PolicyError, check_quantity, nearest
from commpass.plan.kinds import KINDS, PAIRWISE
from commpass.plan.stage import ALL, BLOCK, NEXT, Stage
from commpass.utils.deprecated import renamed_fields
from commpass.utils.keywords import named_fields

ONE, SEVERAL = "message", "messages"
"""Kinds that are not collectives: an exchange by messages with one rank, or with several."""


@named_fields()
@dataclass(frozen=True)
class Region:
    """Alpha and beta of exchanges of at least some size.

    Args:
        from_bytes: the least bytes that leave a rank.
        alpha_us: the time to start an exchange, in microseconds.
        gbytes_per_s: the bandwidth per direction in GB/s.
    """

    from_bytes: float
    alpha_us: float
    gbytes_per_s: float

    def __post_init__(self) -> None:
        check_quantity("Region(from_bytes", self.from_bytes)
        check_quantity("Region(alpha_us", self.alpha_us)
        check_quantity("Region(gbytes_per_s", self.gbytes_per_s, above=True)

    def time_us(self, messages: float, sent: float) -> float:
        """Return the microseconds of ``messages`` consecutive messages that send ``sent`` bytes."""
        return self.alpha_us * messages + sent / (self.gbytes_per_s * 1e3)


OLD_NAMES = {"busy_us": "overhead_us", "crowd_bytes": "contention_bytes"}
"""Fields of a link by their old names, which work for one version."""
_IN_GBYTES = "write gbytes_per_s, in GB/s: an eighth of the Gbit/s, so 10 Gbit/s are 1.25"
UNITS = dict.fromkeys(("gbit_per_s", "gbits_per_s", "gbit", "gbps"), _IN_GBYTES)
"""What to write instead of a rate in another unit."""


@renamed_fields(OLD_NAMES)
@named_fields(UNITS)
@dataclass(frozen=True)
class Link:
    """A link between the ranks of a group.

    Args:
        alpha_us: the time to start an exchange, in microseconds.
        gbytes_per_s: the bandwidth per direction in GB/s.
        factor: by kind, how many times slower than the formula a library runs a collective. For an
            all_to_all it applies to the bytes beyond ``buffered_bytes``.
        overhead_us: how long a rank is busy with one message to another rank and one from it, for
            any size, if exchanges are sent as messages.
        contention_bytes: bytes sent again if messages of several ranks compete at one; for few
            bytes, a quarter of them.
        buffered_bytes: bytes of an all_to_all to which ``factor`` does not apply.
        measured: measured regions of sizes, by kind, or ``message`` and ``messages`` for messages
            to one rank or to several. They replace all other numbers except ``overhead_us``.
        sharing: by kind, the bytes through a rank's port relative to those that it sends, if other
            ranks use the port at the same time.
        protocols: how a library of GPUs carries out collectives; it takes the fastest. They replace
            ``alpha_us``, except for messages between pairs.
        least_us: the least time of a library's collective, with protocols.
        on_host: how many ranks of the group are on each host, whose messages among each other take
            less time (0: unknown).
        peer_gbytes_per_s: the bandwidth to one other rank, if each pair of ranks has a connection
            of its own (0: each rank has one port to all others).
        island: how many consecutive ranks reach each other at full bandwidth, if they reach all
            others only through a bridge (0: all ranks alike). A CPU socket or a PCIe switch is one.
        bridge_gbytes_per_s: the bandwidth per direction from one island to all others together.

    Raises PolicyError for a number that is not finite, a negative time, a bandwidth of 0, or an
    unknown kind.
    """

    alpha_us: float
    gbytes_per_s: float
    factor: Mapping[str, float] = field(default_factory=dict)
    overhead_us: float = 0.0
    contention_bytes: float = 0.0
    buffered_bytes: float = 0.0
    measured: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)
    sharing: Mapping[str, float] = field(default_factory=dict)
    protocols: tuple[Protocol, ...] = ()
    least_us: float = 0.0
    on_host: int = 0
    peer_gbytes_per_s: float = 0.0
    island: int = 0
    bridge_gbytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        check_quantity("Link(alpha_us", self.alpha_us)
        check_quantity("Link(gbytes_per_s", self.gbytes_per_s, above=True)
        check_quantity("Link(overhead_us", self.overhead_us)
        check_quantity("Link(contention_bytes", self.contention_bytes)
        check_quantity("Link(buffered_bytes", self.buffered_bytes)
        check_quantity("Link(least_us", self.least_us)
        for name in ("peer_gbytes_per_s", "bridge_gbytes_per_s"):
            rate = getattr(self, name)
            check_quantity(f"Link({name}", rate, above=rate != 0)
        for name, ranks in (("on_host", self.on_host), ("island", self.island)):
            if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 0:
                raise PolicyError(f"Link({name}={ranks!r}): must be a number of ranks, or 0")
        if self.island and not self.bridge_gbytes_per_s:
            raise PolicyError(
                f"Link(island={self.island}): needs bridge_gbytes_per_s, the bandwidth between them"
            )
        if not _has_only(self.protocols, Protocol):
            raise PolicyError(
                f"Link(protocols={self.protocols!r}): must be a tuple of Protocol(...)s"
            )
        if self.protocols and all(each.switch_sums for each in self.protocols):
            raise PolicyError(
                "Link(protocols=...): needs one without switch_sums, for all other collectives"
            )
        for name, kinds in (("factor", KINDS), ("sharing", MEASURED)):
            if not isinstance(given := getattr(self, name), Mapping):
                raise PolicyError(
                    f"Link({name}={given!r}): must map kinds of collectives to numbers"
                )
            for kind, times in given.items():
                if kind not in kinds:
                    why = nearest(str(kind), kinds)
                    raise PolicyError(f"Link({name}=...): no kind {kind!r}{why}")
                check_quantity(f"Link({name}=...): {kind}", times, above=True)
        if not isinstance(self.measured, Mapping):
            raise PolicyError(f"Link(measured={self.measured!r}): must map kinds to Region(...)")
        for kind, regions in self.measured.items():
            if kind not in MEASURED:
                why = nearest(str(kind), MEASURED)
                raise PolicyError(f"Link(measured=...): no kind {kind!r}{why}")
            if not _has_only(regions, Region):
                raise PolicyError(
                    f"Link(measured=...): {kind} has {regions!r}: must be a tuple of Region(...)s"
                )
            begins = [each.from_bytes for each in regions]
            if not begins or begins[0] != 0 or begins != sorted(set(begins)):
                raise PolicyError(
                    f"Link(measured=...): {kind} begins at {begins} bytes: must begin at 0 and grow"
                )

    def region(self, kind: str, sent: float) -> Region | None:
        """Return the measured region of exchanges in which ``sent`` bytes leave a rank, or None."""
        known = reversed(self._regions(kind))
        return next((each for each in known if each.from_bytes <= sent), None)

    def _regions(self, kind: str) -> tuple[Region, ...]:
        return self.measured.get(kind) or self.measured.get(ONE if kind == SEVERAL else kind, ())

    def _rate_beyond(self, kind: str, region: Region) -> float:
        """Return the GB/s that a link has for larger exchanges than those of a region, or inf.

        The time of small exchanges may not grow with their bytes, but they keep the link busy: many
        in flight take no less time than few large ones.
        """
        larger = [each for each in self._regions(kind) if each.from_bytes > region.from_bytes]
        return max((each.gbytes_per_s for each in larger), default=inf)

    def scaled(self, times: float) -> Link:
        """Return a link of ``times`` the bandwidth, with the same start-up times."""
        measured = {
            kind: tuple(replace(each, gbytes_per_s=each.gbytes_per_s * times) for each in regions)
            for kind, regions in self.measured.items()
        }
        return replace(
            self,
            gbytes_per_s=self.gbytes_per_s * times,
            peer_gbytes_per_s=self.peer_gbytes_per_s * times,
            bridge_gbytes_per_s=self.bridge_gbytes_per_s * times,
            measured=measured,
        )

    def delayed(self, times: float, later_us: float) -> Link:
        """Return a link of the same bandwidth with ``times`` the start-up times, of which an
        exchange then takes ``later_us`` longer."""
        measured = {
            kind: tuple(
                replace(each, alpha_us=each.alpha_us * times + later_us) for each in regions
            )
            for kind, regions in self.measured.items()
        }
        return replace(
            self,
            alpha_us=self.alpha_us * times + later_us,
            overhead_us=self.overhead_us * times,
            measured=measured,
        )

    def rate_to(self, peers: int) -> float:
        """Return the GB/s that a rank sends in one direction to this many others at once."""
        if not self.peer_gbytes_per_s:
            return self.gbytes_per_s
        return min(self.gbytes_per_s, self.peer_gbytes_per_s * peers)

    def time_us(self, kind: str, nbytes: float, ranks: int, peers: int | None = None) -> float:
        """Return the microseconds of one collective of ``kind`` in which each of ``ranks`` ranks
        passes ``nbytes``; with ``peers``, each exchanges only with that many others."""
        return sum(self.parts_us(kind, nbytes, ranks, peers))

    def parts_us(
        self,
        kind: str,
        nbytes: float,
        ranks: int,
        peers: int | None = None,
        *,
        by_messages: bool = False,
        sharing: float | None = None,
    ) -> tuple[float, float]:
        """As ``time_us``, with separate latency and time on the link.

        With ``by_messages``, the exchange is sent as messages between pairs, which are all in
        flight at once. They are not the library's collectives, to which ``factor`` applies.
        ``sharing`` replaces that of the link, which holds if each rank sends to the next or to all
        others.
        """
        if ranks <= 1:
            return 0.0, 0.0
        messages, sent = steps(kind, ranks, nbytes) if peers is None else (peers, nbytes)
        called = _measured_as(kind, messages, by_messages)
        on_port = self.sharing.get(called, 1.0) if sharing is None else sharing
        if region := self.region(called, sent):
            times = min(messages, 1) if by_messages else messages
            alpha = region.alpha_us * times
            on_link = sent * on_port / (region.gbytes_per_s * 1e3)
            least = sent * on_port / (self._rate_beyond(called, region) * 1e3)
            busy = max(on_link, min(least, alpha + on_link))
            return alpha + on_link - busy, busy
        reach = ALL if called in DIRECT else NEXT
        if not by_messages:
            us = self._library_us(kind, messages, sent, ranks, peers, on_port, reach)
            if kind not in ALSO_DIRECT or not self.protocols or peers is not None:
                return us
            return min(us, self.parts_us(ALSO_DIRECT[kind], nbytes, ranks), key=sum)
        contention = min(sent / 4, self.contention_bytes) if messages > 1 else 0.0
        carried, rate = sent + contention, self.rate_to(max(messages, 1))
        on_bridge_us = self._on_bridge_us(carried, reach, ranks, messages)
        alpha = self.alpha_us * min(messages, 1)
        return alpha, max(carried * on_port / (rate * 1e3), on_bridge_us)

    def _library_us(
        self,
        kind: str,
        messages: int,
        sent: float,
        ranks: int,
        peers: int | None,
        on_port: float,
        reach: str,
    ) -> tuple[float, float]:
        """Return latency and time on the link of a library's collective, of whose bytes a port
        carries ``on_port`` times those of one rank."""
        buffered = min(sent, self.buffered_bytes) if kind in DIRECT else 0.0
        slowed = buffered + (sent - buffered) * self.factor.get(kind, 1.0)
        carried = slowed * on_port
        all_peers = 1 if kind in PAIRWISE else ranks - 1
        rate = self.rate_to(all_peers if peers is None else max(peers, 1))
        least_us = self._on_bridge_us(carried, reach, ranks, messages)
        if not self.protocols:
            return self.alpha_us * messages, max(carried / (rate * 1e3), least_us)
        in_turn = 1 if kind in DIRECT else messages
        starts_us = max(messages - 1, 0) * START_US if kind in DIRECT else 0.0
        latency, on_link_us = min(
            (
                (
                    each.latency_us(kind, in_turn, ranks, self.on_host) + starts_us,
                    max(each.on_link_us(slowed, ranks, rate, on_port), least_us),
                )
                for each in self.protocols
                if each.carries(kind, ranks)
            ),
            key=sum,
        )
        return max(latency, self.least_us - on_link_us), on_link_us

    def _on_bridge_us(self, sent: float, reach: str, ranks: int, peers: int) -> float:
        """Return the microseconds in which the bytes of an island pass its bridge, if each of
        ``ranks`` ranks sends ``sent`` bytes."""
        if not self.island or self.island >= ranks:
            return 0.0
        passing = crossing(reach, peers, ranks, self.island)
        return passing * sent / (self.bridge_gbytes_per_s * 1e3)


def _has_only(value: object, kind: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)


MEASURED = (*KINDS, ONE, SEVERAL)
START_US = 1.0
"""Microseconds between the starts of two messages of a rank in a collective of a library of GPUs in
which it sends to all others: an assumption."""
ALSO_DIRECT = {"reduce_scatter": "all_to_all"}
"""Kinds that a library of GPUs is assumed to carry out at least as fast as this exchange of the
same bytes with all others: NCCL has reduce_scatters in fewer messages than a ring from 2.23 on.
Else a codec would seem to gain from its algorithm alone."""
DIRECT = (*(name for name, kind in KINDS.items() if kind.direct), SEVERAL)
"""Kinds in which each rank sends to each other rank; in all others each sends to the next."""


def _measured_as(kind: str, messages: int, by_messages: bool) -> str:
    return kind if not by_messages else SEVERAL if messages > 1 else ONE


def steps(kind: str, ranks: int, nbytes: float) -> tuple[int, float]:
    """Return the number of consecutive messages, and the bytes that one rank sends, if each of
    ``ranks`` ranks passes ``nbytes``. Messages to several ranks are all in flight at once."""
    return (1, float(nbytes)) if kind in (ONE, SEVERAL) else KINDS[kind].steps(ranks, nbytes)


def sent_bytes(kind: str, ranks: int, nbytes: float) -> float:
    """Return the bytes that leave one rank if each of ``ranks`` ranks passes ``nbytes``. A receiver
    sends none."""
    return 0.0 if ranks <= 1 or KINDS[kind].receives else steps(kind, ranks, nbytes)[1]


def sent_by(exchange: Stage, ranks: int) -> float:
    """Return the bytes of one exchange that leave one rank. With ``peers`` its stage has counted
    them."""
    if exchange.peers is not None:
        return exchange.leaving
    return sent_bytes(exchange.kind, ranks, exchange.leaving)


def sharing(
    ranks: int, on_host: int, per_port: float, minimum_to_all: float = 1.0
) -> dict[str, float]:
    """Return, by kind, how many times the bytes of one rank pass a port that ``per_port`` ranks of
    a host use at the same time.

    All ranks of a job are assumed to do the same, each in a group of ``ranks`` of which ``on_host``
    are on a host. ``minimum_to_all`` is the smallest number for exchanges with all others, of which
    a part stays on the host.
    """
    to_all = max(minimum_to_all, sharing_of(ALL, ranks - 1, ranks, on_host, per_port, 0.0))
    to_next = sharing_of(NEXT, ranks - 1, ranks, on_host, per_port)
    return {kind: to_all if kind in DIRECT else to_next for kind in MEASURED}


def sharing_of(
    reach: str, peers: int, ranks: int, on_host: int, per_port: float, minimum: float = 1.0
) -> float:
    """As ``sharing``, for an exchange of this ``reach`` (as in ``Stage``) with ``peers`` ranks."""
    return max(minimum, per_port / on_host * crossing(reach, peers, ranks, on_host))


@functools.lru_cache(maxsize=1024)
def crossing(reach: str, peers: int, ranks: int, on_host: int) -> float:
    """Return how many ranks' bytes leave the busiest host in an exchange of this ``reach`` with
    ``peers`` ranks.

    The group has ``ranks`` ranks, of which ``on_host`` consecutive ones are on each host.
    """
    if on_host == ranks or not peers:
        return 0.0
    if reach == NEXT:  # first and last rank of a host send half their bytes out, or one of them all
        return 1.0
    if reach == ALL:
        return on_host * (ranks - on_host) / max(ranks - 1, 1)
    size = peers + 1

    step = 1 if reach == BLOCK else ranks // size

    def share_leaving(rank: int) -> float:
        """Return the share of what a rank sends that goes to other hosts."""
        host = rank // on_host * on_host
        first = rank // size * size if reach == BLOCK else rank % step
        part = range(first, first + step * size, step)
        near = bisect_left(part, host + on_host) - bisect_left(part, host)
        return (size - near) / peers

    hosts = range(0, ranks, on_host)
    return max(sum(map(share_leaving, range(host, host + on_host))) for host in hosts)
