"""Read and write the votes, notes and settings of ranks in torch.distributed's store.

The store outlives ``destroy_process_group``, and group names are used again. So each rank that
starts anew publishes a *hello* record with a fresh nonce, and writes all its keys under that nonce.
Its *epoch* is a digest of the hello records that it has read. A vote from an older run has another
epoch: the reader keeps waiting for the new vote.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch.distributed as dist

from commpass.distributed.environment import Settings, settings
from commpass.distributed.machine import card_here, host_id
from commpass.distributed.network import NetworkOfRank, network_here
from commpass.distributed.origin import forget_calls
from commpass.groups import ready
from commpass.lowering.exchange import PeerMemory

log = logging.getLogger("commpass")

ROOT = "commpass"
MOST_NOTES = 256
"""Most notes that one rank keeps in the store since its last round. No rank is further ahead."""


@dataclass(frozen=True)
class Participant:
    """The policy and profile under which a rank decides: a digest, equal on equal ones, and a name.

    ``backend`` distinguishes the backends of this process, and what was compiled before a reset of
    Dynamo. ``function`` is the code that the graph was compiled from. ``call`` is the call for
    which the graph is compiled: equal on all ranks, "" if it is unknown.
    """

    digest: str
    name: str
    backend: str = ""
    function: str = ""
    call: str = ""

    @property
    def scope(self) -> str:
        """The key of what was agreed on for the same code under the same backend."""
        return f"{self.backend}/{self.function}"


RoundId = tuple[str, int]
"""The key of a part, and the number of a round about it."""


@dataclass(frozen=True)
class Vote:
    """What a rank publishes in a round about its part of a graph.

    - ``digest``: of what it changes; "" for nothing, where something was agreed on before.
    - ``outline``: digest of the collectives before any change.
    - ``policy``: digest of policy and profile; ``policy_name`` is the policy's name.
    - ``failure``: why nothing is changed, if the policy did not request that.
    - ``rounds``: the number and the ranks of each round that the same graph waits for.
    - ``follows``: the rank drops its changes because others do.
    - ``gave_up``: the rank timed out and raised.
    - ``other_rounds``: the rounds, under another policy, in which it has read the votes of other
      ranks.
    - ``hidden``: it skips sites that its own compute overlaps, and would proceed without that.
    - ``uses_local_part``: it does not send what only this rank would not use, and would proceed
      without that too.
    - ``call``: the call for which it compiles; ``repeats``: how often it had noted this graph
      before.
    - ``reused``: the rank did not wait, since this was agreed on before.
    """

    digest: str = ""
    outline: str = ""
    policy: str = ""
    policy_name: str = ""
    epoch: str = ""
    failure: str = ""
    rounds: dict[str, tuple[int, str]] = field(default_factory=dict)
    follows: bool = False
    gave_up: bool = False
    other_rounds: dict[int, RoundId] = field(default_factory=dict)
    hidden: bool = False
    uses_local_part: bool = False
    call: str = ""
    repeats: int = 0
    reused: bool = False


@dataclass(frozen=True)
class Link:
    """A group in which a rank reuses a plan: the number of its rounds so far, its ranks, and the
    call for which the rank compiles there."""

    count: int
    ranks: str
    call: str


@dataclass(frozen=True)
class NoChange:
    """The note that a rank which changes nothing of a graph publishes before it proceeds.

    It holds the outline of the rank's part, its sites (ANY if they are unknown), the policy, and
    the reason if planning failed. ``times`` is how often the rank has noted this outline since its
    last round. ``call`` is the call for which it compiles, "" if others cannot identify it;
    ``repeats`` is how often it has noted this outline for that call.

    A rank that reuses a plan of this ``digest``, which was agreed on before, publishes one as well.
    ``waits``: it compares the plan with the others' if they compile that graph too. ``links`` are
    the groups in which it reuses a plan for the same graph.
    """

    times: int
    outline: str
    sites: tuple[str, ...]
    policy: str
    policy_name: str
    failure: str
    call: str = ""
    repeats: int = 0
    digest: str = ""
    waits: bool = False
    links: dict[str, Link] = field(default_factory=dict)

    @property
    def graph(self) -> str:
        """The graph, as far as other ranks can identify it, and whether a plan is reused."""
        return f"{self.call}/{self.outline}{REUSED * bool(self.digest)}"

    def concerns(self, call: str, outline: str) -> bool:
        """Return whether the note is about the graph that another rank compiles for this call.

        If the call is unknown, return whether the graphs have the same collectives.
        """
        return self.call == call if call else not self.call and self.outline == outline


REUSED = "/reused"


@dataclass(frozen=True)
class NoChanges:
    """The notes of a rank since its round number ``count`` in a group."""

    count: int
    notes: tuple[NoChange, ...]


@dataclass(frozen=True)
class LatestEntry:
    """What a rank published last in a group, under any policy: a note, or a vote and its round."""

    note: NoChange | None = None
    vote: Vote | None = None
    round_id: RoundId = ("", 0)

    @property
    def policy(self) -> str:
        """The digest of policy and profile."""
        entry = self.note or self.vote
        return entry.policy if entry is not None else ""


@dataclass(frozen=True)
class Round:
    """A comparison of plans that ended well: a name that all of its ``ranks`` (global) share.

    ``has_reuse`` says whether a rank reuses an earlier plan, and has not waited for the others.
    """

    name: str
    ranks: tuple[int, ...]
    has_reuse: bool = False


ANY = "*"


@dataclass
class History:
    """What one group, or pair of ranks, has agreed on, as one of its ranks knows it.

    - ``count``: the number of its rounds.
    - ``outline_counts``: how often each outline was noted since the last round, by this rank or by
      one whose notes it adopted; ``repeats``: how often each graph was.
    - ``notes``: this rank's own notes.
    - ``agreed_digests`` and ``agreed_decisions``: the digests, and the decision for each site, by
      backend and by backend and code. So a rank that compiles again alone knows which decisions
      the others keep.
    - ``departure_reason``: why its ranks change nothing any more; "" while they do.
    """

    group: weakref.ref[Any]
    count: int = 0
    outline_counts: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    agreed_digests: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    agreed_decisions: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    notes: dict[str, NoChange] = field(default_factory=dict)
    departure_reason: str = ""

    def agree(self, participant: Participant, digest: str, decisions: dict[str, str]) -> None:
        """Record what was agreed on, for the backend and for the code."""
        for scope in (participant.backend, participant.scope):
            if digest:
                self.agreed_digests[scope].add(digest)
            self.agreed_decisions[scope].update(decisions)

    def is_past(self, vote: Vote) -> bool:
        """Return whether a vote is about a graph that this rank has noted since.

        The round of that graph was not counted, so the next one has the same number.
        """
        return bool(vote.call) and self.note_count(vote.call, vote.outline) > vote.repeats

    def note_count(self, call: str, outline: str) -> int:
        """Return how often this rank has noted a graph since the last round."""
        graph = f"{call}/{outline}"
        return self.repeats.get(graph, 0) + self.repeats.get(graph + REUSED, 0)

    def adopt_notes(self, notes: Iterable[NoChange]) -> None:
        """Adopt the notes of other ranks as if they were this rank's."""
        for note in notes:
            self.repeats[note.graph] = note.repeats
            if not note.digest:
                self.outline_counts[note.outline] = note.times

    def clear_notes(self) -> None:
        self.outline_counts.clear()
        self.repeats.clear()
        self.notes.clear()


@dataclass
class PlanStore:
    """The store as one rank of one run writes and reads it.

    ``old_nonces`` are nonces of older runs. ``published_policies`` are the policies under which
    this rank has published anything, by group. ``settings`` are the published settings of ranks;
    ``warned_of_settings`` records that not all ranks published theirs in time. ``ranks_per_host``
    is None until it was determined (``hosts``). So are ``network``, which is kept as text
    (``agreed_network``), and ``capacity`` (``agreed_profile``). ``peer_memory`` is that of groups
    that were asked for, by their ranks (``peers``).
    """

    world: weakref.ref[Any]
    rank: int
    nonce: str
    old_nonces: frozenset[str] = frozenset()
    histories: dict[str, History] = field(default_factory=dict)
    read_nonces: set[str] = field(default_factory=set)
    plans: dict[str, str] = field(default_factory=dict)
    published_policies: dict[str, set[str]] = field(default_factory=dict)
    settings: dict[int, Settings] = field(default_factory=dict)
    warned_of_settings: bool = False
    ranks_per_host: int | None = None
    network: str | None = None
    capacity: str | None = None
    peer_memory: dict[tuple[int, ...], PeerMemory] = field(default_factory=dict)

    @property
    def torch_store(self) -> Any:
        """Looked up each time: holding torch's store would keep its server alive, with all its
        keys."""
        return dist.distributed_c10d._get_default_store()

    def history(self, key: str, group: Any) -> History:
        """Return the history of a group, or of a pair of ranks in it, by a name that all its ranks
        share."""
        found = self.histories.get(key)
        if found is None or found.group() is not group:
            # A group of the same name and ranks continues the count: its old votes are still
            # stored.
            before = (found.count, found.outline_counts, found.repeats) if found else ()
            found = self.histories[key] = History(weakref.ref(group), *before)
        return found

    # --- writing ---

    def publish_vote(self, key: str, number: int, vote: Vote) -> None:
        self.torch_store.set(_store_key(self.nonce, key, number), msgspec.json.encode(vote))

    def publish_latest(self, key: str, entry: LatestEntry) -> None:
        """Publish this rank's latest vote or note under its policy."""
        self.torch_store.set(_store_key(self.nonce, key, "now"), msgspec.json.encode(entry))

    def publish_note(self, location: str, key: str, history: History, note: NoChange) -> None:
        """Publish that nothing is changed of a graph, or that what was agreed on is reused."""
        repeats = history.repeats.get(note.graph, 0) + 1
        if not note.waits:
            history.repeats[note.graph] = repeats
        times = history.outline_counts.get(note.outline, 0) + (not note.digest)
        if not note.digest:
            history.outline_counts[note.outline] = times
        history.notes.pop(note.graph, None)  # the latest note comes last
        history.notes[note.graph] = dataclasses.replace(note, times=times, repeats=repeats)
        for old in list(history.notes)[:-MOST_NOTES]:
            del history.notes[old]
        self._write_notes(key, history)
        if not note.digest:
            self.publish_latest(location, LatestEntry(note=history.notes[note.graph]))

    def _write_notes(self, key: str, history: History) -> None:
        notes = NoChanges(history.count, tuple(history.notes.values()))
        self.torch_store.set(_store_key(self.nonce, key, "notes"), msgspec.json.encode(notes))

    def publish_departure(self, key: str, reason: str) -> None:
        """Publish that this rank changes nothing any more in a group."""
        self.torch_store.set(_store_key(self.nonce, key, "apart"), reason)

    def publish_errors(self, round: str, call: int | str, text: bytes) -> None:
        """Publish what this rank measured on a call of the graph whose plan a round compared.

        If ``call`` is ``budget.LEFT``, it publishes that this rank measures no more.
        """
        self.torch_store.set(_store_key(self.nonce, f"errors/{round}", call), text)

    def publish_plan(self, key: str, number: int, plan: str) -> None:
        """Publish a plan for ranks that planned something else."""
        name = _store_key(self.nonce, key, f"{number}/plan")
        if self.plans.get(name) != plan:  # an uncounted round may have used it
            self.plans[name] = plan
            self.torch_store.set(name, plan)

    def publish(self, key: str, value: bytes) -> None:
        """Publish a value of this rank."""
        self.torch_store.set(_store_key(self.nonce, key, "all"), value)

    # --- reading ---

    def nonces(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the nonces of those ranks that have published a hello record in this run."""
        read = self.read({rank: f"{ROOT}/hello/{rank}" for rank in ranks})
        found = {rank: raw.decode() for rank, raw in read.items()}
        self.read_nonces.update(set(found.values()) - self.old_nonces)
        return {rank: nonce for rank, nonce in found.items() if nonce not in self.old_nonces}

    def read_settings(self) -> bool:
        """Read the published settings of ranks. Return whether all have published theirs."""
        missing = [rank for rank in range(dist.get_world_size()) if rank not in self.settings]
        if not missing:
            return True
        nonces = self.nonces(missing)
        keys = {rank: _store_key(nonce, "settings", "all") for rank, nonce in nonces.items()}
        for rank, raw in self.read(keys).items():
            self.settings[rank] = msgspec.json.decode(raw, type=Settings)
        return len(self.settings) == dist.get_world_size()

    def host_ids(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the hosts of those ranks that have published a hello record."""
        nonces = self.nonces(ranks)
        keys = {rank: _store_key(nonce, "place", "all") for rank, nonce in nonces.items()}
        return {rank: raw.decode() for rank, raw in self.read(keys).items()}

    def networks(self, ranks: Sequence[int]) -> dict[int, NetworkOfRank]:
        """Return the hosts and interfaces of those ranks that have published a hello record."""
        read = self.read_published("network-of-rank", ranks)
        return {rank: msgspec.json.decode(raw, type=NetworkOfRank) for rank, raw in read.items()}

    def read_published(self, key: str, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return what those ranks have published under a key, as far as they have."""
        nonces = self.nonces(ranks)
        return self.read({rank: _store_key(nonce, key, "all") for rank, nonce in nonces.items()})

    def agree_on_first(self, key: str, value: str, owner: int = 0) -> str:
        """Return the value that any rank was first to set for a key; it counts for all.

        The rank ``owner``, equal on all of them, must have published its hello record.
        """
        first = self.nonces([owner])[owner]
        chosen: bytes = self.torch_store.compare_set(_store_key(first, key, "all"), "", value)
        return chosen.decode()

    def votes(self, nonces: dict[int, str], key: str, number: int) -> dict[int, Vote]:
        """Return the votes of ranks in a round; ``nonces`` are theirs."""
        read = self.read({rank: _store_key(nonce, key, number) for rank, nonce in nonces.items()})
        return {rank: msgspec.json.decode(raw, type=Vote) for rank, raw in read.items()}

    def notes(self, nonces: dict[int, str], key: str) -> dict[int, NoChanges]:
        """Return the notes of ranks; ``nonces`` are theirs."""
        read = self.read({rank: _store_key(nonce, key, "notes") for rank, nonce in nonces.items()})
        return {rank: msgspec.json.decode(raw, type=NoChanges) for rank, raw in read.items()}

    def latest_entries(self, nonces: dict[int, str], location: str) -> dict[int, LatestEntry]:
        """Return the latest entries of ranks in a group; ``nonces`` are theirs."""
        read = self.read(
            {rank: _store_key(nonce, location, "now") for rank, nonce in nonces.items()}
        )
        return {rank: msgspec.json.decode(raw, type=LatestEntry) for rank, raw in read.items()}

    def errors(self, ranks: Sequence[int], round: str, call: int | str) -> dict[int, bytes]:
        """Return what those of these ranks measured that have published it."""
        nonces = self.nonces(ranks)
        return self.read(
            {rank: _store_key(nonce, f"errors/{round}", call) for rank, nonce in nonces.items()}
        )

    def departures(self, nonces: dict[int, str], key: str) -> dict[int, str]:
        """Return the ranks that have left a group, with their reasons."""
        read = self.read({rank: _store_key(nonce, key, "apart") for rank, nonce in nonces.items()})
        return {rank: raw.decode() for rank, raw in read.items()}

    def plan(self, nonce: str, key: str, number: int) -> bytes | None:
        name = _store_key(nonce, key, f"{number}/plan")
        return self.torch_store.get(name) if self.torch_store.check([name]) else None

    def read(self, keys: dict[int, str]) -> dict[int, bytes]:
        """Return the values of those keys that exist: in one query if all do, else by bisection."""
        if not keys:
            return {}
        store, found = self.torch_store, list(keys.values())
        if store.check(found):
            return dict(zip(keys, store.multi_get(found), strict=True))
        if len(keys) == 1:
            return {}
        rows, half = list(keys.items()), len(keys) // 2
        return self.read(dict(rows[:half])) | self.read(dict(rows[half:]))


_stores: list[PlanStore] = []
"""The plan store in use: one, or none yet."""


def current_store() -> PlanStore:
    """Return the plan store of the current process groups; a fresh one if they were made anew."""
    if not _stores or _stores[-1].world() is not dist.group.WORLD:
        open_store()
    return _stores[-1]


def open_store() -> None:
    """Publish a hello record, as a new process does: earlier votes and agreements no longer
    count."""
    world = dist.group.WORLD
    assert world is not None
    backends = dist.get_backend_config(world)
    card = card_here("cuda" if "nccl" in backends else "cpu")
    network = network_here(host_id(), backends, card)  # may raise: then no store is open
    old_nonces = frozenset().union(*(old.old_nonces | old.read_nonces for old in _stores))
    forget_calls()
    _stores[:] = [PlanStore(weakref.ref(world), dist.get_rank(), uuid.uuid4().hex[:12], old_nonces)]
    store = _stores[-1]
    own = store.settings[store.rank] = settings()
    # the hello record comes last: who reads it finds the others
    store.torch_store.set(_store_key(store.nonce, "settings", "all"), msgspec.json.encode(own))
    store.torch_store.set(_store_key(store.nonce, "place", "all"), host_id())
    store.publish("network-of-rank", msgspec.json.encode(network))
    store.torch_store.set(f"{ROOT}/hello/{store.rank}", store.nonce)


def epoch_of(nonces: Iterable[str]) -> str:
    """Return a digest of the nonces of all ranks of a group, in rank order."""
    return hashlib.sha256("/".join(nonces).encode()).hexdigest()[:16]


def _store_key(nonce: str, key: str, name: int | str) -> str:
    return f"{ROOT}/{nonce}/{key}/{name}"


def spans(ranks: Iterable[int]) -> str:
    """Return ``[0, 1, 2, 5]`` as ``0-2, 5``."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in found)


def from_spans(text: str) -> tuple[int, ...]:
    """The inverse of ``spans``."""
    ends = [[int(end) for end in span.split("-")] for span in text.split(", ")]
    return tuple(rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1))


def publish_hello() -> None:
    """Publish the hello record early, if there are process groups, so that no rank reads an older
    one."""
    if ready() and "fake" not in dist.get_backend(dist.group.WORLD):
        try:
            current_store()
        except RuntimeError as error:  # a rank that has to compare plans reports it
            log.debug("commpass could not reach the store: %s", error)
