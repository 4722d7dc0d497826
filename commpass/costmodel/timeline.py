"""When the stages of an algorithm are done, with overlap between a rank's computation and its
links.

A rank computes its stages one after another, in the order in which they start. Its data is sent on
its link in the same order, and arrives a latency after the last byte has left.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from commpass.plan.timeline import HOST


@dataclass(frozen=True)
class Task:
    """A stage with its time.

    It takes ``us`` microseconds of ``resource``; others can use its result ``latency_us`` later.
    ``after`` are the numbers of the tasks whose results it uses. The rank itself is busy for
    ``overhead_us`` before, and computes ``slowdown_us`` less while a link or a stream has the task.
    """

    resource: Hashable
    us: float
    latency_us: float = 0.0
    after: tuple[int, ...] = ()
    overhead_us: float = 0.0
    slowdown_us: float = 0.0


def finished_us(tasks: Sequence[Task]) -> float:
    """Return the microseconds until the last task is done, and the rank too."""
    free: dict[Hashable, float] = {HOST: 0.0}
    done: list[float] = []
    for task in tasks:
        given = max((done[number] for number in task.after), default=0.0)
        begun = max(free[HOST], given) + task.overhead_us  # the rank must have reached this task
        start = max(begun, free.get(task.resource, 0.0))
        if task.resource != HOST:
            free[HOST] = begun + task.slowdown_us
        free[task.resource] = start + task.us
        done.append(start + task.us + task.latency_us)
    return max([*done, free[HOST]])
