"""Decide whether a rank may reuse a plan that was agreed on for other code.

A plan of the same digest may be that of another graph, which other ranks plan differently. A rank
that compiles the same code again proceeds at once. A rank that compiles other code publishes that
it would reuse the plan, and waits a while. It proceeds when all ranks that its groups connect
publish the same. If one of them compares its plan, this rank compares its own like a new one. If
they publish nothing, only this rank is assumed to compile such a graph, and it proceeds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commpass.distributed.parts import Part, call_of
from commpass.distributed.plan_store import (
    History,
    Link,
    NoChange,
    NoChanges,
    Participant,
    PlanStore,
    Round,
    from_spans,
    spans,
)

log = logging.getLogger("commpass")

LONGEST_PAUSE_S = 0.25
ALONE = (
    "rank %d compiled a new function whose plan was agreed on earlier, and rank %s compiled none"
    " for that call within %g s. Rank %d continues with that plan, and assumes that the others run"
    " what they compiled earlier. To avoid the wait, let all ranks call the same compiled functions"
)


def publish_reuse(
    store: PlanStore,
    part: Part,
    history: History,
    participant: Participant,
    links: Mapping[str, Link] | None = None,
    *,
    waits: bool = False,
) -> NoChange:
    """Publish that this rank reuses what was agreed on, or would reuse it (``waits``)."""
    note = NoChange(
        0,
        part.outline,
        part.sites,
        participant.digest,
        participant.name,
        "",
        call=call_of(part, participant),
        digest=part.reused_digest,
        waits=waits,
        links=dict(links or {}),
    )
    store.publish_note(part.where, part.key, history, note)
    return note


def must_compare(
    store: PlanStore,
    reusable: Sequence[Part],
    histories: Mapping[str, History],
    participant: Participant,
    patience_s: float,
) -> tuple[bool, Round | None]:
    """Return whether another rank plans the graph anew, so that this rank has to compare its plan.

    If not, also return the round in which all ranks published that they reuse theirs, if all have.
    ``reusable`` are the parts whose plans were agreed on for other code. Wait for at most
    ``patience_s`` seconds.
    """
    if not reusable:
        return False, None
    round = None
    links = {
        part.key: Link(histories[part.key].count, spans(part.ranks), call_of(part, participant))
        for part in reusable
    }
    try:
        notes = {
            part.key: publish_reuse(
                store, part, histories[part.key], participant, links, waits=True
            )
            for part in reusable
        }
        published = _Published(store, {part.key: part for part in reusable}, histories, notes)
        if published.is_compared(patience_s):
            for key, note in notes.items():
                del histories[key].notes[note.graph]
            return True, None
        round = published.round()
        for part in reusable:
            publish_reuse(store, part, histories[part.key], participant, links)
    except RuntimeError as error:  # the store is gone: no rank can be read
        log.debug("commpass could not reach the store: %s", error)
    for part in reusable:
        histories[part.key].agree(participant, part.digest, part.decisions())
    return False, round


@dataclass
class _Published:
    """What the ranks have published of one graph.

    It covers the groups of this rank (``parts``) and those that other ranks' notes link to.
    """

    store: PlanStore
    parts: Mapping[str, Part]
    histories: Mapping[str, History]
    own_notes: Mapping[str, NoChange]
    links: dict[str, Link] = field(default_factory=dict)
    notes: dict[str, dict[int, NoChange]] = field(default_factory=dict)
    nonces: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, note in self.own_notes.items():
            self._follow(note)
            self.notes[key][self.store.rank] = note

    def is_compared(self, patience_s: float) -> bool:
        """Return whether a rank compares its plan, or would reuse another one.

        Return False once all would reuse the same, or after ``patience_s`` seconds.
        """
        start, pause = time.monotonic(), 0.001
        while True:
            if any(self._differs(key) for key in list(self.links)):
                return True
            absent = sorted({rank for key in self.links for rank in self._absent_ranks(key)})
            if not absent:
                return False
            if time.monotonic() - start > patience_s:
                log.warning(ALONE, self.store.rank, spans(absent), patience_s, self.store.rank)
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def round(self) -> Round | None:
        """Return the round under a name that all ranks share, if all have published."""
        key = min(self.links)
        if not self.links[key].call or any(map(self._absent_ranks, self.links)):
            return None
        ranks = {rank for link in self.links.values() for rank in from_spans(link.ranks)}
        return Round(f"{key}/reuse/{self.links[key].call}", tuple(sorted(ranks)))

    def _absent_ranks(self, key: str) -> list[int]:
        return [rank for rank in from_spans(self.links[key].ranks) if rank not in self.notes[key]]

    def _differs(self, key: str) -> bool:
        """Read one group's entries. Return whether a rank compares its plan or reuses another."""
        store, absent, link = self.store, self._absent_ranks(key), self.links[key]
        self.nonces |= store.nonces([rank for rank in absent if rank not in self.nonces])
        nonces = {rank: self.nonces[rank] for rank in absent if rank in self.nonces}
        votes = store.votes(nonces, key, link.count + 1).values()
        if key in self.parts:
            where = self.parts[key].where
            others = store.latest_entries(nonces, where).values()
            if any(entry.policy not in store.published_policies[where] for entry in others):
                return True
            if store.departures(nonces, key) or any(
                not self.histories[key].is_past(vote) for vote in votes
            ):
                return True
        elif any(vote.call == link.call for vote in votes):
            return True
        for rank, notes in store.notes(nonces, key).items():
            if note := self._of_graph(key, notes):
                self.notes[key][rank] = note
                self._follow(note)
        return len({note.digest for note in self.notes[key].values()}) > 1

    def _of_graph(self, key: str, notes: NoChanges) -> NoChange | None:
        """Return the latest note that a rank has published of this graph."""
        if notes.count != self.links[key].count:
            return None
        return next((note for note in reversed(notes.notes) if self._is_of_graph(key, note)), None)

    def _is_of_graph(self, key: str, note: NoChange) -> bool:
        own_note, call = self.own_notes.get(key), self.links[key].call
        if own_note is None:
            return note.concerns(call, note.outline) and bool(call or note.digest)
        history = self.histories[key]
        if not note.concerns(call, own_note.outline):
            return False
        if call or note.digest:
            return note.repeats > history.repeats.get(note.graph, 0)
        return note.times > history.outline_counts.get(note.outline, 0)

    def _follow(self, note: NoChange) -> None:
        for key, link in note.links.items():
            self.links.setdefault(key, link)
            self.notes.setdefault(key, {})
