"""The time of a graph in which coded exchanges run hop by hop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from commpass.costmodel import HOST, Task
from commpass.passes.fx.schedule import Clock


@dataclass
class CodedClock(Clock):
    """The clock of a graph before codecs are inserted.

    ``coded[start]`` has the tasks of a coded exchange. The rank encodes and decodes between its
    hops, and it cannot do so during a matmul. A later hop therefore starts at the wait. If the
    graph is reordered (``early``), it starts between matmuls, or while the rank waits for another.
    """

    coded: Mapping[fx.Node, Sequence[Task]] = field(default_factory=dict)
    early: bool = True
    arrived: dict[fx.Node, list[float]] = field(default_factory=dict)

    def run(self, node: fx.Node) -> None:
        """Run a node, and before it what coded exchanges in flight must or can do."""
        if node in self.coded:
            self.arrived[node] = []
            self._advance([node])
            return
        for start in self.work.waited.get(node, ()):
            while start in self.arrived:
                self._wait(node, self._ready_us(start))
                self._step(start)
        if node in self.work.waited:
            self._wait(node, self.arrival(node))
        elif self.early and node in self.work.heavy:
            self._advance(list(self.arrived))
        super().run(node)

    def _advance(self, starts: Sequence[fx.Node]) -> None:
        """Run the tasks of exchanges whose inputs have arrived."""
        for start in starts:
            while start in self.arrived and self._ready_us(start) <= self.now:
                self._step(start)

    def _wait(self, wait: fx.Node, until_us: float) -> None:
        """Wait. If ``early``, run meanwhile what becomes possible of other exchanges."""
        while self.early and self.arrived and until_us > self.now:
            first = min(self.arrived, key=self._ready_us)
            if self._ready_us(first) >= until_us:
                break
            self._await(wait, self._ready_us(first))
            self._step(first)
        self._await(wait, until_us)

    def _ready_us(self, start: fx.Node) -> float:
        """Return when the next task of an exchange has its inputs."""
        arrived = self.arrived[start]
        after = self.coded[start][len(arrived)].after
        return max((arrived[number] for number in after), default=0.0)

    def _step(self, start: fx.Node) -> None:
        """Run the next task of an exchange."""
        arrived, tasks = self.arrived[start], self.coded[start]
        task = tasks[len(arrived)]
        self._pass(start, task.overhead_us)
        if task.resource == HOST:
            self._pass(start, task.us)
            arrived.append(self.now)
        else:
            arrived.append(self._send(start, task))
            self._pass(start, task.slowdown_us)
        if len(arrived) == len(tasks):
            self.arrives[start] = max(arrived)
            del self.arrived[start]
