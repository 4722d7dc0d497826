"""The protocols of NCCL and RCCL, which trade latency for bandwidth.

Each collective is carried out by the protocol that takes the least time: by LL for few bytes, by
Simple for many. The model and the times are those by which NCCL chooses (``tuning.cc``, NCCL 2.18
to 2.28): a start, then consecutive messages, then the bytes at a share of the bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from commpass.errors import PolicyError, check_number

ALL_REDUCE = "all_reduce"
"""The kind that a library also carries out along a tree, or by a switch that sums."""


@dataclass(frozen=True)
class Protocol:
    """One protocol on one kind of link. Times are in microseconds.

    - ``start_us``: the time of a collective apart from its messages and bytes.
    - ``step_us``: the time of one message, without its bytes, from a rank to the next.
    - ``near_step_us``: the same between ranks of one host, if the link is between hosts.
    - ``tree_step_us``: the same along a tree of hosts (0: no trees).
    - ``share``: the share of the link's bandwidth that it reaches.
    - ``most_gbytes_per_s``: the most bandwidth that it reaches on any link (0: any).
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
            check_number(f"Protocol({name}", getattr(self, name))
        check_number("Protocol(share", self.share, above=True)

    def carries(self, kind: str, ranks: int) -> bool:
        """Whether it carries out collectives of a kind."""
        return not self.switch_sums or (kind == ALL_REDUCE and ranks > 2)

    def on_link_us(self, sent: float, ranks: int, gbytes_per_s: float) -> float:
        """Return the microseconds of ``sent`` bytes of a rank on a link of this bandwidth."""
        if self.switch_sums:
            sent *= ranks / (2 * (ranks - 1))
        reached = self.share * gbytes_per_s
        rate = min(reached, self.most_gbytes_per_s) if self.most_gbytes_per_s else reached
        return sent / (rate * 1e3)

    def latency_us(self, kind: str, messages: float, ranks: int, on_host: int) -> float:
        """Return the time of a collective with ``messages`` consecutive messages, without its
        bytes; ``on_host`` of its ``ranks`` are on each host (0: unknown)."""
        if self.switch_sums:
            return self.start_us
        near_us = self.near_step_us or self.step_us
        far = messages / on_host if on_host else messages
        ring_us = far * self.step_us + (messages - far) * near_us
        if kind != ALL_REDUCE or not self.tree_step_us:
            return self.start_us + ring_us
        on_host = on_host or 1
        hosts = ceil(ranks / on_host)
        tree_us = 2 * (ceil(log2(hosts)) * self.tree_step_us + (on_host - 1) * near_us)
        return self.start_us + min(ring_us, tree_us)
