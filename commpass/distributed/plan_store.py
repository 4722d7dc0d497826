"""What ranks say to each other through the store: words that are there at once, and that no other
run is mistaken for.

Torch's store outlives ``destroy_process_group``, and group names are used again. So every rank that
has begun anew says *hello* with a number that nobody had before, and all that it writes stands
under that number. Its *epoch* is what a rank knows of the others' hellos: a word that was written
for an older run has another one, and is waited for rather than read.
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
from commpass.distributed.machine import place
from commpass.distributed.origin import forget_calls
from commpass.groups import ready

log = logging.getLogger("commpass")

ROOT = "commpass"
MOST_NOTES = 256
"""Notes of one rank that stand on the board since its last meeting. No rank is further ahead."""


@dataclass(frozen=True)
class Participant:
    """Under which policy and profile a rank decides: a digest that equal ones share, and a name.
    ``backend`` tells backends of this process apart, and what was compiled before a reset of
    Dynamo; ``function`` the code that the graph was compiled from; ``call`` the call of it for
    which it is compiled, equal on all ranks, "" where that is not known."""

    digest: str
    name: str
    backend: str = ""
    function: str = ""
    call: str = ""

    @property
    def scope(self) -> str:
        """What was agreed on for the same code under the same backend."""
        return f"{self.backend}/{self.function}"


@dataclass(frozen=True)
class Vote:
    """What a rank says at a meeting of its part of a graph, in which it changes something.

    ``digest`` is that of what it changes, "" for nothing (where something was agreed on before);
    ``outline`` that of the collectives as they came; ``policy`` that of policy and profile.
    ``failure`` says why nothing is changed, where that was not the policy's wish. ``meets`` are the
    number and the ranks of each meeting that the same graph waits for. ``follows``: it leaves alone
    what it had to change, since others do. ``gave_up``: it waited in vain, and raised.
    ``elsewhere`` are the meetings, of another policy, at which it has heard other ranks.
    ``hidden``: it leaves sites alone that hide behind what it computes itself, and would go on
    without that. ``own``: likewise, it does not send what only this rank would not use.
    ``call`` is the call for which it compiles, ``repeats`` how often it had noted this graph
    before. ``reused``: the rank did not wait, since this was agreed on before.
    """

    digest: str = ""
    outline: str = ""
    policy: str = ""
    policy_name: str = ""
    epoch: str = ""
    failure: str = ""
    meets: dict[str, tuple[int, str]] = field(default_factory=dict)
    follows: bool = False
    gave_up: bool = False
    elsewhere: dict[int, tuple[str, int]] = field(default_factory=dict)
    hidden: bool = False
    own: bool = False
    call: str = ""
    repeats: int = 0
    reused: bool = False


@dataclass(frozen=True)
class Link:
    """A group in which a rank reuses a plan: the number of its meetings so far, its ranks, and the
    call for which the rank compiles there."""

    count: int
    ranks: str
    call: str


@dataclass(frozen=True)
class NoChange:
    """What a rank that changes nothing of a graph leaves on the board before it goes on: the
    outline of its part, which sites those are (ANY if that is not known), policy, and why if it
    failed. ``times`` is how often it has noted this outline since its last meeting. ``call`` is the
    call for which it compiles, "" where others cannot tell that, and ``repeats`` how often it has
    noted this outline for that call.

    A rank that reuses a plan of this ``digest``, which was agreed on before, leaves one as well.
    ``waits``: it compares the plan with the others' if they compile that graph too. ``links`` are
    the groups in which it reuses one for the same graph."""

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
        """Of which graph it is, as far as other ranks can tell, and whether a plan is reused."""
        return f"{self.call}/{self.outline}{REUSED * bool(self.digest)}"

    def concerns(self, call: str, outline: str) -> bool:
        """Whether it is of the graph that another rank compiles for this call, or, where the call
        is not known, of one with the same collectives."""
        return self.call == call if call else not self.call and self.outline == outline


REUSED = "/reused"


@dataclass(frozen=True)
class NoChanges:
    """The notes of a rank since its meeting number ``count`` in a group."""

    count: int
    notes: tuple[NoChange, ...]


@dataclass(frozen=True)
class LatestEntry:
    """What a rank has said last in a group, under whichever policy: a note, or a word and where."""

    note: NoChange | None = None
    word: Vote | None = None
    place: tuple[str, int] = ("", 0)

    @property
    def policy(self) -> str:
        """The digest of policy and profile."""
        said = self.note or self.word
        return said.policy if said is not None else ""


@dataclass(frozen=True)
class Round:
    """A comparison of plans that ended well: a name that all of its ``ranks`` (global) have for
    it."""

    name: str
    ranks: tuple[int, ...]


ANY = "*"


@dataclass
class History:
    """What one group, or pair of ranks, has agreed on, as one of its ranks knows it.

    ``count`` is the number of its meetings; ``noted`` how often each outline was noted since the
    last, by this rank or by one that it heeded, and ``repeats`` how often each graph was; ``notes``
    are this rank's. ``agreed`` and ``known``
    are the digests and what was decided of each site, by backend, and by backend and code, so that
    a rank which compiles again alone knows what the others go on with. ``departed`` says why its
    ranks change nothing any more.
    """

    group: weakref.ref[Any]
    count: int = 0
    noted: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    agreed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    known: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    notes: dict[str, NoChange] = field(default_factory=dict)
    apart: str = ""

    def agree(self, participant: Participant, digest: str, decisions: dict[str, str]) -> None:
        """Records what was agreed on, for the backend and for the code."""
        for scope in (participant.backend, participant.scope):
            if digest:
                self.agreed[scope].add(digest)
            self.known[scope].update(decisions)

    def is_past(self, vote: Vote) -> bool:
        """Whether a word is of a graph that this rank has noted since: its meeting was not counted,
        and the next one has the same number."""
        return bool(vote.call) and self.times_noted(vote.call, vote.outline) > vote.repeats

    def times_noted(self, call: str, outline: str) -> int:
        """How often this rank has noted a graph since the last meeting."""
        graph = f"{call}/{outline}"
        return self.repeats.get(graph, 0) + self.repeats.get(graph + REUSED, 0)

    def heed(self, notes: Iterable[NoChange]) -> None:
        """Takes the notes of other ranks as if they were this one's."""
        for note in notes:
            self.repeats[note.graph] = note.repeats
            if not note.digest:
                self.noted[note.outline] = note.times

    def forget_notes(self) -> None:
        self.noted.clear()
        self.repeats.clear()
        self.notes.clear()


@dataclass
class PlanStore:
    """The store, as one rank of one run writes and reads it. ``older`` are hellos of older runs,
    ``spoken`` the policies under which this rank has said anything in a group, ``settings`` what
    ranks have said of their environment, and ``settings_said`` that not all have in time. ``node``
    is how many ranks there are on each host, once that was asked (``hosts``)."""

    world: weakref.ref[Any]
    rank: int
    nonce: str
    older: frozenset[str] = frozenset()
    histories: dict[str, History] = field(default_factory=dict)
    read_nonces: set[str] = field(default_factory=set)
    plans: dict[str, str] = field(default_factory=dict)
    spoken: dict[str, set[str]] = field(default_factory=dict)
    settings: dict[int, Settings] = field(default_factory=dict)
    settings_said: bool = False
    node: int | None = None

    @property
    def store(self) -> Any:
        """Asked for each time: who keeps torch's store keeps a server alive, with what is on it."""
        return dist.distributed_c10d._get_default_store()

    def history(self, key: str, group: Any) -> History:
        """Of a group, or a pair of ranks in it, by a name that all its ranks have for it."""
        found = self.histories.get(key)
        if found is None or found.group() is not group:
            # A group of the same name and ranks goes on counting: its old words are still there.
            before = (found.count, found.noted, found.repeats) if found else ()
            found = self.histories[key] = History(weakref.ref(group), *before)
        return found

    # --- writing ---

    def publish_vote(self, key: str, number: int, vote: Vote) -> None:
        self.store.set(_place(self.nonce, key, number), msgspec.json.encode(vote))

    def publish_latest(self, key: str, entry: LatestEntry) -> None:
        """Says under which policy this rank has got where."""
        self.store.set(_place(self.nonce, key, "now"), msgspec.json.encode(entry))

    def note(self, location: str, key: str, past: History, note: NoChange) -> None:
        """Says that nothing is changed of a graph, or that what was agreed on is reused."""
        repeats = past.repeats.get(note.graph, 0) + 1
        if not note.waits:
            past.repeats[note.graph] = repeats
        times = past.noted.get(note.outline, 0) + (not note.digest)
        if not note.digest:
            past.noted[note.outline] = times
        past.notes.pop(note.graph, None)  # the latest is the last
        past.notes[note.graph] = dataclasses.replace(note, times=times, repeats=repeats)
        for old in list(past.notes)[:-MOST_NOTES]:
            del past.notes[old]
        self._write_notes(key, past)
        if not note.digest:
            self.publish_latest(location, LatestEntry(note=past.notes[note.graph]))

    def _write_notes(self, key: str, past: History) -> None:
        notes = NoChanges(past.count, tuple(past.notes.values()))
        self.store.set(_place(self.nonce, key, "notes"), msgspec.json.encode(notes))

    def leave(self, key: str, why: str) -> None:
        """Says that this rank changes nothing any more in a group."""
        self.store.set(_place(self.nonce, key, "apart"), why)

    def publish_errors(self, round: str, call: int | str, text: bytes) -> None:
        """Publishes what this rank measured on a call of the graph whose plan a round compared, or
        that it measures no more."""
        self.store.set(_place(self.nonce, f"errors/{round}", call), text)

    def show(self, key: str, number: int, plan: str) -> None:
        """Shows a plan to those who planned something else."""
        place = _place(self.nonce, key, f"{number}/plan")
        if self.plans.get(place) != plan:  # a meeting that was not counted gave it to another graph
            self.plans[place] = plan
            self.store.set(place, plan)

    # --- reading ---

    def nonces(self, ranks: Sequence[int]) -> dict[int, str]:
        """The hellos of those ranks that have said one, and not in an older run alone."""
        read = self.read({rank: f"{ROOT}/hello/{rank}" for rank in ranks})
        found = {rank: raw.decode() for rank, raw in read.items()}
        self.read_nonces.update(set(found.values()) - self.older)
        return {rank: nonce for rank, nonce in found.items() if nonce not in self.older}

    def hear_settings(self) -> bool:
        """Reads what ranks say of their environment. Returns whether all have."""
        unheard = [rank for rank in range(dist.get_world_size()) if rank not in self.settings]
        if not unheard:
            return True
        places = {
            rank: _place(nonce, "settings", "all") for rank, nonce in self.nonces(unheard).items()
        }
        for rank, raw in self.read(places).items():
            self.settings[rank] = msgspec.json.decode(raw, type=Settings)
        return len(self.settings) == dist.get_world_size()

    def places(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where ranks run: those of them that have said hello."""
        said = {rank: _place(one, "place", "all") for rank, one in self.nonces(ranks).items()}
        return {rank: raw.decode() for rank, raw in self.read(said).items()}

    def agree_on_first(self, key: str, value: str) -> str:
        """What the first rank gives for a key, which counts for all. Rank 0 has said hello."""
        first = self.nonces([0])[0]
        settled: bytes = self.store.compare_set(_place(first, key, "all"), "", value)
        return settled.decode()

    def votes(self, places: dict[int, str], key: str, number: int) -> dict[int, Vote]:
        """What ranks have said at a meeting, by their nonces: those that have."""
        read = self.read({rank: _place(nonce, key, number) for rank, nonce in places.items()})
        return {rank: msgspec.json.decode(raw, type=Vote) for rank, raw in read.items()}

    def notes(self, places: dict[int, str], key: str) -> dict[int, NoChanges]:
        """The notes of ranks, by their nonces: of those that have any."""
        read = self.read({rank: _place(nonce, key, "notes") for rank, nonce in places.items()})
        return {rank: msgspec.json.decode(raw, type=NoChanges) for rank, raw in read.items()}

    def last(self, places: dict[int, str], location: str) -> dict[int, LatestEntry]:
        """What ranks have said last in a group, by their nonces."""
        read = self.read({rank: _place(nonce, location, "now") for rank, nonce in places.items()})
        return {rank: msgspec.json.decode(raw, type=LatestEntry) for rank, raw in read.items()}

    def errors(self, ranks: Sequence[int], round: str, call: int | str) -> dict[int, bytes]:
        """What those of these ranks measured that have published it."""
        nonces = self.nonces(ranks)
        return self.read(
            {rank: _place(nonce, f"errors/{round}", call) for rank, nonce in nonces.items()}
        )

    def departed(self, places: dict[int, str], key: str) -> dict[int, str]:
        """The ranks that have left a group, with what they said."""
        read = self.read({rank: _place(nonce, key, "apart") for rank, nonce in places.items()})
        return {rank: raw.decode() for rank, raw in read.items()}

    def plan(self, nonce: str, key: str, number: int) -> bytes | None:
        place = _place(nonce, key, f"{number}/plan")
        return self.store.get(place) if self.store.check([place]) else None

    def read(self, keys: dict[int, str]) -> dict[int, bytes]:
        """What stands under those keys that are there. One question if all are; else by halves."""
        if not keys:
            return {}
        store, found = self.store, list(keys.values())
        if store.check(found):
            return dict(zip(keys, store.multi_get(found), strict=True))
        if len(keys) == 1:
            return {}
        rows, half = list(keys.items()), len(keys) // 2
        return self.read(dict(rows[:half])) | self.read(dict(rows[half:]))


_boards: list[PlanStore] = []


def board() -> PlanStore:
    """The board of the process groups that there are now; a fresh one where they were made anew."""
    if not _boards or _boards[-1].world() is not dist.group.WORLD:
        begin()
    return _boards[-1]


def begin() -> None:
    """Says hello, as a new process does: nothing that was said or agreed on before counts."""
    world = dist.group.WORLD
    assert world is not None
    older = frozenset().union(*(board.older | board.read_nonces for board in _boards))
    forget_calls()
    _boards[:] = [PlanStore(weakref.ref(world), dist.get_rank(), uuid.uuid4().hex[:12], older)]
    here = _boards[-1]
    here.settings[here.rank] = settings()
    said = msgspec.json.encode(here.settings[here.rank])
    here.store.set(_place(here.nonce, "settings", "all"), said)  # who reads the hello finds these
    here.store.set(_place(here.nonce, "place", "all"), place())
    here.store.set(f"{ROOT}/hello/{here.rank}", here.nonce)


def epoch(nonces: Iterable[str]) -> str:
    """One text for the hellos of all ranks of a group, in rank order."""
    return hashlib.sha256("/".join(nonces).encode()).hexdigest()[:16]


def _place(nonce: str, key: str, place: int | str) -> str:
    return f"{ROOT}/{nonce}/{key}/{place}"


def spans(ranks: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
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


def greet() -> None:
    """Says hello, where there are process groups: early, so that nobody reads an older one."""
    if ready() and "fake" not in dist.get_backend(dist.group.WORLD):
        try:
            board()
        except RuntimeError as error:  # whoever has to compare plans will say so
            log.debug("commpass could not reach the store: %s", error)
