"""Which compiled graph is being called in this thread: for our operators, which are told the number
of a site alone.

Graphs of layers that are alike share one code, so no name of a site may stand in it. Whoever calls
the graph says here what it is.
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
    """A call of a graph. ``labels`` name its sites, in the order of its plan; ``sample`` is called
    with the number of a site and what this rank sends there, and None where nobody looks."""

    labels: tuple[str, ...] = ()
    sample: Callable[[int, Tensor], None] | None = None


_now = threading.local()
NOBODY = Running()


def innermost() -> Running:
    """The innermost call that goes on in this thread."""
    found: Running = getattr(_now, "running", NOBODY)
    return found


@contextmanager
def running(call: Running) -> Iterator[None]:
    """In here, ``call`` goes on."""
    before = innermost()
    _now.running = call
    try:
        yield
    finally:
        _now.running = before


def profiled(name: str) -> AbstractContextManager[object]:
    """A range in torch.profiler's traces; nothing where no profiler is on."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"commpass: {name}")


def stage(site: int, role: str) -> AbstractContextManager[object]:
    """The range of a stage of a site, by its number in the plan of the graph that is called."""
    labels = innermost().labels
    return profiled(f"{labels[site]} {role}" if site < len(labels) else role)
