"""One graph of a dump as text, as Graphviz DOT or as an SVG file. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commpass.dump import Dump, GraphNode
from commpass.errors import CommpassError

SMALL = 80
"""Up to so many nodes an SVG shows all of them unless it was told otherwise."""
NEAR = 2
"""Edges from a site or inserted node within which a bigger graph is shown."""

LEGEND = {"site": "a site (collective)", "inserted": "inserted for a site", "plain": "as it was"}
MARKS = {"site": "*", "inserted": "+", "plain": " "}
COLOURS = {"site": "#ffcf8a", "inserted": "#b5dcff", "plain": "#f4f4f4"}


@dataclass(frozen=True)
class View:
    """The part of a graph that is to be shown. ``edge`` holds the nodes with neighbours that are not shown."""

    title: str
    nodes: tuple[GraphNode, ...]
    edge: frozenset[str] = frozenset()

    def edges(self) -> list[tuple[str, str]]:
        names = {node.name for node in self.nodes}
        return [(source, node.name) for node in self.nodes for source in dict.fromkeys(node.inputs) if source in names]


def kind(node: GraphNode) -> str:
    return "inserted" if node.inserted else "site" if node.site else "plain"


def clean(text: str) -> str:
    """One line without control characters: a name must not break a line, a terminal or an XML file."""
    return "".join(char if char.isprintable() else " " for char in text)


def view(dump: Dump, *, before: bool, around: int | None) -> View:
    """The nodes within ``around`` edges of a site or an inserted node; all nodes for None."""
    nodes = dump.before if before else dump.after
    kinds = [kind(node) for node in nodes]
    counts = [f"{len(nodes)} nodes", f"{kinds.count('site')} sites"]
    if not before:
        counts.append(f"{kinds.count('inserted')} inserted")
    title = f"graph {dump.number}: {dump.plan.direction}, {'before' if before else 'after'} ({', '.join(counts)})"
    if dump.plan.fallback:
        title += ", FALLBACK: the untouched graph was compiled"
    if around is None:
        return View(clean(title), nodes)
    near = {node.name for node in nodes if kind(node) != "plain"}
    if nodes and not near:
        raise CommpassError(f"graph {dump.number} has no site to draw the surroundings of: draw it with --around all")
    neighbours: dict[str, set[str]] = {node.name: set() for node in nodes}
    for source, user in View("", nodes).edges():
        neighbours[source].add(user)
        neighbours[user].add(source)
    for _ in range(around):
        near |= {other for name in near for other in neighbours[name]}
    if len(near) < len(nodes):
        title += f", {len(nodes) - len(near)} nodes farther than {around} from a site hidden"
    edge = frozenset(name for name in near if neighbours[name] - near)
    return View(clean(title), tuple(node for node in nodes if node.name in near), edge)


def text(shown: View) -> str:
    """One line a node, in graph order."""
    calls = [(node.name if node.op == "placeholder" else call(node)) for node in shown.nodes]
    lines = [shown.title, "  ".join(f"{MARKS[kind]} {LEGEND[kind]}" for kind in ("site", "inserted")), ""]
    names = max((min(len(node.name), 32) for node in shown.nodes), default=0)
    width = max((min(len(call), 64) for call in calls), default=0)
    for node, written in zip(shown.nodes, calls, strict=True):
        about = (node.module, f"for {node.site}" if node.inserted and node.site else "")
        line = f"{MARKS[kind(node)]} {node.name:{names}} = {written:{width}}  {node.value}  {'  '.join(filter(None, about))}"
        lines.append(clean(line).rstrip())
    if not shown.nodes:
        lines.append("no nodes were recorded")
    return "\n".join(lines)


def call(node: GraphNode) -> str:
    what = node.op if node.op == "output" else node.target
    return f"{what}({', '.join(node.inputs)})"


def quoted(*lines: str) -> str:
    """A DOT string: backslash and quote escaped, so that any name is one."""
    return '"' + "\\n".join(clean(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'


def labels(node: GraphNode) -> list[str]:
    """What stands in the box of a node: name, what it calls, its value, the site it serves."""
    called = node.target if node.op.startswith("call") else node.op
    served = f"for {node.site}" if node.inserted and node.site else ""
    return [line for line in (node.name, called if called != node.name else "", node.value, served) if line]


def dot(shown: View) -> str:
    """Graphviz source, with the inserted nodes of a site in one cluster."""
    lines = [
        f"digraph {quoted(shown.title)} {{",
        f"  graph [labelloc=t, fontname=monospace, label={quoted(shown.title, 'orange: site, blue: inserted for a site')}];",
        '  node [shape=box, style="rounded,filled", fontname=monospace, fontsize=10];',
    ]
    clusters: dict[str, list[GraphNode]] = {}
    for node in shown.nodes:
        clusters.setdefault((node.site or "") if node.inserted else "", []).append(node)
    for number, (site, nodes) in enumerate(clusters.items()):
        if site:
            lines += [f"  subgraph cluster_{number} {{", f"  label={quoted(site)}; style=rounded; color={quoted('#5c9bd1')};"]
        for node in nodes:
            dashed = ', style="rounded,filled,dashed"' if node.name in shown.edge else ""
            fill = quoted(COLOURS[kind(node)])
            lines.append(f"  {quoted(node.name)} [label={quoted(*labels(node))}, fillcolor={fill}{dashed}];")
        if site:
            lines.append("  }")
    lines += [f"  {quoted(source)} -> {quoted(user)};" for source, user in shown.edges()]
    return "\n".join([*lines, "}"])


# The SVG has layers from top to bottom; all lengths are inches. A long edge passes the layers between its ends as a
# narrow stand-in, so that it never runs below a box. Each connected part is laid out alone, and the parts fill rows.

FONT = 7.0  # points
CHAR, LINE = 0.61 * FONT / 72, 1.3 * FONT / 72
BOX, LAYER, GAP = 4 * LINE + 0.1, 4 * LINE + 0.5, 0.16
HEAD = 0.75
LONGEST = 40
"""Characters of a label line in an SVG; DOT and text have all of them."""

Name = str | tuple[str, str, int]
"""A node, or the stand-in of an edge (source, user) in a layer."""


@dataclass(frozen=True)
class Part:
    """A connected part: the middle of each node and stand-in, from the top left, and the way of each edge."""

    places: dict[Name, tuple[float, float]]
    roads: list[list[Name]]
    width: float
    height: float


def cut(line: str) -> str:
    line = clean(line)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 15]}...{line[-12:]}"


def lay_out(graph: Any, widths: Mapping[str, float]) -> Part:
    """Layers of a connected graph with few crossings and each node near its neighbours."""
    import networkx

    try:
        generations = list(networkx.topological_generations(graph))
    except networkx.NetworkXUnfeasible as error:
        raise CommpassError("the nodes of this graph form a circle: the dump is damaged") from error
    depth = {name: level for level, names in enumerate(generations) for name in names}
    for name in generations[0]:  # an input stands right above its first user, not in one endless row at the top
        depth[name] = min((depth[user] for user in graph.successors(name)), default=1) - 1
    layers: list[list[Name]] = [[] for _ in generations]
    for name in graph:
        layers[depth[name]].append(name)
    roads = []
    near: dict[Name, set[Name]] = {name: set() for name in graph}
    for source, user in graph.edges:
        road: list[Name] = [source, *((source, user, level) for level in range(depth[source] + 1, depth[user])), user]
        for level, name in enumerate(road[1:-1], depth[source] + 1):
            layers[level].append(name)
        for one, other in pairwise(road):
            near.setdefault(one, set()).add(other)
            near.setdefault(other, set()).add(one)
        roads.append(road)
    untangle(layers, near)
    wide = {name: widths[name] if isinstance(name, str) else 0.06 for layer in layers for name in layer}
    x = spread(layers, near, wide)
    left = min(x[name] - wide[name] / 2 for name in x)
    places = {name: (x[name] - left, level * LAYER + BOX / 2) for level, layer in enumerate(layers) for name in layer}
    width = max(places[name][0] + wide[name] / 2 for name in x)
    return Part(places, roads, width, (len(layers) - 1) * LAYER + BOX)


def mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def untangle(layers: list[list[Name]], near: Mapping[Name, set[Name]]) -> None:
    """Sorts each layer by where its neighbours stand in the layer above, then in the one below, a few times."""
    for sweep in range(10):
        down = sweep % 2 == 0
        for layer, beside in zip(layers[1:], layers, strict=False) if down else pairwise_back(layers):
            at = {name: float(index) for index, name in enumerate(beside)}
            want = {name: mean([at[n] for n in near[name] if n in at], index) for index, name in enumerate(layer)}
            layer.sort(key=want.__getitem__)


def spread(layers: Sequence[Sequence[Name]], near: Mapping[Name, set[Name]], wide: Mapping[Name, float]) -> dict[Name, float]:
    """Moves each node as near to the middle of its neighbours as its layer allows. Order and distances are kept."""
    x: dict[Name, float] = {}
    for layer in layers:
        edge = -sum(wide[name] + GAP for name in layer) / 2
        for name in layer:
            x[name] = edge + wide[name] / 2
            edge += wide[name] + GAP
    for sweep in range(24):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            want = [mean([x[other] for other in near[name]], x[name]) for name in layer]
            apart = [(wide[one] + wide[other]) / 2 + GAP for one, other in pairwise(layer)]
            lefts, rights = want[:], want[:]  # as wanted or pushed to the right; as wanted or pushed to the left
            for index, distance in enumerate(apart):
                lefts[index + 1] = max(want[index + 1], lefts[index] + distance)
            for index, distance in reversed(list(enumerate(apart))):
                rights[index] = min(want[index], rights[index + 1] - distance)
            x.update((name, (a + b) / 2) for name, a, b in zip(layer, lefts, rights, strict=True))
    return x


def figure(shown: View) -> Any:
    """The drawing as a matplotlib figure."""
    try:
        import networkx
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
        from matplotlib.path import Path as Curve
    except ImportError as error:
        raise CommpassError(f"an SVG needs networkx and matplotlib ({error}): pip install 'commpass[graph]'") from error
    texts = {node.name: [cut(line) for line in labels(node)] for node in shown.nodes}
    widths = {name: max(map(len, lines)) * CHAR + 0.14 for name, lines in texts.items()}
    whole = networkx.DiGraph()
    whole.add_nodes_from(texts)
    whole.add_edges_from(shown.edges())
    rank = {name: index for index, name in enumerate(texts)}
    groups = [sorted(names, key=rank.__getitem__) for names in networkx.weakly_connected_components(whole)]
    groups.sort(key=lambda names: (len(names) == 1, rank[names[0]]))
    parts = []
    for names in groups:
        graph = networkx.DiGraph()
        graph.add_nodes_from(names)
        graph.add_edges_from(whole.edges(names))
        parts.append(lay_out(graph, widths))
    row = max([7.0, *(part.width for part in parts), 1.3 * sum(part.width * part.height for part in parts) ** 0.5])
    corners, x, y, tall = [], 0.0, 0.0, 0.0
    for part in parts:
        if x and x + part.width > row:
            x, y, tall = 0.0, y + tall + LAYER - BOX, 0.0
        corners.append((x, y))
        x, tall = x + part.width + 3 * GAP, max(tall, part.height)
    width, height = row + 2 * GAP, y + tall + HEAD + GAP
    drawing = Figure(figsize=(width, height))
    axes = drawing.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-GAP, row + GAP), ylim=(y + tall + GAP, -HEAD))
    axes.axis("off")
    
    return drawing
