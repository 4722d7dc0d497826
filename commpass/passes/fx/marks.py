"""What an inserted node says of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from commpass.codecs import operators
from commpass.passes.fx.parse import graph_modules, is_wait, parse

MARK = "commpass"
"""Key in ``node.meta`` of an inserted node: its ``Mark``."""
PARTS = "commpass_parts"
"""Key in ``node.meta`` of a batch, of which positions now carry bytes: each of those, to the name
of its site."""
CODED = "commpass_coded"
"""Key in ``node.meta`` of what coded operators became: what it encodes and decodes, each as name of
the codec, role and number of values. Of the nodes that stand for one operator the last has it."""
ALLOWED = "commpass_allowed"
"""Key in ``node.meta`` of a collective: by the position of its input, what it is allowed."""
SEGMENTS = "commpass_segments"
"""Key in ``node.meta`` of a collective that stands for several: module and shape of each."""
AFTER_A_WAIT = ("wait", "decode", "used_bytes", "sum", "leave")


@dataclass(frozen=True)
class Mark:
    """``site`` is the name of the site that a node was inserted for; ``hop`` the number of the
    exchange that it prepares or follows; ``role`` what it does: enter, encode, exchange, wait,
    decode, used_bytes, sum or leave, layout for what only moves values, or state; ``chunk`` which
    of several exchanges of one hop."""

    site: str
    hop: int
    role: str
    chunk: int = 0


def chunked(gm: fx.GraphModule) -> bool:
    """Whether exchanges of several chunks were inserted into a graph."""
    return any(
        node.meta[MARK].chunk > 0
        for _, module in graph_modules(gm)
        for node in module.graph.nodes
        if MARK in node.meta
    )


def role(node: fx.Node) -> str:
    """What a node of an algorithm does."""
    if node.target in operators.ROLES:
        return operators.ROLES[node.target]
    if is_wait(node):
        return "wait"
    return "exchange" if parse(node) is not None else "layout"


def marks(graph: fx.Graph, site: str) -> dict[fx.Node, Mark]:
    """The marks of the nodes of a traced algorithm: hops are counted along the longest way from
    the input."""
    found: dict[fx.Node, Mark] = {}
    depth: dict[fx.Node, int] = {}
    exchanges: dict[int, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        before = max((depth[source] for source in node.all_input_nodes), default=0)
        does, chunk = role(node), 0
        depth[node] = before + (does == "exchange")
        hop = before - (does in AFTER_A_WAIT and before > 0)
        if does == "exchange":
            chunk = exchanges[hop] = exchanges.get(hop, -1) + 1
        elif does == "wait":
            chunk = found[node.all_input_nodes[0]].chunk
        found[node] = Mark(site, hop, does, chunk)
    last = max(exchanges, default=0)  # what comes after it prepares no other
    return {node: replace(mark, hop=min(mark.hop, last)) for node, mark in found.items()}
