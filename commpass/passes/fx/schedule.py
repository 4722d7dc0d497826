"""The order of a graph that overlaps its exchanges with computation.

Two separate decisions are made. The order in which exchanges start depends only on data
dependencies (``sequence``), so ranks that compile the same program for other sizes find the same
order. The computation between a start and its wait may differ per rank, and depends on times
(``schedule``).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from commpass.costmodel import HOST, Task
from commpass.passes.fx.memory import LiveBytes
from commpass.passes.fx.work import Work

# --- the order of exchange starts -----------------------------------------------------------------


def sequence(work: Work) -> list[fx.Node]:
    """Return the exchange starts in the order in which they become ready.

    A later hop starts once the first hop of another site has started in between, or if the next
    computation needs it. A start without computed inputs is ready at once, but its result would be
    held for long (the weights of all layers). It therefore comes after all starts that precede it
    in the program.
    """
    return _Sequence(work).run()


class _Sequence:
    """Walks through the heavy nodes in graph order. All other nodes run as soon as they are
    ready."""

    def __init__(self, work: Work):
        self.work = work
        self.left = work.remaining()
        self.found: list[fx.Node] = []
        self.startable: list[tuple[int, fx.Node]] = []
        self.waits: list[tuple[int, int, fx.Node]] = []
        self.number: dict[fx.Node, int] = {}
        self.program = deque(sorted(work.starts, key=work.index.__getitem__))
        self.ready: set[fx.Node] = set()

    def run(self) -> list[fx.Node]:
        free = [node for node in self.work.nodes if not self.work.before[node]]
        for node in free:
            self._reach(node)
        self.ready = {node for _, node in self.startable}
        self.startable.clear()
        self._start_all()
        for node in self.work.nodes:
            if node in self.work.heavy:
                while self.left[node]:
                    self._wait()
                self._done(node)
                self._start_all()
        while self.waits:
            self._wait()
        return self.found

    def _done(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            for user in self.work.after[stack.pop()]:
                self.left[user] -= 1
                if not self.left[user] and self._reach(user, quiet=True):
                    stack.append(user)

    def _reach(self, node: fx.Node, *, quiet: bool = False) -> bool:
        """Handle a node whose inputs are all ready. Return whether it is thereby done."""
        if node in self.work.heavy:
            return False
        if node in self.work.starts:
            heapq.heappush(self.startable, (self.work.index[node], node))
            return False
        if node in self.work.waited:
            made = max((self.number.get(each, 0) for each in self.work.waited[node]), default=0)
            heapq.heappush(self.waits, (made, self.work.index[node], node))
            return False
        if not quiet:
            self._done(node)
        return True

    def _next(self) -> fx.Node | None:
        """Return the next start. Of starts that were ready before any computation, return only the
        next one in the program."""
        if self.startable:
            return heapq.heappop(self.startable)[-1]
        while self.program and self.program[0] in self.number:
            self.program.popleft()
        return self.program[0] if self.program and self.program[0] in self.ready else None

    def _start_all(self) -> None:
        while (node := self._next()) is not None:
            self.number[node] = len(self.found)
            self.found.append(node)
            self._done(node)
            while node not in self.work.later and self.waits and self._is_older(node):
                self._done(heapq.heappop(self.waits)[-1])

    def _is_older(self, start: fx.Node) -> bool:
        """Whether the first wait belongs to an earlier start."""
        return self.waits[0][0] < self.number[start]

    def _wait(self) -> None:
        self._done(heapq.heappop(self.waits)[-1])
        self._start_all()


# --- the order of computation ---------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The time for which a node occupies the host or a link, in microseconds.

    Its result is available ``latency_us`` after the end. ``still`` says that the rank only waits.
    """

    node: fx.Node
    resource: Hashable
    begin_us: float
    us: float
    latency_us: float = 0.0
    still: bool = False


@dataclass
class Clock:
    """The time of a rank and its links, in microseconds. ``exposed`` is the waiting time at each
    wait. If ``spans`` is given, it gets everything that takes time."""

    work: Work
    now: float = 0.0
    free: dict[object, float] = field(default_factory=dict)
    arrives: dict[fx.Node, float] = field(default_factory=dict)
    exposed: dict[fx.Node, float] = field(default_factory=dict)
    spans: list[Span] | None = None

    def arrival(self, wait: fx.Node) -> float:
        """Return the time when everything that a wait waits for has arrived."""
        return max((self.arrives.get(each, 0.0) for each in self.work.waited[wait]), default=0.0)

    def run(self, node: fx.Node) -> None:
        """Run a node: the rank continues when it is done, or has started."""
        task = self.work.tasks[node]
        if node in self.work.waited:
            self._await(node, self.arrival(node))
        if task.overhead_us:
            self._pass(node, task.overhead_us)
        if task.resource != HOST:
            self.arrives[node] = self._send(node, task)
            self._pass(node, task.slowdown_us)
        elif task.us:
            self._pass(node, task.us)

    def _send(self, node: fx.Node, task: Task) -> float:
        """Start the exchange of a node as soon as its link is free, and return when it arrives."""
        begun = max(self.now, self.free.get(task.resource, 0.0))
        if self.spans is not None:
            self.spans.append(Span(node, task.resource, begun, task.us, task.latency_us))
        self.free[task.resource] = begun + task.us
        return begun + task.us + task.latency_us

    def _await(self, wait: fx.Node, arrival: float) -> None:
        """Wait until ``arrival``."""
        us = max(arrival - self.now, 0.0)
        self.exposed[wait] = self.exposed.get(wait, 0.0) + us
        self._pass(wait, us, still=True)

    def _pass(self, node: fx.Node, us: float, *, still: bool = False) -> None:
        """Advance the host by the time of a node."""
        if us > 0 and self.spans is not None:
            self.spans.append(Span(node, HOST, self.now, us, still=still))
        self.now += us


def timed(work: Work, order: Iterable[fx.Node], spans: list[Span] | None = None) -> Clock:
    """Return the clock after all nodes of an order. ``spans`` gets what takes time."""
    clock = Clock(work, spans=spans)
    for node in order:
        clock.run(node)
    return clock


@dataclass(frozen=True)
class Scheduled:
    """An order of all nodes, the clock after it, and the peak of its memory.

    ``windowed`` says whether a larger window may give another order, and ``bounded`` whether more
    memory may.
    """

    order: list[fx.Node]
    clock: Clock
    peak: int
    windowed: bool
    bounded: bool


def schedule(work: Work, starts: Sequence[fx.Node], window: int, bound: float) -> Scheduled:
    """Return an order of all nodes with the given order of exchange starts.

    Nodes that the next start needs come first. A matmul that it does not need is delayed until the
    rank would otherwise wait, or until ``window`` more exchanges have started. It runs early only
    if at most ``bound`` bytes are then held.
    """
    return _Schedule(work, starts, window, bound).run()


LOOK = 8
"""The number of matmuls that are considered for filling a waiting time."""


class _Schedule:
    def __init__(self, work: Work, starts: Sequence[fx.Node], window: int, bound: float):
        self.work, self.starts, self.window, self.bound = work, starts, window, bound
        self.clock, self.held = Clock(work), LiveBytes(work.memory)
        self.left = work.remaining()
        self.order: list[fx.Node] = []
        self.done: set[fx.Node] = set()
        self.needed: set[fx.Node] = set()
        self.ready: list[tuple[int, fx.Node]] = []  # needed nodes
        self.spare: list[tuple[int, fx.Node]] = []  # nodes not needed yet
        self.waits: list[tuple[float, int, fx.Node]] = []  # by time of arrival
        self.heavy = [node for node in work.nodes if node in work.heavy]
        self.next = list(range(len(self.heavy)))  # per matmul, the next one that may be undone
        self.limit = 0  # the highest place up to which a smaller or equal window catches up
        self.windowed = self.bounded = False

    def run(self) -> Scheduled:
        for node in self.work.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._do(node)
            elif not self.work.before[node]:
                self._reach(node)
        for number, start in enumerate(self.starts):
            self._need([start])
            if number >= self.window:
                self._catch_up(self.work.index[self.starts[number - self.window]])
            while start not in self.done:
                self._step()
        *others, output = self.work.nodes
        self._need(others)
        while len(self.done) < len(others):
            self._step()
        self._do(output)
        return Scheduled(self.order, self.clock, self.held.most, self.windowed, self.bounded)

    def _need(self, needed: Iterable[fx.Node]) -> None:
        """Mark nodes, and all nodes that must come before them, as needed."""
        stack = list(needed)
        while stack:
            node = stack.pop()
            if node in self.needed or node in self.done:
                continue
            self.needed.add(node)
            stack += self.work.before[node]
            if not self.left[node]:
                self._reach(node)

    def _reach(self, node: fx.Node) -> None:
        """Queue a node whose predecessors have all run."""
        if node in self.work.waited:
            if node in self.needed:
                entry = (self.clock.arrival(node), self.work.index[node], node)
                heapq.heappush(self.waits, entry)
        elif node not in self.work.starts or node in self.needed:
            where = self.ready if node in self.needed else self.spare
            heapq.heappush(where, (self.work.index[node], node))

    def _catch_up(self, limit: int) -> None:
        """Run the nodes that have been delayed too long. Needed ones come next in any case.

        A larger window catches up to one of the earlier limits. It gives the same order if no
        delayed node was ever below any of them.
        """
        self.limit = max(self.limit, limit)
        while self.spare and (self.spare[0][0] < limit or self._is_decided(self.spare[0][-1])):
            node = heapq.heappop(self.spare)[-1]
            if not self._is_decided(node):
                self.windowed = True
                self._do(node)
        self.windowed |= bool(self.spare) and self.spare[0][0] < self.limit

    def _is_decided(self, node: fx.Node) -> bool:
        """Whether a node that was delayed has run, or is needed by now."""
        return node in self.done or node in self.needed

    def _step(self) -> None:
        """Run the next needed node, or else one that overlaps an exchange."""
        while self.waits and self.waits[0][0] <= self.clock.now:
            heapq.heappush(self.ready, heapq.heappop(self.waits)[1:])
        if self.ready:
            place, node = self.ready[0]
            for each in self._without_room_later(place, node) or [heapq.heappop(self.ready)[-1]]:
                self._do(each)
        elif found := self._filler():
            for node in found:
                self._do(node)
        else:
            self._do(heapq.heappop(self.waits)[-1])

    def _without_room_later(self, place: int, node: fx.Node) -> list[fx.Node]:
        """Return the delayed nodes that would exceed the memory limit once ``node`` has run, or
        nothing."""
        if not self.held.allocates(node):
            return []
        for each in itertools.islice(self._undone(), 1):
            if self.work.index[each] >= place:
                break
            found = self._with_what_it_needs(each)
            if found and node not in found and self._exceeds([node, *found]):
                return found
        if self.spare and self.spare[0][0] < place and self._exceeds([node]):
            return [heapq.heappop(self.spare)[-1]]
        return []

    def _undone(self) -> Iterator[fx.Node]:
        """Yield the matmuls that have not run, in order."""
        place = self._undone_from(0)
        while place < len(self.heavy):
            yield self.heavy[place]
            place = self._undone_from(place + 1)

    def _undone_from(self, place: int) -> int:
        """Return the place of the first matmul from ``place`` on that has not run. Finished ones
        are skipped by path compression."""
        passed = []
        while place < len(self.heavy) and self.heavy[place] in self.done:
            passed.append(place)
            place = max(self.next[place], place + 1)
        for each in passed:
            self.next[each] = place
        return place

    def _filler(self) -> list[fx.Node]:
        """Return the next matmul that needs no exchange in flight, with its predecessors, or
        nothing if there is none within the memory limit."""
        for node in itertools.islice(self._undone(), LOOK):
            found = self._with_what_it_needs(node)
            if found and not self._exceeds(found):
                return found
        return []

    def _exceeds(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether nodes that run next exceed the memory limit."""
        exceeds = self.bound < math.inf and self.held.peak(nodes) > self.bound
        self.bounded |= exceeds
        return exceeds

    def _with_what_it_needs(self, needed: fx.Node) -> list[fx.Node]:
        """Return a node and its unfinished predecessors in order, or nothing if they include an
        exchange."""
        found: set[fx.Node] = set()
        stack = [needed]
        while stack:
            node = stack.pop()
            if node in self.done or node in found:
                continue
            if node in self.work.starts or node in self.work.waited:
                return []
            found.add(node)
            stack += self.work.before[node]
        return sorted(found, key=self.work.index.__getitem__)

    def _do(self, node: fx.Node) -> None:
        if node in self.done:  # run earlier, as spare, needed or filler
            return
        self.done.add(node)
        self.order.append(node)
        self.clock.run(node)
        self.held.run(node)
        for user in self.work.after[node]:
            self.left[user] -= 1
            if not self.left[user]:
                self._reach(user)
