"""The compiled graph that is being called in this thread, for operators of commpass that only know
a site's number.

Graphs of equal layers share code, so the code cannot contain names of sites. The caller of a graph
provides them here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Running:
    """A call of a graph.

    ``labels`` name its sites, in the order of its plan. ``sample`` is called with the number of a
    site and this rank's values there. It is None if this call is not sampled.
    """

    labels: tuple[str, ...] = ()
    sample: Callable[[int, Tensor], None] | None = None


_now = threading.local()
IDLE = Running()


def innermost() -> Running:
    """Return the innermost running call of this thread."""
    found: Running = getattr(_now, "running", IDLE)
    return found


@contextmanager
def running(call: Running) -> Iterator[None]:
    """Make ``call`` the innermost running one inside the context."""
    before = innermost()
    _now.running = call
    try:
        yield
    finally:
        _now.running = before


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a torch.profiler range, or an empty context if no profiler is active."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"commpass: {name}")


def stage(site: int, role: str) -> AbstractContextManager[object]:
    """Return the profiler range of a stage of a site, by its number in the plan of the running
    graph."""
    labels = innermost().labels
    return profiled(f"{labels[site]} {role}" if site < len(labels) else role)
