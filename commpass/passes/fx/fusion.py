"""The memory traffic of the operators that Inductor fuses on a GPU.

Inductor puts neighbouring pointwise operators and reductions into one kernel: a producer and its
readers, and readers of the same value. Only what other kernels need is written to memory, and each
input is read once. Two neighbours are not in one kernel if one of them also waits for a matmul, an
exchange or another separate kernel. This is an approximation: Inductor has further rules, such as
limits on the size of a kernel.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from operator import getitem

from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import is_alias
from commpass.passes.fx.marks import CODED, MARK
from commpass.passes.fx.ops import PLAIN, is_matmul

SELECTING = {"embedding", "index", "index_select", "gather", "_unsafe_index"}
"""The names of operators that read only as much of their source as they write."""


@dataclass(frozen=True)
class Traffic:
    """The bytes that a node adds to the memory traffic of its fused kernel, and 1 for the first
    node of a kernel, else 0."""

    nbytes: int
    kernels: int


def traffic(graph: fx.Graph) -> dict[fx.Node, Traffic]:
    """Return the traffic of the nodes that Inductor can fuse. Sizes that are not known count as
    0."""
    groups = _Groups()
    for node in graph.nodes:
        groups.add(node)
    found: dict[fx.Node, Traffic] = {}
    read = set[tuple[fx.Node, fx.Node]]()
    begun = set[fx.Node]()
    for node in list(groups.root):
        own, nbytes = groups.find(node), 0
        is_mutable = node.target._schema.is_mutable  # type: ignore[union-attr]
        if not groups.readers[node] and not is_mutable:
            found[node] = Traffic(0, 0)  # Inductor removes it
            continue
        writes_input = is_mutable and any(each.op == "placeholder" for each in groups.sources[node])
        for source, view in groups.sources[node].items():
            if groups.is_inside(source, own) or (own, source) in read:
                continue
            read.add((own, source))
            nbytes += _read_nbytes(node, source, view)
        if writes_input or not all(groups.is_inside(each, own) for each in groups.readers[node]):
            nbytes += meta.total_nbytes(node.meta["val"])
        found[node] = Traffic(nbytes, int(own not in begun and nbytes > 0))
        if nbytes:
            begun.add(own)
    return found


class _Groups:
    """The fused kernels of a graph, as sets of nodes."""

    def __init__(self) -> None:
        self.root: dict[fx.Node, fx.Node] = {}
        self.sources: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._base: dict[fx.Node, fx.Node] = {}
        self._depth: dict[fx.Node, int] = {}
        self._separate = set[fx.Node]()
        self._first: dict[tuple[fx.Node, int], fx.Node] = {}

    def add(self, node: fx.Node) -> None:
        """Add a node after its inputs."""
        sources = {self._base.get(each, each): each for each in node.all_input_nodes}
        depths = (self._depth[each] + (each in self._separate) for each in sources)
        self._depth[node] = max(depths, default=0)
        if sources and (is_alias(node) or node.target is getitem):
            self._base[node] = next(iter(sources))
            return
        sources = {each: view for each, view in sources.items() if not _is_constant(each)}
        self.sources[node] = sources
        if _is_constant(node):
            return
        if _can_fuse(node):
            self.root[node] = node
            depth = self._depth[node]
            for source in sources:
                if source in self.root and self._depth[source] == depth:
                    self._join(source, node)
                self._join(self._first.setdefault((source, depth), node), node)
        elif node.op == "call_function" and meta.total_nbytes(node.meta.get("val")):
            self._separate.add(node)
        for source in sources:
            self.readers[source].append(node)

    def find(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for the kernel of a node."""
        while self.root[node] is not node:
            self.root[node] = node = self.root[self.root[node]]
        return node

    def _join(self, node: fx.Node, neighbour: fx.Node) -> None:
        self.root[self.find(node)] = self.find(neighbour)

    def is_inside(self, node: fx.Node, kernel: fx.Node) -> bool:
        """Whether a node belongs to a kernel."""
        return node in self.root and self.find(node) is kernel


def _is_constant(node: fx.Node) -> bool:
    """Whether a node has no inputs, such as ``full``. Inductor computes its values where they are
    used."""
    return getattr(node.target, "namespace", "") in PLAIN and not node.all_input_nodes


def _can_fuse(node: fx.Node) -> bool:
    """Whether a node is a pointwise operator, a reduction, or another one that Inductor fuses."""
    return (
        getattr(node.target, "namespace", "") in PLAIN
        and not is_matmul(node)
        and MARK not in node.meta
        and CODED not in node.meta
        and meta.total_nbytes(node.meta.get("val")) > 0
    )


def _read_nbytes(node: fx.Node, source: fx.Node, view: fx.Node) -> int:
    """Return the bytes of a source that a node reads, through a view of it or as a whole."""
    nbytes = min(meta.total_nbytes(each.meta.get("val")) for each in (source, view))
    if getattr(node.target, "_opname", "") in SELECTING:
        return min(nbytes, meta.total_nbytes(node.meta["val"]))
    return nbytes
