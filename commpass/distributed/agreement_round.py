"""Compare the plans of one graph among ranks: publish votes and poll the store until they
decide."""

from __future__ import annotations

import dataclasses

from commpass.distributed.parts import Part, call_of, may_match
from commpass.distributed.plan_store import (
    ANY,
    History,
    LatestEntry,
    NoChange,
    NoChanges,
    Participant,
    PlanStore,
    Round,
    Vote,
    epoch,
    from_spans,
    spans,
)
from commpass.plan import NONE, Plan


class AgreementRound:
    """One comparison of a graph's plan by all ranks that its groups connect.

    ``halls`` maps the key of each connected group to the number of its round and its ranks. It
    includes groups that this rank is not in.
    """

    def __init__(
        self,
        store: PlanStore,
        waiting: list[Part],
        pasts: dict[str, History],
        plan: Plan,
        participant: Participant,
        timeout_s: float,
    ):
        self.here, self.plan, self.speaker, self.timeout_s = store, plan, participant, timeout_s
        self.parts = {part.key: part for part in waiting}
        self.pasts = pasts
        self.contrary = [part for part in waiting if not part.changed and not part.hidden_sites]
        for part in waiting:
            pasts[part.key].count += 1
        self.halls = {part.key: (pasts[part.key].count, part.ranks) for part in waiting}
        self.mine = dict(self.halls)
        self.nonces: dict[int, str] = {store.rank: store.nonce}
        self.heard: dict[str, dict[int, Vote]] = {key: {} for key in self.halls}
        self.alone: dict[str, dict[int, NoChange]] = {key: {} for key in self.halls}
        self.left: dict[str, dict[int, str]] = {key: {} for key in self.halls}
        self.reused: dict[str, dict[int, NoChange]] = {key: {} for key in self.halls}
        self.conflicts: set[str] = set()
        self.said: dict[str, str] = {}

    def publish(self) -> None:
        """Publish what this rank planned; publish again after it reads further hello records."""
        meets = {key: (number, spans(ranks)) for key, (number, ranks) in self.mine.items()}
        for key, part in self.parts.items():
            now = self._epoch(key)
            if self.said.get(key) == now:
                continue
            if self.said.get(key):  # those votes may come from an older run
                self.heard[key].clear()
            self.said[key] = now
            said = self.heard[key].get(self.here.rank, Vote())
            word = dataclasses.replace(
                self.vote_for(part),
                digest=part.digest,
                meets=meets,
                elsewhere=said.elsewhere,
                hidden=part.hidden_sites,
                own=part.uses_local_part,
            )
            self.here.publish_vote(key, self.mine[key][0], word)
            self.here.publish_latest(
                part.where, LatestEntry(word=word, place=(key, self.mine[key][0]))
            )
            self.heard[key][self.here.rank] = word

    def vote_for(self, part: Part) -> Vote:
        """Return this rank's vote on a part if it changes nothing there."""
        call = call_of(part, self.speaker)
        return Vote(
            outline=part.outline,
            policy=self.speaker.digest,
            policy_name=self.speaker.name,
            epoch=self.said[part.key],
            failure=part.failure,
            call=call,
            repeats=self.pasts[part.key].times_noted(call, part.outline),
        )

    def _epoch(self, key: str) -> str:
        ranks = self.halls[key][1]
        known = [self.nonces[rank] for rank in ranks if rank in self.nonces]
        return epoch(known) if len(known) == len(ranks) else ""

    def poll(self) -> None:
        """Read all votes and notes that are published, and follow votes to the rounds that they
        name."""
        for key in list(self.halls):
            number = self.halls[key][0]
            missing = self.absent_ranks(key)
            if not missing:
                continue
            self.nonces |= self.here.nonces([rank for rank in missing if rank != self.here.rank])
            now = self._epoch(key)
            places = {rank: self.nonces[rank] for rank in missing if rank in self.nonces}
            others = self._peers(
                key, places
            )  # first: a rank that proceeds has written its vote or note
            notes = self.here.notes(places, key)
            if key in self.parts:
                for rank, its in notes.items():
                    for note in self._about(key, its):
                        self.alone[key][rank] = note
            for rank, word in self.here.votes(places, key, number).items():
                if word.meets and (not now or word.epoch != now):
                    continue  # from an older run, or without all hello records
                if key in self.parts and self.pasts[key].is_past(word):
                    continue
                self.heard[key][rank] = word
                for other, (count, members) in word.meets.items():
                    known = self.halls.setdefault(other, (count, from_spans(members)))
                    self.heard.setdefault(other, {})
                    self.left.setdefault(other, {})
                    self.alone.setdefault(other, {})
                    self.reused.setdefault(other, {})
                    self.conflicts |= {other} if known[0] != count else set()
            silent = {rank: places[rank] for rank in self.absent_ranks(key) if rank in places}
            self.left[key] |= self.here.departed(silent, key)
            self._adopt_entries(key, others, now)
            for rank in self.absent_ranks(key):
                if rank in notes and (found := self._reused(key, notes[rank])):
                    self._reuse(key, rank, found)
        self._ask_again()

    def _reuse(self, key: str, rank: int, note: NoChange) -> None:
        """Count the note of a rank that reuses an agreed plan as its vote."""
        self.reused[key][rank] = note
        digest = "" if note.digest == NONE else note.digest
        self.heard[key][rank] = Vote(
            digest, note.outline, note.policy, note.policy_name, reused=True
        )

    def _reused(self, key: str, notes: NoChanges) -> NoChange | None:
        """Return the note of a rank that reuses a plan for this very call and does not wait."""
        part = self.parts.get(key)
        calls = {word.call for word in self.heard[key].values() if word.call}
        if part is not None:
            calls = {call_of(part, self.speaker)}
        past = self.pasts[key].repeats if part is not None else {}
        return next(
            (
                note
                for note in notes.notes
                if note.digest
                and not note.waits
                and notes.count == self.halls[key][0] - 1
                and note.repeats > past.get(note.graph, 0)
                and any(note.concerns(call, part.outline if part else "") for call in calls)
            ),
            None,
        )

    def contradicted(self) -> dict[str, list[int]]:
        """Return, by round, the ranks that reuse an agreed plan where another rank planned
        otherwise."""
        found = {}
        for key, heard in self.heard.items():
            digests = {word.digest for word in heard.values() if not word.follows}
            going = [rank for rank in self.reused[key] if heard[rank].digest]
            if going and len(digests) > 1:
                found[key] = going
        return found

    def _peers(self, key: str, places: dict[int, str]) -> dict[int, LatestEntry]:
        """Return the latest entries of ranks under a policy that this rank never used there.

        Such a rank will not join this round. Entries that were compared with this rank's current
        vote are returned too.
        """
        if key not in self.parts:
            return {}
        where = self.parts[key].where
        known = self.here.spoken[where]
        said = self.here.last(places, where)
        mine = (key, self.mine[key][0])
        return {
            rank: now
            for rank, now in said.items()
            if now.policy not in known
            or (now.word and now.word.elsewhere.get(self.here.rank) == mine)
        }

    def _adopt_entries(self, key: str, entries: dict[int, LatestEntry], epoch: str) -> None:
        """Adopt entries from under another policy, and publish where they are for ranks that lack
        them."""
        elsewhere = {}
        for rank, now in entries.items():
            if rank not in self.absent_ranks(key):
                continue
            if now.note is not None:
                self.alone[key][rank] = now.note
            elif now.word is not None and epoch and now.word.epoch == epoch:
                self.heard[key][rank] = now.word
                elsewhere[rank] = now.place
        if elsewhere:
            mine = self.heard[key][self.here.rank]
            mine = dataclasses.replace(mine, elsewhere=mine.elsewhere | elsewhere)
            self.heard[key][self.here.rank] = mine
            self.here.publish_vote(key, self.mine[key][0], mine)
            self.here.publish_latest(
                self.parts[key].where, LatestEntry(word=mine, place=(key, self.mine[key][0]))
            )

    def _ask_again(self) -> None:
        """Read the votes again that led to a round which this rank is not in, while votes are
        missing there.

        Those ranks may have found by now that they need not wait for the missing ones.
        """
        open_ones = {key for key in self.halls if key not in self.parts and self.absent_ranks(key)}
        for key, heard in self.heard.items():
            led = [rank for rank, word in heard.items() if open_ones & set(word.meets)]
            places = {rank: self.nonces[rank] for rank in led}
            heard.update(self.here.votes(places, key, self.halls[key][0]))
            for word in list(heard.values()):
                for rank in word.elsewhere.keys() & set(self.absent_ranks(key)):
                    self.nonces |= self.here.nonces([rank])
                    heard.update(self.here.votes({rank: self.nonces[rank]}, *word.elsewhere[rank]))

    def _about(self, key: str, notes: NoChanges) -> list[NoChange]:
        """Return the notes since the last round that concern sites of this rank's graph.

        A note that this rank has published too is left out: it was about another graph.
        """
        part, past = self.parts[key], self.pasts[key]
        call = call_of(part, self.speaker)

        def is_about(note: NoChange) -> bool:
            return any(
                site == ANY or may_match(site, each) for site in note.sites for each in part.sites
            )

        def is_fresh(note: NoChange) -> bool:
            if note.call and note.call == call:
                return note.repeats > past.repeats.get(note.graph, 0)
            return note.times > past.noted.get(note.outline, 0)

        if notes.count != self.halls[key][0] - 1:
            return []
        return [
            note for note in notes.notes if not note.digest and is_about(note) and is_fresh(note)
        ]

    def round(self) -> Round:
        """Return the round, under a name that all compared ranks share, with those ranks."""
        ranks = {rank for _, members in self.halls.values() for rank in members}
        key = min(self.halls)
        return Round(f"{key}/{self.halls[key][0]}", tuple(sorted(ranks)))

    def absent_ranks(self, key: str) -> list[int]:
        """Return the ranks of a round that have published nothing yet."""
        there = self.heard[key].keys() | self.left[key].keys() | self.alone[key].keys()
        return [rank for rank in self.halls[key][1] if rank not in there]

    def decided(self) -> bool:
        """Return whether all ranks have voted, or enough of them.

        One rank that changes nothing keeps all ranks from changing anything. But a rank that would
        not apply what was agreed on before must first know that all other ranks do the same.
        """
        words = [word for heard in self.heard.values() for word in heard.values()]
        if any(word.gave_up for word in words) or self.contradicted():
            return True
        if self.is_unchanged() and not self.contrary:
            return True
        return not any(self.absent_ranks(key) for key in self.halls)

    def has_absent_rank(self) -> bool:
        """Return whether a rank changes nothing and has not waited for the others."""
        return any(self.left.values()) or any(self.alone.values())

    def is_unchanged(self) -> bool:
        """Return whether no rank can change anything, whatever the missing votes are."""
        words = [word for heard in self.heard.values() for word in heard.values()]
        nothing = any(not word.digest and not word.hidden for word in words)
        return bool(self.conflicts) or self.has_absent_rank() or nothing

    def hidden_sites(self) -> bool:
        """Return whether a rank leaves sites uncompressed because its own compute overlaps them."""
        return any(word.hidden for heard in self.heard.values() for word in heard.values())

    def uses_local_part(self) -> bool:
        """Return whether some ranks of a group do not send what others send, since they use only
        their own part."""
        return any(len({word.own for word in heard.values()}) > 1 for heard in self.heard.values())

    def other_graph(self, key: str) -> bool:
        """Return whether the ranks of a group compile different graphs, by what they have
        published."""
        said = {word.outline for word in self.heard[key].values() if not word.failure}
        said |= {note.outline for note in self.alone[key].values() if not note.failure}
        return bool(self.left[key]) or len(said | {self.parts[key].outline}) > 1

    def several_graphs(self) -> bool:
        """Return whether the ranks of any group compile different graphs, by what they have
        published.

        Groups that this rank is not in count too, so that all ranks find the same.
        """
        said = (
            {w.outline for w in heard.values() if not w.failure} for heard in self.heard.values()
        )
        return any(len(outlines) > 1 for outlines in said)

    def other_policy(self, key: str) -> bool:
        """Return whether a rank changes nothing under another policy: it will not join this
        round."""
        return any(note.policy != self.speaker.digest for note in self.alone[key].values())

    def differing(self) -> str:
        """Return the first round whose ranks change something differently; "" if there is none."""
        for key in sorted(
            self.halls, key=lambda key: (key not in self.parts and "/pair/" not in key, key)
        ):
            if len({word.digest for word in self.heard[key].values()}) > 1:
                return key
        return ""
