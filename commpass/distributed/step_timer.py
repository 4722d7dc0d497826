"""Time the compiled graphs of a backend and log the predicted and the measured time once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from commpass.utils.printable import less
from commpass.utils.running import innermost

log = logging.getLogger("commpass")

SKIPPED, COUNTED = 3, 5
"""Calls of a graph that warm up, and those after them that are timed."""
LATE = 3
"""Further calls after which graphs that are called less often are no longer waited for."""


@dataclass
class TimedGraph:
    """One graph with its name and two predictions in microseconds: as compiled, and as it came.

    ``warns_if_slower``: a measured profile decided a change, so a slower graph is reported.
    ``device`` is the type of the device on which the graph runs.
    """

    name: str
    predicted_us: float
    plain_us: float
    warns_if_slower: bool
    device: str = "cpu"
    calls: int = 0
    times_us: list[float] = field(default_factory=list)
    pending: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.times_us) == COUNTED

    @property
    def measured_us(self) -> float:
        return median(self.times_us)

    def time(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function and time it.

        On a CPU a call is done when it returns. Elsewhere events on the stream are recorded and
        read later, so that nothing waits for them.
        """
        if self.device == "cpu":
            start = time.perf_counter()
            result = function(*args)
            self.times_us.append(1e6 * (time.perf_counter() - start))
            return result
        module = torch.get_device_module(self.device)
        begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        begin.record()
        result = function(*args)
        end.record()
        self.pending.append((begin, end))
        return result

    def read_events(self) -> None:
        """Read the events that are complete."""
        while self.pending and self.pending[0][1].query():
            begin, end = self.pending.pop(0)
            self.times_us.append(1e3 * begin.elapsed_time(end))


class StepTimer:
    """The timed graphs of one backend on this rank.

    A line reports predictions and measurements once each graph was called often enough, or one much
    more often than the others. It is repeated if graphs are compiled later. ``facts`` returns
    further text for that line.
    """

    def __init__(self, facts: Callable[[], str] = str) -> None:
        self.graphs: list[TimedGraph] = []
        self.reported: set[str] = set()
        self.facts = facts

    def with_timing(self, function: Callable[..., Any], graph: TimedGraph) -> Callable[..., Any]:
        """Return the function with its first calls timed."""
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            if graph.calls >= SKIPPED + COUNTED + LATE or innermost().sample is not None:
                return function(*args)  # sampling takes extra time
            graph.calls += 1
            graph.read_events()
            is_timed = SKIPPED < graph.calls <= SKIPPED + COUNTED
            result = graph.time(function, *args) if is_timed else function(*args)
            if all(each.done for each in self.graphs) or graph.calls == SKIPPED + COUNTED + LATE:
                self.log_summary()
            return result

        run._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
        return run

    def log_summary(self) -> None:
        """Log a line for the timed graphs.

        Log a warning for each that is slower than the prediction without commpass.
        """
        for each in self.graphs:
            each.read_events()
        new = [each for each in self.graphs if each.done and each.name not in self.reported]
        if not new:
            return
        self.reported |= {each.name for each in new}
        predicted, plain, measured = (
            sum(getattr(each, key) for each in new) / 1e3
            for key in ("predicted_us", "plain_us", "measured_us")
        )
        many = f"{len(new)} graphs" if len(new) > 1 else f"graph {new[0].name}"
        log.info(
            "%s: predicted %.4g ms (%.4g ms without commpass%s), measured %.4g ms%s",
            *(many, predicted, plain, less(predicted, plain, brackets=False)),
            *(measured, self.facts()),
        )
        for each in new:
            if each.warns_if_slower and each.measured_us > each.plain_us:
                log.warning(SLOWER, each.name, each.measured_us / 1e3, each.plain_us / 1e3)


SLOWER = (
    "graph %s takes %.4g ms, more than the %.4g ms that are predicted without commpass. Measure the"
    " machines as they are now, `commpass probe --kernels`, or compare with policy 'off'"
)
