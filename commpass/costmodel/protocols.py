"""The protocols of NCCL and RCCL, which trade latency for bandwidth.

Each collective is carried out by the protocol that takes the least time: by LL for few bytes, by
Simple for many. The model and the times are those by which NCCL chooses (``tuning.cc``, NCCL 2.18
to 2.28): a start, then consecutive messages, then the bytes at a share of the bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2

from commpass.errors import PolicyError, check_quantity

ALL_REDUCE = "all_reduce"
"""The kind that a library also carries out along a tree, or by a switch that sums."""


@dataclass(frozen=True)
class Protocol:
    """One protocol on one kind of link. Times are in microseconds.

    - ``start_us``: the time of a collective apart from its messages and bytes.
    - ``step_us``: the time of one message, without its bytes, from a rank to the next.
    - ``near_step_us``: the same between ranks of one host, if the link is between hosts.
    - ``tree_step_us``: the same along a tree of hosts (0: no trees).
    - ``share``: the share of the link's bandwidth that it reaches, at most 1.
    - ``most_gbytes_per_s``: the most bandwidth of a rank that it reaches on any link, also if the
      rings of a group use several ports (0: any).
    - ``switch_sums``: the switch sums values (NVLink SHARP): a rank sends its tensor once. It is
      for all_reduces of three or more ranks alone.

    Raises PolicyError for an invalid number.
    """

    name: str
    start_us: float
    step_us: float
    share: float
    near_step_us: float = 0.0
    tree_step_us: float = 0.0
    most_gbytes_per_s: float = 0.0
    switch_sums: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise PolicyError(f"Protocol(name={self.name!r}): must be a text")
        for name in (
            "start_us",
            "step_us",
            "near_step_us",
            "tree_step_us",
            "most_gbytes_per_s",
        ):
            check_quantity(f"Protocol({name}", getattr(self, name))
        check_quantity("Protocol(share", self.share, above=True, maximum=1.0)
        if not isinstance(self.switch_sums, bool):
            raise PolicyError(f"Protocol(switch_sums={self.switch_sums!r}): must be True or False")

    def carries(self, kind: str, ranks: int) -> bool:
        """Whether it carries out collectives of a kind."""
        return not self.switch_sums or (kind == ALL_REDUCE and ranks > 2)

    def on_link_us(self, sent: float, ranks: int, gbytes_per_s: float, sharing: float) -> float:
        """Return the microseconds of ``sent`` bytes of a rank on a link of this bandwidth, whose
        port ``sharing`` times these bytes pass.

        ``most_gbytes_per_s`` is the most over all ports together.
        """
        if self.switch_sums:
            sent *= ranks / (2 * (ranks - 1))
        us = sent * sharing / (self.share * gbytes_per_s * 1e3)
        return max(us, sent / (self.most_gbytes_per_s * 1e3)) if self.most_gbytes_per_s else us

    def latency_us(self, kind: str, messages: float, ranks: int, on_host: int) -> float:
        """Return the time of a collective with ``messages`` consecutive messages, without its
        bytes; ``on_host`` of its ``ranks`` are on each host (0: unknown).

        One of ``on_host`` messages in turn goes to another host, and of fewer at least one.
        """
        if self.switch_sums:
            return self.start_us
        near_us = self.near_step_us or self.step_us
        far = max(messages / on_host, min(messages, 1)) if on_host else messages
        ring_us = far * self.step_us + (messages - far) * near_us
        if kind != ALL_REDUCE or not self.tree_step_us:
            return self.start_us + ring_us
        on_host = on_host or 1
        hosts = ceil(ranks / on_host)
        tree_us = 2 * (ceil(log2(hosts)) * self.tree_step_us + (on_host - 1) * near_us)
        return self.start_us + min(ring_us, tree_us)


@lru_cache(maxsize=64)
def between_hosts(
    protocols: tuple[Protocol, ...], inside: tuple[Protocol, ...]
) -> tuple[Protocol, ...]:
    """Return the protocols of a group on several hosts, between which ``protocols`` are available.

    They are those that the hosts have ``inside`` too, with its time of a message there. If there is
    none, ``protocols`` stay as they are.
    """
    near = {each.name: each.step_us for each in inside}
    both = (each for each in protocols if each.name in near)
    return tuple(replace(each, near_step_us=near[each.name]) for each in both) or protocols
