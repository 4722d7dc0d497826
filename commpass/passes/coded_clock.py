"""The time of a graph in which coded exchanges run hop by hop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from commpass.costmodel import HOST, Task
from commpass.passes.fx.schedule import Clock, Span


@dataclass
class CodedClock(Clock):
    """The clock of a graph before codecs are inserted.

    ``coded[start]`` has the tasks of a coded exchange. The rank encodes and decodes between its
    hops, and it cannot do so during a matmul. A later hop therefore starts at the wait, or, if the
    graph is reordered (``early``), after the first matmul that ends after the previous hop.
    """

    coded: Mapping[fx.Node, Sequence[Task]] = field(default_factory=dict)
    early: bool = True
    arrived: dict[fx.Node, list[float]] = field(default_factory=dict)

    def run(self, node: fx.Node) -> None:
        """Run a node, and before it what coded exchanges in flight must or can do."""
        if node in self.coded:
            self.arrived[node] = []
            self._advance(node)
            return
        for start in self.work.waited.get(node, ()):
            if start in self.arrived:
                self._advance(start, wait=node)
        if self.early and node in self.work.heavy:
            for start in list(self.arrived):
                self._advance(start)
        super().run(node)

    def _advance(self, start: fx.Node, *, wait: fx.Node | None = None) -> None:
        """Run the tasks of an exchange whose inputs have arrived; all of them at its ``wait``."""
        arrived, tasks = self.arrived[start], self.coded[start]
        while len(arrived) < len(tasks):
            task = tasks[len(arrived)]
            given = max((arrived[number] for number in task.after), default=0.0)
            if given > self.now:
                if wait is None:
                    return
                self._await(wait, given)
            arrived.append(self._done(start, task))
        del self.arrived[start]
        self.arrives[start] = max(arrived, default=0.0)

    def _done(self, start: fx.Node, task: Task) -> float:
        """Run one task of an exchange. Return when its result is there."""
        self._pass(start, task.overhead_us)
        if task.resource == HOST:
            self._pass(start, task.us)
            return self.now
        begun = max(self.now, self.free.get(task.resource, 0.0))
        self.spans.append(Span(start, task.resource, begun, task.us, task.latency_us))
        self.free[task.resource] = begun + task.us
        return begun + task.us + task.latency_us
