"""A graph as work to be scheduled: what must come before what, and the cost of each node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from commpass import groups
from commpass.costmodel import HOST, Profile, Task
from commpass.passes.fx import costs
from commpass.passes.fx.dependencies import orders
from commpass.passes.fx.marks import MARK, is_single_kernel, started_by, starts, waits
from commpass.passes.fx.memory import Memory, memory
from commpass.passes.fx.ops import is_matmul
from commpass.passes.fx.parse import (
    Call,
    describe_group,
    graph_modules,
    is_collective,
    is_wait,
    parse,
    sources,
)


@dataclass(frozen=True)
class Work:
    """The nodes of a graph in order, the nodes that must come ``before`` each, and their costs.

    ``waited[wait]`` are the nodes that a wait waits for. ``heavy`` are matmuls and similar nodes,
    and ``later`` the starts of later hops of their sites.
    """

    nodes: tuple[fx.Node, ...]
    before: Mapping[fx.Node, Sequence[fx.Node]]
    tasks: Mapping[fx.Node, Task]
    starts: frozenset[fx.Node]
    waited: Mapping[fx.Node, Sequence[fx.Node]]
    heavy: frozenset[fx.Node]
    later: frozenset[fx.Node]
    memory: Memory

    @cached_property
    def index(self) -> dict[fx.Node, int]:
        return {node: number for number, node in enumerate(self.nodes)}

    @cached_property
    def after(self) -> dict[fx.Node, list[fx.Node]]:
        """Return the nodes that must come after each node."""
        found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            for each in self.before[node]:
                found[each].append(node)
        return found

    def remaining(self) -> dict[fx.Node, int]:
        """Return the initial number of nodes that must come before each node."""
        return {node: len(self.before[node]) for node in self.nodes}


def work_of(graph: fx.Graph, known: Memory, profile: Profile) -> Work:
    """Return the dependencies of a graph's nodes, and the cost and memory of each."""
    before, prices_of = orders(graph, memory(graph)), costs.prices_of(profile)
    times = costs.NodeTimes.of(graph, profile)
    tasks, started, waited, heavy = {}, set(), {}, set()
    latest: dict[str, fx.Node] = {}
    alone, in_order = _GlooOrder(), _SingleKernelOrder()
    for node in graph.nodes:
        call = parse(node)
        if starts(node):
            tasks[node] = (
                costs.in_separate_stream(node) if call is None else costs.exchange(call, prices_of)
            )
            started.add(node)
        elif waits(node):
            tasks[node] = Task(HOST, 0.0)
            waited[node] = started_by(node)
        else:
            tasks[node] = Task(HOST, times.us(node))
            if is_matmul(node):
                heavy.add(node)
            if not is_single_kernel(node):
                continue
        for other in (*alone.before(node, call), *in_order.before(node, call)):
            before[node] += [] if other in before[node] else [other]
        if (node in started or node in waited) and (site := site_of(node)):
            if site in latest and latest[site] not in before[node]:
                before[node].append(latest[site])  # keeps the site's own order
            latest[site] = node
    later = {node for node in started if MARK in node.meta and node.meta[MARK].hop > 0}
    return Work(
        tuple(graph.nodes),
        before,
        tasks,
        frozenset(started),
        waited,
        frozenset(heavy),
        frozenset(later),
        known,
    )


def unsupported_reason(gm: fx.GraphModule) -> str:
    """Return why a graph must keep its order, else ""."""
    for prefix, module in graph_modules(gm):
        for node in module.graph.nodes:
            call = parse(node)
            if call is not None and prefix:
                return f"an operator of the graph has exchanges of its own: {prefix}{node.name}"
            if call is not None and call.ends:
                return f"messages between two ranks keep their place: {node.name}"
    return ""


def site_of(node: fx.Node) -> str:
    """Return the name of the site of an exchange or a wait."""
    if MARK in node.meta:
        return str(node.meta[MARK].site)
    if is_wait(node):
        return next((site_of(each) for each in sources(node) if is_collective(each)), "")
    return node.name


class _SingleKernelOrder:
    """Keeps sites in a single kernel in the program's order, also relative to starts of exchanges.

    The kernel waits for the same kernel on other ranks, so all ranks need one order.
    """

    def __init__(self) -> None:
        self.last: fx.Node | None = None
        self.starts: list[fx.Node] = []

    def before(self, node: fx.Node, call: Call | None) -> list[fx.Node]:
        """Return the starts and single kernels that must precede a node."""
        if call is None and not is_single_kernel(node):
            return []
        found = [self.last] if self.last is not None else []
        if call is not None:
            self.starts.append(node)
        else:
            found += self.starts
            self.last, self.starts = node, []
        return found


SMALL = 1 << 16
"""The minimum bytes of an exchange that gloo can run concurrently with another of the same group.

Concurrent smaller exchanges, or all_gathers of 128 KiB, occasionally corrupt a rank's memory
(docs/collectives.md).
"""


class _GlooOrder:
    """Keeps gloo's small exchanges and all_gathers from overlapping others in their group where the
    program does not overlap them."""

    def __init__(self) -> None:
        self.waits: dict[str, list[tuple[fx.Node, bool]]] = defaultdict(list)

    def before(self, node: fx.Node, call: Call | None) -> list[fx.Node]:
        """Return the waits that must precede a start."""
        if call is None:
            for source in sources(node) if is_wait(node) else ():
                if (started := parse(source)) is not None and (name := self._group(started)):
                    self.waits[name].append((node, _is_unsafe(started)))
            return []
        if not (name := self._group(call)):
            return []
        unsafe = _is_unsafe(call)
        found = [wait for wait, its in self.waits[name] if unsafe or its]
        self.waits[name] = [each for each in self.waits[name] if each[0] not in found]
        return found

    def _group(self, call: Call) -> str:
        """Return the group of an exchange that gloo carries out itself; "" for any other."""
        name, _ = describe_group(call)
        return name if not call.by_messages and groups.sends_messages(name, "cpu") else ""


def _is_unsafe(call: Call) -> bool:
    """Whether gloo may corrupt an exchange that overlaps another: an all_gather, or one that may
    have few bytes on some rank.

    All ranks must find the same.
    """
    if call.kind == "all_gather":
        return True
    return call.splits is not None or costs.sent_nbytes(call) < SMALL
