"""One graph of a dump as text, as Graphviz DOT or as an SVG file. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
COLOUR_NAMES = {"site": "orange", "inserted": "blue", "plain": "grey"}


@dataclass(frozen=True)
class View:
    """The part of a graph that is to be shown. ``edge`` holds the nodes with neighbours that are
    not shown."""

    title: str
    nodes: tuple[GraphNode, ...]
    edge: frozenset[str] = frozenset()

    def edges(self) -> list[tuple[str, str]]:
        """What each node takes. Of a buffer that kernels write into, that is what they wrote."""
        names = {node.name for node in self.nodes}
        writers: dict[str, list[str]] = {
            node.name: [] for node in self.nodes if node.target == BUFFER
        }
        edges: list[tuple[str, str]] = []
        for node in self.nodes:
            taken = [each for each in dict.fromkeys(node.inputs) if each in names]
            for source in taken:
                edges += [(each, node.name) for each in writers.get(source) or (source,)]
            if node.target == KERNEL:
                for source in taken:  # buffers that it writes into come last
                    if source in writers and (not writers[source] or source == node.inputs[-1]):
                        writers[source].append(node.name)
        return list(dict.fromkeys(edges))


BUFFER, KERNEL = "aten.empty.memory_format", "commpass.kernel_.default"
"""What a kernel that a CPU calls writes into, and the call."""


def nodes_of(dump: Dump, side: str) -> tuple[GraphNode, ...]:
    """The nodes of a graph as it was found, with coded operators, or as it was compiled."""
    lowered = dump.lowered or dump.after  # dumps of before there were coded operators
    return {"before": dump.before, "after": dump.after, "lowered": lowered}[side]


def kind(node: GraphNode) -> str:
    return "inserted" if node.inserted else "site" if node.site else "plain"


def _kinds(shown: View) -> list[str]:
    """The kinds of nodes that are shown, in the order of the legend."""
    found = set(map(kind, shown.nodes))
    return [each for each in LEGEND if each in found]


def clean(text: str) -> str:
    """One line without control characters: a name must not break a line, a terminal or an XML
    file."""
    return "".join(char if char.isprintable() else " " for char in text)


SIDES = ("before", "after", "lowered")


def view(dump: Dump, *, side: str = "after", around: int | None) -> View:
    """The nodes of one side within ``around`` edges of a site or an inserted node; all nodes for
    None."""
    nodes = nodes_of(dump, side)
    kinds = [kind(node) for node in nodes]
    sites, inserted = kinds.count("site"), kinds.count("inserted")
    rewritten = len({node.site for node in nodes if node.inserted})
    counts = f"{len(nodes)} nodes, {sites} site{'s' * (sites != 1)}"
    if side != "before":
        counts += f" left alone, {rewritten} rewritten with {inserted} inserted nodes"
    title = f"graph {dump.number}: {dump.plan.direction}, {side} ({counts})"
    if dump.plan.fallback:
        title += ", FALLBACK: the untouched graph was compiled"
    if around is None:
        return View(clean(title), nodes)
    near = {node.name for node in nodes if kind(node) != "plain"}
    if nodes and not near:
        raise CommpassError(
            f"graph {dump.number} has no site to draw the surroundings of: draw it with"
            " --around all"
        )
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
    calls = [call(node) for node in shown.nodes]
    lines = [
        shown.title,
        "  ".join(f"{MARKS[each]} {LEGEND[each]}" for each in _kinds(shown) if each != "plain"),
        "",
    ]
    names = max((min(len(node.name), 32) for node in shown.nodes), default=0)
    width = max((min(len(call), 64) for call in calls), default=0)
    values = max((min(len(node.value), 24) for node in shown.nodes), default=0)
    for node, written in zip(shown.nodes, calls, strict=True):
        about = (node.module, _part(node), f"for {node.site}" if _serves(node) else "")
        head = f"{MARKS[kind(node)]} {node.name:{names}} = {written:{width}}"
        lines.append(
            clean("  ".join((head, f"{node.value:{values}}", *filter(None, about)))).rstrip()
        )
    if not shown.nodes:
        lines.append("no nodes were recorded")
    return "\n".join(lines)


def _serves(node: GraphNode) -> bool:
    return bool(node.inserted and node.site)


def _part(node: GraphNode) -> str:
    """What an inserted node does, and in which exchange of its algorithm."""
    return f"{node.role} of hop {node.hop}" if node.role else ""


def call(node: GraphNode) -> str:
    if node.op in ("placeholder", "get_attr"):
        return node.op if node.target == node.name else f"{node.op} {node.target}"
    return f"{node.op if node.op == 'output' else node.target}({', '.join(node.inputs)})"


def quoted(*lines: str) -> str:
    """A DOT string: backslash and quote escaped, so that any name is one."""
    return (
        '"'
        + "\\n".join(clean(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
        + '"'
    )


def labels(node: GraphNode) -> list[str]:
    """What stands in the box of a node: name, what it calls, its value, what it does for which
    site."""
    called = node.target if node.op.startswith("call") else node.op
    served = " ".join(filter(None, (_part(node), f"for {node.site}"))) if _serves(node) else ""
    return [
        line
        for line in (node.name, called if called != node.name else "", node.value, served)
        if line
    ]


def dot(shown: View) -> str:
    """Graphviz source, with the inserted nodes of a site in one cluster."""
    legend = ", ".join(f"{COLOUR_NAMES[each]}: {LEGEND[each]}" for each in _kinds(shown))
    lines = [
        f"digraph {quoted(shown.title)} {{",
        (f"  label={quoted(shown.title, legend)}; labelloc=t; fontname=monospace;"),
        '  node [shape=box, style="rounded,filled", fontname=monospace, fontsize=10];',
    ]
    clusters: dict[str, list[GraphNode]] = {}
    for node in shown.nodes:
        clusters.setdefault((node.site or "") if node.inserted else "", []).append(node)
    for number, (site, nodes) in enumerate(clusters.items()):
        if site:
            lines += [
                f"  subgraph cluster_{number} {{",
                f"  label={quoted(site)}; style=rounded; color={quoted('#5c9bd1')};",
            ]
        for node in nodes:
            dashed = ', style="rounded,filled,dashed"' if node.name in shown.edge else ""
            fill = quoted(COLOURS[kind(node)])
            lines.append(
                f"  {quoted(node.name)} [label={quoted(*labels(node))}, fillcolor={fill}{dashed}];"
            )
        if site:
            lines.append("  }")
    lines += [f"  {quoted(source)} -> {quoted(user)};" for source, user in shown.edges()]
    return "\n".join([*lines, "}"])


# The SVG has layers from top to bottom; all lengths are inches. A long edge passes the layers
# between its ends as a narrow stand-in, so that it never runs below a box. Each connected part is
# laid out alone, and the parts fill rows.

FONT = 7.0  # points
CHAR, LINE = 0.61 * FONT / 72, 1.3 * FONT / 72
BOX, PORT, LAYER, GAP, HEAD = 4 * LINE + 0.1, 2 * LINE + 0.1, 4 * LINE + 0.5, 0.16, 0.8
LONGEST = 40
"""Characters of a label line in an SVG; DOT and text have all of them."""

Name = str | tuple[str, str, int]
"""A node, or the stand-in of an edge (source, user) in a layer."""
Places = dict[Name, tuple[float, float]]


def cut(line: str) -> str:
    line = clean(line).removesuffix(".default")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 15]}...{line[-12:]}"


def lay_out(graph: Any, widths: Mapping[Name, float]) -> tuple[Places, list[list[Name]]]:
    """The middle of every node and stand-in of a connected graph, from the top left, and the way of
    each edge."""
    import networkx

    try:
        generations = list(networkx.topological_generations(graph))
    except networkx.NetworkXUnfeasible as error:
        raise CommpassError("the nodes of this graph form a circle: the dump is damaged") from error
    depth = {name: level for level, names in enumerate(generations) for name in names}
    for name in generations[
        0
    ]:  # an input stands right above its first user, not in one endless row at the top
        depth[name] = min((depth[user] for user in graph.successors(name)), default=1) - 1
    layers: list[list[Name]] = [[] for _ in generations]
    for name in graph:
        layers[depth[name]].append(name)
    near: dict[Name, set[Name]] = {name: set() for name in graph}
    roads = []
    for source, user in graph.edges:
        road: list[Name] = [
            source,
            *((source, user, level) for level in range(depth[source] + 1, depth[user])),
            user,
        ]
        for level, name in enumerate(road[1:-1], depth[source] + 1):
            layers[level].append(name)
        for one, other in pairwise(road):
            near.setdefault(one, set()).add(other)
            near.setdefault(other, set()).add(one)
        roads.append(road)
    untangle(layers, near)
    wide = {name: widths.get(name, 0.06) for name in near}
    x = spread(layers, near, wide)
    left = min(x[name] - wide[name] / 2 for name in x)
    return {
        name: (x[name] - left, row * LAYER + BOX / 2)
        for row, layer in enumerate(layers)
        for name in layer
    }, roads


def mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def untangle(layers: Sequence[list[Name]], near: Mapping[Name, set[Name]]) -> None:
    """Sorts each layer by where its neighbours stand in the layer above, then in the one below, a
    few times."""
    for sweep in range(10):
        for beside, layer in pairwise(reversed(layers) if sweep % 2 else layers):
            at = {name: float(index) for index, name in enumerate(beside)}
            want = {
                name: mean([at[n] for n in near[name] if n in at], index)
                for index, name in enumerate(layer)
            }
            layer.sort(key=want.__getitem__)


def spread(
    layers: Sequence[list[Name]], near: Mapping[Name, set[Name]], wide: Mapping[Name, float]
) -> dict[Name, float]:
    """Moves each node as near to the middle of its neighbours as its layer allows; no two overlap,
    order is kept."""
    x = dict.fromkeys(near, 0.0)
    for sweep in range(60):
        for layer in reversed(layers) if sweep % 2 else layers:
            want = [mean([x[other] for other in near[name]], x[name]) for name in layer]
            apart = [(wide[one] + wide[other]) / 2 + GAP for one, other in pairwise(layer)]
            right, left = (
                want[:],
                want[:],
            )  # each at its wish or pushed to the right, or to the left: take the middle
            for index, distance in enumerate(apart):
                right[index + 1] = max(want[index + 1], right[index] + distance)
            for index, distance in reversed(list(enumerate(apart))):
                left[index] = min(want[index], left[index + 1] - distance)
            x.update((name, (a + b) / 2) for name, a, b in zip(layer, left, right, strict=True))
    return x


def box(
    axes: Any, x: float, y: float, lines: Sequence[str], *, width: float, what: str, dashed: bool
) -> None:
    from matplotlib.patches import FancyBboxPatch

    tall = len(lines) * LINE + 0.1
    style = "round,pad=0,rounding_size=0.05"
    corner = (x - width / 2, y - tall / 2)
    fill, line = COLOURS[what], (0, (3, 2)) if dashed else "-"
    axes.add_patch(
        FancyBboxPatch(corner, width, tall, style, fc=fill, ec="#555555", lw=0.7, ls=line, zorder=3)
    )
    axes.text(
        x,
        y,
        "\n".join(lines),
        size=FONT,
        family="monospace",
        ha="center",
        va="center",
        zorder=4,
        parse_math=False,
    )


def figure(shown: View) -> Any:
    """The drawing as a matplotlib figure."""
    try:
        import networkx
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path as Curve
    except ImportError as error:
        raise CommpassError(
            f"an SVG needs networkx and matplotlib ({error}): pip install 'commpass[graph]'"
        ) from error
    lines = {node.name: [cut(line) for line in labels(node)] for node in shown.nodes}
    widths: dict[Name, float] = {
        name: max(map(len, label)) * CHAR + 0.2 for name, label in lines.items()
    }
    half: dict[Name, float] = {name: (len(label) * LINE + 0.1) / 2 for name, label in lines.items()}
    whole = networkx.DiGraph()
    whole.add_nodes_from(lines)
    whole.add_edges_from(shown.edges())
    parts = []
    for names in sorted(
        networkx.weakly_connected_components(whole), key=lambda names: len(names) == 1
    ):
        part = networkx.DiGraph()
        part.add_nodes_from(name for name in lines if name in names)
        part.add_edges_from(whole.edges(names))
        places, roads = lay_out(part, widths)
        width = max(x + widths.get(name, 0) / 2 for name, (x, _) in places.items())
        parts.append((places, roads, width, max(y for _, y in places.values()) + BOX / 2))
    row = 1.3 * sum(width * height for _, _, width, height in parts) ** 0.5
    drawing = Figure()
    axes = drawing.add_axes((0, 0, 1, 1))
    axes.text(
        0,
        0.2 - HEAD,
        shown.title,
        size=9,
        family="monospace",
        weight="bold",
        va="center",
        parse_math=False,
    )
    dashes = [("plain", "has neighbours not shown", True)] if shown.edge else []
    for index, (what, meaning, dashed) in enumerate(
        [*((each, LEGEND[each], False) for each in _kinds(shown)), *dashes]
    ):
        box(axes, 0.9 + 1.85 * index, 0.48 - HEAD, [meaning], width=1.75, what=what, dashed=dashed)
    left = top = bottom = 0.0
    right = max(7.4, len(shown.title) * 0.078)
    for places, roads, width, height in parts:
        if left and left + width > row:
            left, top = 0.0, bottom + LAYER - BOX
        at = {name: (left + x, top + y) for name, (x, y) in places.items()}
        right, bottom = max(right, left + width), max(bottom, top + height)
        left += width + 3 * GAP
        for road in roads:
            x, y = at[road[0]]
            points, codes = [(x, y + half[road[0]]), (x, y + PORT)], [Curve.MOVETO, Curve.LINETO]
            for name in road[1:]:
                (x0, y0), (x, y) = points[-1], at[name]
                middle = (y0 + y - PORT) / 2
                points += [(x0, middle), (x, middle), (x, y - PORT), (x, y - half.get(name, -PORT))]
                codes += [Curve.CURVE4, Curve.CURVE4, Curve.CURVE4, Curve.LINETO]
            path = Curve(points, codes)
            axes.add_patch(
                FancyArrowPatch(
                    path=path, arrowstyle="-|>", mutation_scale=6, lw=0.6, color="#777777"
                )
            )
        for node in shown.nodes:
            if node.name in at:
                x, y = at[node.name]
                dashed = node.name in shown.edge
                box(
                    axes,
                    x,
                    y,
                    lines[node.name],
                    width=widths[node.name],
                    what=kind(node),
                    dashed=dashed,
                )
    axes.set(xlim=(-GAP, right + GAP), ylim=(bottom + GAP, -HEAD))
    axes.axis("off")
    drawing.set_size_inches(right + 2 * GAP, bottom + HEAD + GAP)
    return drawing


def svg(shown: View, path: Path) -> None:
    drawing = figure(shown)
    from matplotlib import rc_context

    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "commpass"}
    ):  # text stays text; the same bytes each time
        drawing.savefig(path, format="svg", metadata={"Date": None})
