"""Memory as a GPU's memory model allows it: who has not synchronized may still read old bytes.

Each byte keeps all that was written to it, in order. An agent (the threads of one program) has seen
a version of each byte. It may read that version or any later one: so the writes of others reach it
late, and in any order. What forces it on:

- A barrier orders the accesses of the threads of a program. What threads wrote is ordered before a
  signal only behind a barrier; what a thread acquired, others have only behind a barrier.
- An atomic operation with *release* publishes what was seen at the last barrier.
- An atomic operation with *acquire* obtains what the operation that it reads has published.

A read takes place when it is made. So a read that is delayed beyond a signal is not modelled: that
a barrier is there for reads is found by what it does for writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VERSIONS = 24
"""The most writes to a byte."""
Versions = NDArray[np.int16]
Places = NDArray[np.int64]
"""Bytes of elements, ``[elements, bytes of one]``."""


@dataclass
class Agent:
    """What the threads of one program have seen of each byte: before now, before the last barrier,
    and acquired since then."""

    seen: Versions
    fenced: Versions
    acquired: Versions

    @classmethod
    def after(cls, *agents: Agent) -> Agent:
        """Return an agent that has seen what others have: the next kernel of a stream."""
        seen = np.maximum.reduce([each.seen for each in agents])
        return cls(seen.copy(), seen.copy(), seen.copy())

    def barrier(self) -> None:
        self.seen = np.maximum(self.seen, self.acquired)
        self.fenced = self.seen.copy()


class Memory:
    """``size`` bytes, zero at first. ``races`` counts the reads that could have read other bytes;
    ``signals`` the atomic operations that wrote."""

    def __init__(self, size: int, random: np.random.Generator) -> None:
        self.values = np.zeros((VERSIONS, size), dtype=np.uint8)
        self.newest = np.zeros(size, dtype=np.int16)
        self.published: dict[int, Versions] = {}
        self.random = random
        self.races = 0
        self.signals = 0

    def agent(self) -> Agent:
        return Agent(*(np.zeros_like(self.newest) for _ in range(3)))

    def read(self, agent: Agent, at: Places) -> NDArray[np.uint8]:
        low, high = agent.seen[at], self.newest[at]
        chosen = high
        if (low < high).any():
            self.races += 1
            whole = self.random.integers(3)  # the oldest, the newest, or each byte its own
            mixed = self.random.integers(low, high + 1)
            chosen = (low, high, mixed.astype(np.int16))[whole]
        agent.seen[at] = chosen
        return self.values[chosen, at]

    def write(self, agent: Agent, at: Places, values: NDArray[np.uint8]) -> None:
        number = self.newest[at] + 1
        self.values[number, at] = values
        self.newest[at] = agent.seen[at] = number

    def fetch(self, agent: Agent, at: Places, *, acquire: bool) -> NDArray[np.uint8]:
        """Read by an atomic operation: the newest bytes."""
        agent.seen[at] = self.newest[at]
        for first in at[:, 0]:
            if acquire and (published := self.published.get(int(first))) is not None:
                agent.acquired = np.maximum(agent.acquired, published)
        return self.values[self.newest[at], at]

    def exchange(
        self, agent: Agent, at: Places, values: NDArray[np.uint8], *, release: bool
    ) -> None:
        """Write by an atomic operation."""
        self.write(agent, at, values)
        self.signals += 1
        for first in at[:, 0]:
            self.published.pop(int(first), None)
            if release:
                self.published[int(first)] = agent.fenced.copy()
