"""Pictures of graphs: boxes and the arrows between them."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from commpass.errors import CommpassError
from commpass.plan.dump import GraphNode
from commpass.plan.kinds import KINDS
from commpass.plan.timeline import WAIT
from commpass.report.operators import operation_kind

BUFFER, KERNEL = "aten.empty.memory_format", "commpass.kernel_.default"
"""The buffer that a CPU kernel writes into, and the call of the kernel."""


@dataclass(frozen=True)
class BoxStyle:
    """How boxes of a kind are drawn: their text in the legend, mark in text, colour and its
    name."""

    meaning: str
    mark: str
    colour: str
    called: str


BOX_STYLES = {
    "transfer": BoxStyle("travels between ranks", "*", "#ffb74d", "orange"),
    "alone": BoxStyle("a collective, uncompressed", "*", "#ffe0b2", "pale orange"),
    "compressed": BoxStyle("a collective, compressed", "+", "#b9dfb4", "green"),
    "inserted": BoxStyle("inserted for a collective", "+", "#b5dcff", "blue"),
    "plain": BoxStyle("what else is computed", " ", "#f4f4f4", "grey"),
}
"""By kind of box, in the order of the legend."""


@dataclass(frozen=True)
class Box:
    """One box.

    ``lines`` is its label, and ``cluster`` the site whose boxes share a frame. ``cut``: it has
    neighbours that are not shown.
    """

    name: str
    kind: str
    lines: tuple[str, ...]
    cluster: str = ""
    cut: bool = False


@dataclass(frozen=True)
class Arrow:
    """``user`` takes the result of ``source``; ``hidden``: through boxes that are not shown."""

    source: str
    user: str
    hidden: bool = False
    label: str = ""


@dataclass(frozen=True)
class Picture:
    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]

    @property
    def kinds(self) -> list[str]:
        """The kinds of its boxes, in the order of the legend."""
        found = {box.kind for box in self.boxes}
        return [kind for kind in BOX_STYLES if kind in found]


Edges = Mapping[str, Collection[str]]
"""Maps each name to the names of its inputs."""


def inputs_of(nodes: Iterable[GraphNode]) -> dict[str, tuple[str, ...]]:
    """Return the inputs of each node; for a buffer that kernels write into, the kernels.

    Raise CommpassError if a node takes one that comes after it.
    """
    found: dict[str, tuple[str, ...]] = {}
    writers: dict[str, list[str]] = {}
    nodes = tuple(nodes)
    names = {node.name for node in nodes}
    for node in nodes:
        sources = [each for each in dict.fromkeys(node.inputs) if each in names]
        if late := next((each for each in sources if each not in found), None):
            raise CommpassError(
                f"the nodes of this graph form a circle, or are out of order: {node.name} takes"
                f" {late}, which comes later. The dump is damaged"
            )
        taken = [each for source in sources for each in writers.get(source) or (source,)]
        found[node.name] = tuple(dict.fromkeys(taken))
        if node.target == BUFFER:
            writers[node.name] = []
        if node.target == KERNEL:
            for source in sources:  # buffers that it writes into come last
                if source in writers and (not writers[source] or source == node.inputs[-1]):
                    writers[source].append(node.name)
    return found


def travels(node: GraphNode) -> bool:
    """Return whether a node is a collective."""
    return node.role == "exchange" or bool(kind_of(node))


def waits(node: GraphNode) -> bool:
    return operation_kind(node.target) == WAIT


def kind_of(node: GraphNode) -> str:
    """Return the kind of collective that a node is; "" for any other."""
    kind = operation_kind(node.target)
    return kind if kind in KINDS else ""


def in_order(edges: Edges) -> list[str] | None:
    """Return the names in topological order, as close to the given order as possible.

    Return None if there is a cycle.
    """
    place = {name: at for at, name in enumerate(edges)}
    users: dict[str, list[str]] = {name: [] for name in edges}
    missing = {name: len(set(sources)) for name, sources in edges.items()}
    for name, sources in edges.items():
        for source in set(sources):
            users[source].append(name)
    ready = [place[name] for name, many in missing.items() if not many]
    heapq.heapify(ready)
    names, found = list(edges), []
    while ready:
        name = names[heapq.heappop(ready)]
        found.append(name)
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, place[user])
    return found if len(found) == len(names) else None


def needed(edges: Edges) -> dict[str, tuple[str, ...]]:
    """Return the edges that do not follow from others (the transitive reduction).

    Return all of them if there is a cycle.
    """
    order = in_order(edges)
    if order is None:
        return {name: tuple(sources) for name, sources in edges.items()}
    bit = {name: 1 << at for at, name in enumerate(order)}
    before: dict[str, int] = {}
    found = {}
    for name in order:
        implied = 0
        for source in edges[name]:
            implied |= before[source]
        found[name] = tuple(source for source in edges[name] if not bit[source] & implied)
        for source in found[name]:
            implied |= bit[source]
        before[name] = implied
    return {name: found[name] for name in edges}


def near(edges: Edges, names: Iterable[str], steps: int) -> set[str]:
    """Return those names and all within ``steps`` edges of them, in either direction."""
    around: dict[str, set[str]] = {name: set(sources) for name, sources in edges.items()}
    for name, sources in edges.items():
        for source in sources:
            around[source].add(name)
    found = set(names)
    for _ in range(steps):
        found |= {other for name in found for other in around[name]}
    return found


def between(edges: Edges, visible: Collection[str]) -> list[tuple[str, str]]:
    """Return the pairs of visible names that a path of only hidden ones connects, source first.

    Of several sources, only those are returned that no other of them depends on.
    """
    order = in_order(edges) or list(edges)
    names = [name for name in order if name in visible]
    bit = {name: 1 << at for at, name in enumerate(names)}
    before: dict[str, int] = {}  # of a visible name: all visible ones that it depends on
    reach: dict[str, int] = {}  # of a hidden name: the last visible ones that it depends on

    def waited_for(some: int) -> int:
        found = 0
        for at in _places(some):
            found |= before[names[at]]
        return found

    found = []
    for name in order:
        direct = hidden = 0
        for source in edges[name]:
            direct |= bit.get(source, 0)
            hidden |= reach.get(source, 0)
        implied = waited_for(direct | hidden)
        if name in bit:
            found += [(names[at], name) for at in _places(hidden & ~direct & ~implied)]
            before[name] = direct | hidden | implied
        else:
            reach[name] = (direct | hidden) & ~implied
    return found


def _places(some: int) -> list[int]:
    """Return the positions of the set bits of a number."""
    found = []
    while some:
        found.append((some & -some).bit_length() - 1)
        some &= some - 1
    return found


def restricted(picture: Picture, edges: Edges, visible: Collection[str], *, cut: bool) -> Picture:
    """Return the part of a picture with these boxes, with dashed arrows through hidden ones.

    ``cut`` marks boxes with neighbours that are not shown.
    """
    if all(box.name in visible for box in picture.boxes):
        return picture
    ends = {source for name, some in edges.items() if name not in visible for source in some}
    ends |= {name for name, some in edges.items() if any(each not in visible for each in some)}
    boxes = tuple(
        dataclasses.replace(box, cut=cut and box.name in ends)
        for box in picture.boxes
        if box.name in visible
    )
    arrows = [each for each in picture.arrows if each.source in visible and each.user in visible]
    arrows += [Arrow(source, user, hidden=True) for source, user in between(edges, visible)]
    return Picture(picture.title, boxes, tuple(arrows))
