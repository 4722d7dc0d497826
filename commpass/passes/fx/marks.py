"""The metadata of inserted nodes: which site a node belongs to, and its role."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from torch import fx

from commpass.codecs import operators
from commpass.lowering.exchange import EXCHANGE, START, WAIT
from commpass.passes.fx import meta
from commpass.passes.fx.parse import graph_modules, is_collective, is_wait, sources
from commpass.plan import SINGLE_KERNEL

MARK = "commpass"
"""The key of an inserted node's ``Mark`` in ``node.meta``."""
PARTS = "commpass_parts"
"""The key in ``node.meta`` of a batch with compressed positions. Maps each such position to its
site's name."""
CODED = "commpass_coded"
"""The key in ``node.meta`` of nodes that replace codec operators: what they encode and decode.

Each entry is codec name, role and number of values; for a matmul, the number of its operations and
of the bytes that it reads and writes. If several nodes replace one operator, the last one has it.
"""
US = "commpass_us"
"""The key in ``node.meta`` of a site in a single kernel: its predicted microseconds."""
SHARE = "commpass_share"
"""The key in ``node.meta`` of a start of a single kernel: the share of the GPU's processors that it
occupies."""
TUNABLE = "commpass_tunable"
"""The key in ``node.meta`` of a kernel call whose tile sizes can be timed: what it calls."""
ALLOWED = "commpass_allowed"
"""The key in ``node.meta`` of what a collective is allowed, by input position."""
SEGMENTS = "commpass_segments"
"""The key in ``node.meta`` of a fused collective: module and shape of each member."""
STRIDES = "eager_input_vals"
"""torch's key in ``node.meta`` of the fake arguments of an operator. Inductor gives it arguments of
these strides."""
AFTER_A_WAIT = ("wait", "decode", "used_bytes", "sum", "leave")


@dataclass(frozen=True)
class Mark:
    """The origin and role of an inserted node.

    ``site`` is the name of its site, and ``hop`` the number of the exchange that it prepares or
    follows. ``role`` is enter, encode, exchange, wait, decode, used_bytes, sum, leave, state or
    single_kernel, or layout for nodes that only move values. ``chunk`` numbers the exchanges of one
    hop.
    """

    site: str
    hop: int
    role: str
    chunk: int = 0

    def with_role(self, role: str) -> Mark:
        return Mark(self.site, self.hop, role, self.chunk)


def inherit(node: fx.Node, source: fx.Node, role: str | None = None) -> None:
    """Give an inserted node the metadata of another, with another ``role`` if one is given."""
    if MARK in source.meta:
        mark = source.meta[MARK]
        node.meta[MARK] = mark if role is None else mark.with_role(role)
    meta.carry(source, node)


def nodes_by_site(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Return the inserted nodes of each site, in graph order."""
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if MARK in node.meta:
            found[node.meta[MARK].site].append(node)
    return found


def chunked(gm: fx.GraphModule) -> bool:
    """Whether a graph contains inserted exchanges of several chunks."""
    return any(
        node.meta[MARK].chunk > 0
        for _, module in graph_modules(gm)
        for node in module.graph.nodes
        if MARK in node.meta
    )


def is_single_kernel(node: fx.Node) -> bool:
    """Whether a node is a site in a single kernel, or the start of one."""
    return node.target in (EXCHANGE, START)


def starts(node: fx.Node) -> bool:
    """Whether a node starts an exchange: a collective, or a single kernel in a separate
    stream."""
    return node.target is START or is_collective(node)


def waits(node: fx.Node) -> bool:
    """Whether a node waits for an exchange that another node has started."""
    return node.target is WAIT or is_wait(node)


def started_by(wait: fx.Node) -> list[fx.Node]:
    """Return the starts of the exchanges that a node waits for."""
    return [each for each in sources(wait) if starts(each)]


def has_single_kernels(gm: fx.GraphModule) -> bool:
    """Whether a graph contains sites in a single kernel."""
    return any(
        is_single_kernel(node) for _, module in graph_modules(gm) for node in module.graph.nodes
    )


def has_kernels_beside(gm: fx.GraphModule) -> bool:
    """Whether a graph starts single kernels in a separate stream."""
    return any(node.target is START for node in gm.graph.nodes)


def role(node: fx.Node) -> str:
    """Return the role of a node of an algorithm."""
    if node.target in operators.ROLES:
        return operators.ROLES[node.target]
    if is_single_kernel(node):
        return SINGLE_KERNEL
    if is_wait(node):
        return "wait"
    return "exchange" if is_collective(node) else "layout"


def marks(graph: fx.Graph, site: str) -> dict[fx.Node, Mark]:
    """Return the marks of a traced algorithm's nodes. Hops are counted along the longest path from
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
    last = max(exchanges, default=0)  # nodes after the last exchange prepare no other
    return {node: replace(mark, hop=min(mark.hop, last)) for node, mark in found.items()}
