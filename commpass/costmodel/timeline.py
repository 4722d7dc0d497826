"""When the stages of an algorithm are done: what a rank computes and what its links carry overlap.

A rank computes its stages one after the other, in the order in which they start. What it sends is
on its link in that order too, and arrives a latency after the last byte has left.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

HOST = "host"
"""What carries out that which is computed."""


@dataclass(frozen=True)
class Task:
    """A stage with its time: ``us`` microseconds of ``resource``, and ``latency_us`` more until
    others can use what it gives. ``after`` are the numbers of the tasks whose results it takes."""

    resource: Hashable
    us: float
    latency_us: float = 0.0
    after: tuple[int, ...] = ()


def finished_us(tasks: Sequence[Task]) -> float:
    """Microseconds until the last of some tasks is done."""
    free: dict[Hashable, float] = {HOST: 0.0}
    done: list[float] = []
    for task in tasks:
        start = max([free.get(task.resource, 0.0), *(done[number] for number in task.after)])
        if task.resource != HOST:  # the rank must have come so far before it starts an exchange
            start = max(start, free[HOST])
        free[task.resource] = start + task.us
        done.append(start + task.us + task.latency_us)
    return max(done, default=0.0)
