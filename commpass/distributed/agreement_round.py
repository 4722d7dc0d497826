"""Compare the plans of one graph among ranks: publish votes and poll the store until they
decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

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
    epoch_of,
    from_spans,
    spans,
)
from commpass.plan import NONE, Plan


class AgreementRound:
    """One comparison of a graph's plan by all ranks that its groups connect.

    ``groups_in_round`` maps the key of each connected group to the number of its round and its
    ranks. It includes groups that this rank is not in; ``own_groups`` does not.
    """

    def __init__(
        self,
        store: PlanStore,
        waiting: list[Part],
        histories: dict[str, History],
        plan: Plan,
        participant: Participant,
        timeout_s: float,
    ):
        self.store, self.plan, self.participant = store, plan, participant
        self.timeout_s = timeout_s
        self.parts = {part.key: part for part in waiting}
        self.histories = histories
        self.dissenting = [part for part in waiting if not part.changed and not part.hidden_sites]
        for part in waiting:
            histories[part.key].count += 1
        self.groups_in_round = {
            part.key: (histories[part.key].count, part.ranks) for part in waiting
        }
        self.own_groups = dict(self.groups_in_round)
        self.nonces: dict[int, str] = {store.rank: store.nonce}
        self.votes: dict[str, dict[int, Vote]] = {key: {} for key in self.groups_in_round}
        self.no_changes: dict[str, dict[int, NoChange]] = {key: {} for key in self.groups_in_round}
        self.departures: dict[str, dict[int, str]] = {key: {} for key in self.groups_in_round}
        self.reuse_notes: dict[str, dict[int, NoChange]] = {key: {} for key in self.groups_in_round}
        self.conflicts: set[str] = set()
        self.published_epochs: dict[str, str] = {}

    def publish(self) -> None:
        """Publish what this rank planned. Publish again after it reads further hello records."""
        rounds = {key: (number, spans(ranks)) for key, (number, ranks) in self.own_groups.items()}
        for key, part in self.parts.items():
            epoch = self._epoch(key)
            if self.published_epochs.get(key) == epoch:
                continue
            if self.published_epochs.get(key):  # those votes may come from an older run
                self.votes[key].clear()
            self.published_epochs[key] = epoch
            before = self.votes[key].get(self.store.rank, Vote())
            vote = dataclasses.replace(
                self.vote_for(part),
                digest=part.digest,
                rounds=rounds,
                other_rounds=before.other_rounds,
                hidden=part.hidden_sites,
                uses_local_part=part.uses_local_part,
            )
            self.store.publish_vote(key, self.own_groups[key][0], vote)
            self.store.publish_latest(
                part.where, LatestEntry(vote=vote, round_id=(key, self.own_groups[key][0]))
            )
            self.votes[key][self.store.rank] = vote

    def vote_for(self, part: Part) -> Vote:
        """Return this rank's vote on a part if it changes nothing there."""
        call = call_of(part, self.participant)
        return Vote(
            outline=part.outline,
            policy=self.participant.digest,
            policy_name=self.participant.name,
            epoch=self.published_epochs[part.key],
            failure=part.failure,
            call=call,
            repeats=self.histories[part.key].note_count(call, part.outline),
        )

    def _epoch(self, key: str) -> str:
        ranks = self.groups_in_round[key][1]
        known = [self.nonces[rank] for rank in ranks if rank in self.nonces]
        return epoch_of(known) if len(known) == len(ranks) else ""

    def poll(self) -> None:
        """Read all published votes and notes, also those of the rounds that votes name."""
        for key in list(self.groups_in_round):
            number = self.groups_in_round[key][0]
            missing = self.absent_ranks(key)
            if not missing:
                continue
            self.nonces |= self.store.nonces([rank for rank in missing if rank != self.store.rank])
            epoch = self._epoch(key)
            nonces = {rank: self.nonces[rank] for rank in missing if rank in self.nonces}
            # first, since a rank that proceeds has written its vote or note
            other_entries = self._other_policy_entries(key, nonces)
            notes = self.store.notes(nonces, key)
            if key in self.parts:
                for rank, its in notes.items():
                    for note in self._relevant_notes(key, its):
                        self.no_changes[key][rank] = note
            for rank, vote in self.store.votes(nonces, key, number).items():
                if vote.rounds and (not epoch or vote.epoch != epoch):
                    continue  # from an older run, or without all hello records
                if key in self.parts and self.histories[key].is_past(vote):
                    continue
                self.votes[key][rank] = vote
                for other, (count, members) in vote.rounds.items():
                    known = self.groups_in_round.setdefault(other, (count, from_spans(members)))
                    self.votes.setdefault(other, {})
                    self.departures.setdefault(other, {})
                    self.no_changes.setdefault(other, {})
                    self.reuse_notes.setdefault(other, {})
                    self.conflicts |= {other} if known[0] != count else set()
            absent = {rank: nonces[rank] for rank in self.absent_ranks(key) if rank in nonces}
            self.departures[key] |= self.store.departures(absent, key)
            self._adopt_entries(key, other_entries, epoch)
            for rank in self.absent_ranks(key):
                if rank in notes and (found := self._find_reuse(key, notes[rank])):
                    self._count_reuse(key, rank, found)
        self._reread_votes()

    def _count_reuse(self, key: str, rank: int, note: NoChange) -> None:
        """Count the note of a rank that reuses an agreed plan as its vote."""
        self.reuse_notes[key][rank] = note
        digest = "" if note.digest == NONE else note.digest
        self.votes[key][rank] = Vote(
            digest, note.outline, note.policy, note.policy_name, reused=True
        )

    def _find_reuse(self, key: str, notes: NoChanges) -> NoChange | None:
        """Return the note of a rank that reuses a plan for this very call and does not wait."""
        part = self.parts.get(key)
        calls = {vote.call for vote in self.votes[key].values() if vote.call}
        if part is not None:
            calls = {call_of(part, self.participant)}
        repeats = self.histories[key].repeats if part is not None else {}
        return next(
            (
                note
                for note in notes.notes
                if note.digest
                and not note.waits
                and notes.count == self.groups_in_round[key][0] - 1
                and note.repeats > repeats.get(note.graph, 0)
                and any(note.concerns(call, part.outline if part else "") for call in calls)
            ),
            None,
        )

    def contradicting_ranks(self) -> dict[str, list[int]]:
        """Return, by round, the ranks that reuse an agreed plan where another rank planned
        otherwise."""
        found = {}
        for key, votes in self.votes.items():
            digests = {vote.digest for vote in votes.values() if not vote.follows}
            reusing = [rank for rank in self.reuse_notes[key] if votes[rank].digest]
            if reusing and len(digests) > 1:
                found[key] = reusing
        return found

    def _other_policy_entries(self, key: str, nonces: dict[int, str]) -> dict[int, LatestEntry]:
        """Return the latest entries of ranks under a policy that this rank never used there.

        Such a rank will not join this round. Entries that were compared with this rank's current
        vote are returned too.
        """
        if key not in self.parts:
            return {}
        where = self.parts[key].where
        own_policies = self.store.published_policies[where]
        entries = self.store.latest_entries(nonces, where)
        round_id = (key, self.own_groups[key][0])
        return {
            rank: entry
            for rank, entry in entries.items()
            if entry.policy not in own_policies
            or (entry.vote and entry.vote.other_rounds.get(self.store.rank) == round_id)
        }

    def _adopt_entries(self, key: str, entries: dict[int, LatestEntry], epoch: str) -> None:
        """Adopt entries from under another policy, and publish where they are for ranks that lack
        them."""
        other_rounds = {}
        for rank, entry in entries.items():
            if rank not in self.absent_ranks(key):
                continue
            if entry.note is not None:
                self.no_changes[key][rank] = entry.note
            elif entry.vote is not None and epoch and entry.vote.epoch == epoch:
                self.votes[key][rank] = entry.vote
                other_rounds[rank] = entry.round_id
        if other_rounds:
            vote = self.votes[key][self.store.rank]
            vote = dataclasses.replace(vote, other_rounds=vote.other_rounds | other_rounds)
            self.votes[key][self.store.rank] = vote
            self.store.publish_vote(key, self.own_groups[key][0], vote)
            self.store.publish_latest(
                self.parts[key].where,
                LatestEntry(vote=vote, round_id=(key, self.own_groups[key][0])),
            )

    def _reread_votes(self) -> None:
        """Read the votes again that led to a round which this rank is not in, while votes are
        missing there.

        Those ranks may have found by now that they need not wait for the missing ones.
        """
        incomplete = {
            key for key in self.groups_in_round if key not in self.parts and self.absent_ranks(key)
        }
        for key, votes in self.votes.items():
            leading = [rank for rank, vote in votes.items() if incomplete & set(vote.rounds)]
            nonces = {rank: self.nonces[rank] for rank in leading}
            votes.update(self.store.votes(nonces, key, self.groups_in_round[key][0]))
            for vote in list(votes.values()):
                for rank in vote.other_rounds.keys() & set(self.absent_ranks(key)):
                    self.nonces |= self.store.nonces([rank])
                    votes.update(
                        self.store.votes({rank: self.nonces[rank]}, *vote.other_rounds[rank])
                    )

    def _relevant_notes(self, key: str, notes: NoChanges) -> list[NoChange]:
        """Return the notes since the last round that concern sites of this rank's graph.

        A note that this rank has published too is left out: it was about another graph.
        """
        part, history = self.parts[key], self.histories[key]
        call = call_of(part, self.participant)

        def is_about(note: NoChange) -> bool:
            return any(
                site == ANY or may_match(site, each) for site in note.sites for each in part.sites
            )

        def is_fresh(note: NoChange) -> bool:
            if note.call and note.call == call:
                return note.repeats > history.repeats.get(note.graph, 0)
            return note.times > history.outline_counts.get(note.outline, 0)

        if notes.count != self.groups_in_round[key][0] - 1:
            return []
        return [
            note for note in notes.notes if not note.digest and is_about(note) and is_fresh(note)
        ]

    def round(self) -> Round:
        """Return the round, under a name that all compared ranks share, with those ranks."""
        ranks = {rank for _, members in self.groups_in_round.values() for rank in members}
        key = min(self.groups_in_round)
        name = f"{key}/{self.groups_in_round[key][0]}"
        return Round(name, tuple(sorted(ranks)), any(self.reuse_notes.values()))

    def absent_ranks(self, key: str) -> list[int]:
        """Return the ranks of a round that have published nothing yet."""
        present = self.votes[key].keys() | self.departures[key].keys() | self.no_changes[key].keys()
        return [rank for rank in self.groups_in_round[key][1] if rank not in present]

    def is_decided(self) -> bool:
        """Return whether all ranks have voted, or enough of them.

        One rank that changes nothing keeps all ranks from changing anything. But a rank that would
        not apply what was agreed on before must first know that all other ranks do the same.
        """
        if any(vote.gave_up for vote in self._every_vote()) or self.contradicting_ranks():
            return True
        if self.is_unchanged() and not self.dissenting:
            return True
        return not any(self.absent_ranks(key) for key in self.groups_in_round)

    def has_absent_rank(self) -> bool:
        """Return whether a rank changes nothing and has not waited for the others."""
        return any(self.departures.values()) or any(self.no_changes.values())

    def is_unchanged(self) -> bool:
        """Return whether no rank can change anything, whatever the missing votes are."""
        nothing = any(not vote.digest and not vote.hidden for vote in self._every_vote())
        return bool(self.conflicts) or self.has_absent_rank() or nothing

    def _every_vote(self) -> Iterator[Vote]:
        return (vote for votes in self.votes.values() for vote in votes.values())

    def has_hidden_sites(self) -> bool:
        """Return whether a rank leaves sites uncompressed because its own compute overlaps them."""
        return any(vote.hidden for vote in self._every_vote())

    def uses_local_part(self) -> bool:
        """Return whether some ranks of a group do not send what others send, since they use only
        their own part."""
        return any(
            len({vote.uses_local_part for vote in votes.values()}) > 1
            for votes in self.votes.values()
        )

    def has_other_graph(self, key: str) -> bool:
        """Return whether the ranks of a group compile different graphs, by what they have
        published."""
        outlines = {vote.outline for vote in self.votes[key].values() if not vote.failure}
        outlines |= {note.outline for note in self.no_changes[key].values() if not note.failure}
        return bool(self.departures[key]) or len(outlines | {self.parts[key].outline}) > 1

    def has_several_graphs(self) -> bool:
        """Return whether the ranks of any group compile different graphs, by what they have
        published.

        Groups that this rank is not in count too, so that all ranks find the same.
        """
        outlines_by_group = (
            {vote.outline for vote in votes.values() if not vote.failure}
            for votes in self.votes.values()
        )
        return any(len(outlines) > 1 for outlines in outlines_by_group)

    def has_other_policy(self, key: str) -> bool:
        """Return whether a rank changes nothing under another policy: it will not join this
        round."""
        return any(note.policy != self.participant.digest for note in self.no_changes[key].values())

    def differing_group(self) -> str:
        """Return the first round whose ranks change something differently; "" if there is none."""
        for key in sorted(
            self.groups_in_round,
            key=lambda key: (key not in self.parts and "/pair/" not in key, key),
        ):
            if len({vote.digest for vote in self.votes[key].values()}) > 1:
                return key
        return ""
