"""Ranks that are late or missing, in random orders: all that get a value get the same one."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from commpass.distributed import first_value

RANKS = 3


class Schedule:
    """Let threads execute one step at a time, in a random order."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.arrived: list[int] = []
        self.turns = {rank: threading.Semaphore(0) for rank in range(RANKS)}
        self.changed = threading.Condition()

    def step(self, rank: int) -> None:
        self._arrive(rank)
        self.turns[rank].acquire()

    def end(self, rank: int) -> None:
        self._arrive(-1 - rank)

    def _arrive(self, entry: int) -> None:
        with self.changed:
            self.arrived.append(entry)
            self.changed.notify()

    def run(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.start()
        running, waiting = set(range(RANKS)), []
        while running:
            with self.changed:
                assert self.changed.wait_for(
                    lambda live=running: len(self.arrived) >= len(live) - len(waiting), timeout=30
                )
                for entry in self.arrived:
                    if entry < 0:
                        running.discard(-1 - entry)
                    else:
                        waiting.append(entry)
                self.arrived.clear()
            if waiting:
                chosen = self.random.choice(sorted(waiting))
                waiting.remove(chosen)
                self.turns[chosen].release()
        for thread in threads:
            thread.join(30)


@dataclass
class Store:
    """A plan store of one rank. Each access is a step; a rank exists for others after ``hello``."""

    rank: int
    schedule: Schedule
    values: dict = field(default_factory=dict)
    present: set = field(default_factory=set)

    def hello(self) -> None:
        self.schedule.step(self.rank)
        self.present.add(self.rank)

    def facts(self, ranks) -> dict[int, int]:
        self.schedule.step(self.rank)
        return {rank: rank for rank in ranks if rank in self.present}

    def publish(self, key: str, value: bytes) -> None:
        self.schedule.step(self.rank)
        self.values[self.rank, key] = value

    def read_published(self, key: str, ranks) -> dict[int, bytes]:
        self.schedule.step(self.rank)
        return {
            rank: self.values[rank, key]
            for rank in ranks
            if rank in self.present and (rank, key) in self.values
        }

    def agree_on_first(self, key: str, value: str) -> str:
        self.schedule.step(self.rank)
        assert 0 in self.present
        return self.values.setdefault((0, key), value.encode()).decode()


def values_of(seed: int) -> list[str]:
    """Return each rank's value, if none waits for the others."""
    schedule, values, present, found = Schedule(seed), {}, set(), [""] * RANKS

    def rank(number: int) -> None:
        store = Store(number, schedule, values, present)
        try:
            store.hello()
            found[number] = first_value.first_value(
                store,
                "fact",
                store.facts,
                lambda known: f"of {sorted(known)}",
                without_rank_0="without",
                patience_s=0.0,
                silent="%d of the ranks are silent after %g s",
            )
        finally:
            schedule.end(number)

    schedule.run([threading.Thread(target=rank, args=(each,)) for each in range(RANKS)])
    return found


@pytest.fixture
def three_ranks(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    monkeypatch.setattr(first_value.time, "sleep", lambda _: None)


def test_late_ranks_get_the_value_of_the_others(three_ranks):
    outcomes = [values_of(seed) for seed in range(300)]
    assert all(len(set(values)) == 1 for values in outcomes), outcomes
    reached = {values[0] for values in outcomes}
    assert {"without", "of [0]", "of [0, 1, 2]"} <= reached


def test_a_rank_alone_that_says_nothing_would_be_noticed(three_ranks, monkeypatch):
    """The test above fails if a rank that gives up on rank 0 does not publish that."""
    monkeypatch.setattr(Store, "publish", lambda self, key, value: self.schedule.step(self.rank))
    assert any(len(set(values_of(seed))) > 1 for seed in range(300))
