"""When the stages of an algorithm are done: what a rank computes and what its links carry overlap.

A rank computes its stages one after the other, in the order in which they start. What it sends is
on its link in that order too, and arrives a latency after the last byte has left.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from commpass.plan.timeline import HOST


@dataclass(frozen=True)
class Task:
    """A stage with its time: ``us`` microseconds of ``resource``, and ``latency_us`` more until
    others can use what it gives. ``after`` are the numbers of the tasks whose results it takes.
    For ``busy_us`` the rank itself is busy before."""

    resource: Hashable
    us: float
    latency_us: float = 0.0
    after: tuple[int, ...] = ()
    busy_us: float = 0.0


def finished_us(tasks: Sequence[Task]) -> float:
    """Microseconds until the last of some tasks is done."""
    free: dict[Hashable, float] = {HOST: 0.0}
    done: list[float] = []
    for task in tasks:
        given = max((done[number] for number in task.after), default=0.0)
        begun = max(free[HOST], given) + task.busy_us  # the rank must have come so far
        start = max(begun, free.get(task.resource, 0.0))
        if task.resource != HOST:
            free[HOST] = begun
        free[task.resource] = start + task.us
        done.append(start + task.us + task.latency_us)
    return max(done, default=0.0)
