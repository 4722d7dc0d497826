"""What goes between two ranks, agreed on by these two: the others of their group may not even take part.

For every rank at the other end of its sends and receives, a rank publishes its ends, and reads what that one says; from there
it goes on to those that the other has to do with in the same graph, so that all who hang together come to one verdict. Pairs
count their meetings on their own, and a pair that has agreed on the very same before does not meet again.

Where nothing is compressed the two need not be alike (torch lets shapes differ, and the other end may not be compiled at all):
then only somebody else's compressed end is an error, and silence is none.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
import torch.distributed as dist

from commpass.errors import PlanMismatch
from commpass.plan import NONE, Plan, PlannedSite
from commpass.runtime.waiting import appear

log = logging.getLogger("commpass")


@dataclass(frozen=True)
class End:
    """One end of a message as its rank planned it; ranks are numbers in the group."""

    name: str
    kind: str
    source: int
    target: int
    tag: int
    dtype: str
    shape: tuple[int | str, ...]
    codec: str
    algorithm: str
    reason: str

    @property
    def channel(self) -> tuple[int, int, int]:
        return self.source, self.target, self.tag

    @property
    def terms(self) -> dict[str, Any]:
        """What both ends must hold alike. Of a shape that is the number of values: they travel as one row."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        values = math.prod(sizes) if len(sizes) == len(self.shape) else "symbolic"
        return {"dtype": self.dtype, "number of values": values, "codec": self.codec, "algorithm": self.algorithm}

    @property
    def compressed(self) -> bool:
        return self.codec != NONE

    def __str__(self) -> str:
        does = f"rank {self.source} sends" if self.kind == "send" else f"rank {self.target} receives"
        return f"{does} {self.name}, {self.dtype}{list(self.shape)} ({self.reason})"


@dataclass(frozen=True)
class _Word:
    """What a rank says in a graph: its ends, why it failed, and the number of its meeting with each peer."""

    ends: tuple[End, ...]
    failure: str
    meets: dict[int, int]


@dataclass
class _Past:
    """How often a rank has met each other rank of a group, what they agreed on, and who did not answer."""

    group: dist.ProcessGroup
    counts: dict[int, int] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)


_past: dict[str, _Past] = {}


def ends(sites: Iterable[PlannedSite], rank: int) -> tuple[End, ...]:
    """The ends that one rank of a group has, in graph order."""
    return tuple(
        End(site.name, site.kind, *((rank, site.peer) if site.kind == "send" else (site.peer, rank)), site.tag, site.dtype,
            site.shape, site.codec, site.algorithm, site.reason)
        for site in sites
        if site.pairwise and site.peer is not None
    )  # fmt: skip


def mismatches(words: Iterable[Iterable[End]]) -> list[str]:
    """What ends say differently that should be one message: the n-th that is sent on a channel is the n-th that is received."""
    sides: dict[tuple[int, int, int], tuple[list[End], list[End]]] = {}
    for word in words:
        for end in word:
            sides.setdefault(end.channel, ([], []))[end.kind == "recv"].append(end)
    found = []
    for (source, target, tag), (sent, received) in sorted(sides.items()):
        if not any(end.compressed for end in (*sent, *received)):
            continue
        where = f"from rank {source} to rank {target} with tag {tag}"
        for a, b in zip_longest(sent, received):
            if a is None or b is None:
                one, missing = (a, f"rank {target} receives") if b is None else (b, f"rank {source} sends")
                found.append(f"{where}: {one}, but {missing} nothing for it in this graph")
                break
            what = [f"{key} is {a.terms[key]!r} at the sender and {b.terms[key]!r} at the receiver"
                    for key in a.terms if a.terms[key] != b.terms[key]]  # fmt: skip
            if what:
                found.append(f"{where}: {', '.join(what)}\n    {a}\n    {b}")
                break
    return found


class Pairs:
    """The meetings of one rank with those at the other ends of one graph's messages in one group."""

    def __init__(self, group: dist.ProcessGroup, plan: Plan):
        self.name = name = str(group.group_name)
        self.rank = group.rank()
        self.ranks = dist.get_process_group_ranks(group)
        self.store: Any = dist.distributed_c10d._get_process_group_store(group)
        self.plan = plan
        past = _past.get(name)
        if past is None or past.group is not group:
            past = _past[name] = _Past(group)
        self.past = past
        mine = ends(plan.of_group(name), self.rank)
        by_peer: dict[int, list[End]] = {}
        for end in mine:
            by_peer.setdefault(end.target if end.kind == "send" else end.source, []).append(end)
        self.keys = {peer: self._key(some) for peer, some in by_peer.items()}
        self.peers = sorted(peer for peer, key in self.keys.items() if plan.fallback or key not in past.agreed)
        self.ends = tuple(end for peer in self.peers for end in by_peer[peer])

    @property
    def settled(self) -> bool:
        return not self.peers

    def _key(self, some: Iterable[End]) -> str:
        """What is agreed on with a peer: the same at both ends, if they agree."""
        rows = sorted((end.channel, number, *map(str, end.terms.values())) for number, end in enumerate(_in_order(some)))
        return hashlib.sha256(msgspec.json.encode([self.plan.direction, rows])).hexdigest()[:16]

    def publish(self) -> None:
        for peer in self.peers:
            self.past.counts[peer] = self.past.counts.get(peer, 0) + 1
        meets = {peer: self.past.counts[peer] for peer in self.peers}
        self.words = {self.rank: _Word(self.ends, self.plan.fallback, meets)}
        for peer in self.peers:
            self.store.set(_place(self.rank, peer, meets[peer]), msgspec.json.encode(self.words[self.rank]))

    def verdict(self, timeout_s: float) -> dict[int, str]:
        """Reads what all who hang together say. Returns failures; raises PlanMismatch."""
        plain = not any(end.compressed for end in self.ends)
        missing = self._listen(timeout_s, self.past.silent if plain else set())
        failures = {self.ranks[rank]: word.failure for rank, word in self.words.items() if word.failure}
        compressed = any(end.compressed for word in self.words.values() for end in word.ends)
        silent = ", ".join(str(self.ranks[rank]) for rank in sorted(missing))
        if missing and (compressed or (self.plan.fallback and self.past.agreed)):
            raise PlanMismatch(
                f"rank {silent} of group {self.name!r} published no plan for its end of what is sent and received in this "
                f"{self.plan.direction} graph within {timeout_s:g} s, but rank {self.ranks[self.rank]} did. It compiled "
                "another graph, stopped, or needs longer: raise the time-out with commpass.backend(..., timeout=seconds). "
                "Here:\n" + "\n".join(f"  {end}: {end.codec}" for end in self.ends[:5])
            )
        if missing - self.past.silent:
            log.warning(
                "rank %s published no plan for its end of what is sent and received in this %s graph within %g s; nothing of "
                "it is compressed here, and it runs as it is", silent, self.plan.direction, timeout_s,
            )  # fmt: skip
        self.past.silent |= missing & set(self.peers)
        if failures:
            return failures
        if found := mismatches(word.ends for word in self.words.values()):
            more = [f"  ... and {len(found) - 10} more"] if len(found) > 10 else []
            raise PlanMismatch(
                f"the two ends of what is sent and received in group {self.name!r} planned differently for this "
                f"{self.plan.direction} graph (ranks are numbers in the group).\n"
                + "\n".join([*(f"  {text}" for text in found[:10]), *more])
                + "\nGive both ends the same policy and profile, and rules that match at both."
            )
        self.past.agreed |= {self.keys[peer] for peer in self.peers if peer not in missing}
        return {}

    def _listen(self, timeout_s: float, ignored: set[int]) -> set[int]:
        """Collects the words of all who hang together; returns the ranks that kept silent."""
        deadline = time.monotonic() + timeout_s
        queue = [(self.rank, peer, count) for peer, count in self.words[self.rank].meets.items()]
        missing: set[int] = set()
        while queue:
            known, rank, count = queue.pop(0)
            if rank in self.words or rank in missing:
                continue
            place = _place(rank, known, count)
            left = 0.0 if rank in ignored else deadline - time.monotonic()
            if not appear(self.store, [place], max(left, 0.0)):
                missing.add(rank)
                continue
            word = self.words[rank] = msgspec.json.decode(self.store.get(place), type=_Word)
            queue += [(rank, peer, number) for peer, number in word.meets.items()]
        return missing


def _in_order(some: Iterable[End]) -> list[End]:
    """Channel by channel, each in graph order."""
    return sorted(some, key=lambda end: end.channel)


def _place(speaker: int, listener: int, count: int) -> str:
    """Where a rank writes for another one, at their meeting of that number."""
    low, high = sorted((speaker, listener))
    return f"commpass/pair/{low}-{high}/{count}/{speaker}"
