"""Show a graph of a dump node by node: as lines of text, or as a picture of boxes."""

from __future__ import annotations

from commpass.errors import CommpassError
from commpass.plan.dump import Dump, GraphNode
from commpass.report.graph.picture import (
    BOX_STYLES,
    Arrow,
    Box,
    Edges,
    Picture,
    inputs_of,
    near,
    restricted,
    travels,
)
from commpass.utils.printable import clean, plural


def nodes_of(dump: Dump, side: str) -> tuple[GraphNode, ...]:
    """Return the nodes of a graph as it was found, with coded operators, or as it was compiled."""
    lowered = dump.lowered or dump.after  # older dumps have no coded operators
    return {"before": dump.before, "after": dump.after, "lowered": lowered}[side]


def kind(node: GraphNode) -> str:
    if travels(node) or (node.site and not node.inserted):
        return "transfer"
    return "inserted" if node.inserted else "plain"


def serves(node: GraphNode) -> bool:
    """Return whether it is a site, or was inserted for one."""
    return bool(node.inserted or node.site)


def select_nodes(
    dump: Dump, side: str, radius: int | None
) -> tuple[tuple[GraphNode, ...], Edges, str]:
    """Return the nodes of one side within ``radius`` edges of a site or an inserted node.

    All nodes are returned for None. Also return the edges of all, and a title that counts them.
    Raise CommpassError if there is no such site or node.
    """
    nodes = nodes_of(dump, side)
    edges = inputs_of(nodes)
    served = {node.name for node in nodes if serves(node)}
    if radius is None:
        return nodes, edges, titled(dump, side)
    if nodes and not served:
        raise CommpassError(
            f"graph {dump.number} has no site to draw the surroundings of: draw it with"
            " --around all"
        )
    shown = near(edges, served, radius)
    some = tuple(node for node in nodes if node.name in shown)
    left = len(nodes) - len(some)
    more = f", {left} nodes farther than {radius} from a site hidden" if left else ""
    return some, edges, titled(dump, side) + more


def titled(dump: Dump, side: str) -> str:
    nodes = nodes_of(dump, side)
    sites = sum(bool(node.site) and not node.inserted for node in nodes)
    inserted = sum(node.inserted for node in nodes)
    rewritten = len({node.site for node in nodes if node.inserted})
    counts = f"{len(nodes)} nodes, {plural(sites, 'site')}"
    if side != "before":
        counts += f" uncompressed, {rewritten} rewritten with {inserted} inserted nodes"
    return clean(f"graph {dump.number}: {dump.plan.direction}, {side} ({counts}){fallback(dump)}")


def fallback(dump: Dump) -> str:
    return ", FALLBACK: the untouched graph was compiled" if dump.plan.fallback else ""


def text(dump: Dump, side: str, radius: int | None) -> str:
    """Return one line for each node, in graph order."""
    nodes, _, title = select_nodes(dump, side, radius)
    calls = [call(node) for node in nodes]
    kinds = [each for each in BOX_STYLES if any(kind(node) == each != "plain" for node in nodes)]
    lines = [title, "  ".join(f"{BOX_STYLES[k].mark} {BOX_STYLES[k].meaning}" for k in kinds), ""]
    names = max((min(len(node.name), 32) for node in nodes), default=0)
    width = max((min(len(call), 64) for call in calls), default=0)
    values = max((min(len(node.value), 24) for node in nodes), default=0)
    for node, written in zip(nodes, calls, strict=True):
        about = (node.module, _part(node), _served(node))
        head = f"{BOX_STYLES[kind(node)].mark} {node.name:{names}} = {written:{width}}"
        lines.append(
            clean("  ".join((head, f"{node.value:{values}}", *filter(None, about)))).rstrip()
        )
    if not nodes:
        lines.append("no nodes were recorded")
    return "\n".join(lines)


def _served(node: GraphNode) -> str:
    return f"for {node.site}" if node.inserted and node.site else ""


def _part(node: GraphNode) -> str:
    """Return what an inserted node does, and in which exchange of its algorithm."""
    return f"{node.role} of hop {node.hop}" if node.role else ""


def call(node: GraphNode) -> str:
    if node.op in ("placeholder", "get_attr"):
        return node.op if node.target == node.name else f"{node.op} {node.target}"
    return f"{node.op if node.op == 'output' else node.target}({', '.join(node.inputs)})"


def picture(dump: Dump, side: str, radius: int | None) -> Picture:
    """Return one box for each node, with the nodes of a site in one frame."""
    some, edges, title = select_nodes(dump, side, radius)
    nodes = nodes_of(dump, side)
    boxes = tuple(
        Box(node.name, kind(node), labels(node), (node.site or "") if node.inserted else "")
        for node in nodes
    )
    arrows = tuple(Arrow(source, name) for name in edges for source in edges[name])
    whole = Picture(title, boxes, arrows)
    return restricted(whole, edges, {node.name for node in some}, cut=True)


def labels(node: GraphNode) -> tuple[str, ...]:
    """Return the lines of a node's box: name, called function, value, and role with site."""
    called = node.target if node.op.startswith("call") else node.op
    served = " ".join(filter(None, (_part(node), _served(node))))
    lines = (node.name, called if called != node.name else "", node.value, served)
    return tuple(line for line in lines if line)
