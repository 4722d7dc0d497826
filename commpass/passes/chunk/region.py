"""What is done in chunks of rows around one collective: from the matmul before it to those after
it."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from commpass.passes.discover import GraphSite
from commpass.passes.graph import meta
from commpass.passes.graph.memory import Memory
from commpass.passes.graph.parse import is_wait
from commpass.passes.graph.rowwise import (
    Rows,
    bounds,
    is_contiguous,
    is_fixed,
    length,
    matmul_rows,
    rows_of,
    step_of,
)

LEAST = 16
"""Rows of a chunk: a matmul of fewer is hardly quicker."""
BLOCK = 2048
"""Values that all codecs' blocks divide: chunks are multiples of it where that is possible."""


@dataclass(frozen=True)
class Product:
    """What makes a collective's input: the ``matmul`` whose rows are cut, or what joins a matmul
    that has been cut, then views and casts, and its input last. ``rows`` is how each treats them,
    ``many`` how many there are."""

    nodes: tuple[fx.Node, ...]
    rows: dict[fx.Node, Rows]
    many: int

    @property
    def matmul(self) -> fx.Node:
        return self.nodes[0]


@dataclass(frozen=True)
class Region:
    """The nodes that are done chunk by chunk: the product, ``start`` and ``wait``, and the
    ``consumers``, each with its rows. Chunk i has the rows of the matmul from ``bounds[i]`` to
    ``bounds[i + 1]``."""

    product: Product
    start: fx.Node
    wait: fx.Node
    consumers: tuple[fx.Node, ...]
    rows: dict[fx.Node, Rows]
    bounds: tuple[int, ...]

    @property
    def chunks(self) -> int:
        return len(self.bounds) - 1

    def cut(self, node: fx.Node, dim: int) -> tuple[int, ...]:
        """Where chunks begin and end along a dimension of a node."""
        entries = length(node, dim)
        return tuple(row * entries // self.product.many for row in self.bounds)


def product_of(
    each: GraphSite, cut: Collection[fx.Node], known: Memory, written: Collection[int]
) -> Product | str:
    """What makes a site's input, or why no matmul does whose rows can be cut. ``cut`` are the nodes
    that join matmuls in chunks, ``written`` is the memory that something writes into."""
    start = each.call.node
    if each.call.form != "plain" or each.call.kind != "all_reduce":
        return f"only a plain all_reduce is split by rows, not {each.site.kind} ({each.call.form})"
    if each.site.dynamic:
        return "its size is symbolic"
    if each.site.obstacle:
        return each.site.obstacle
    if len(start.users) != 1 or not is_wait(next(iter(start.users))):
        return "not one node alone waits for it"
    chain = [each.input]
    while matmul_rows(chain[0]) is None and chain[0] not in cut:
        source = chain[0].args[0] if chain[0].args else None
        if chain[0].op != "call_function" or not isinstance(source, fx.Node):
            return "no matmul makes its input"
        chain.insert(0, source)
    for node, taker in zip(chain, [*chain[1:], start], strict=True):
        if others := [user for user in node.users if user is not taker]:
            what = "the matmul's result is used" if node is chain[0] else f"{node.name} is used"
            return f"{what} elsewhere ({others[0].name})"
        if any(number in written for number in known.touches[node]):
            return f"{node.name} takes or gives what is written in place"
        if not is_contiguous(node) and node is not chain[0]:
            return f"{node.name} has other strides than its rows"
    root = chain[0]
    rows = {root: matmul_rows(root) or Rows(0, ())}
    for node in chain[1:]:
        if (found := rows_of(node, {one: its.dim for one, its in rows.items()})) is None:
            return f"{node.name} does not compute each row alone"
        rows[node] = found
    if not all(map(is_fixed, chain)):
        return "its size is symbolic"
    return Product(tuple(chain), rows, length(root, 0))


def region_of(
    product: Product,
    start: fx.Node,
    chunks: int,
    fixed: tuple[int, ...] | None,
    known: Memory,
    written: Collection[int],
) -> Region | str:
    """What is done in so many chunks, or why it cannot be. ``fixed`` are the rows of a matmul that
    is cut already."""
    (wait,) = start.users
    steps = [step_of(product.many, length(node, its.dim)) for node, its in product.rows.items()]
    step = math.lcm(*steps)
    if fixed is not None and len(fixed) != chunks + 1:
        return f"its matmul is in {len(fixed) - 1} chunks already"
    if product.many < chunks * max(LEAST, step):
        return f"{product.many} rows are too few for {chunks} chunks of {max(LEAST, step)} or more"
    last = product.nodes[-1]
    rows = dict(product.rows)
    rows[start] = rows[wait] = Rows(rows[last].dim, (rows[last].dim, None, None))
    found: dict[fx.Node, Rows] = {}
    dims = {wait: rows[wait].dim}  # of what may be taken further
    whole: set[fx.Node] = set()  # what takes all rows, and what takes that
    node = wait.next
    while node.op != "output":
        its = None if any(each in whole for each in node.all_input_nodes) else rows_of(node, dims)
        more = 0
        if its is not None and _may_be_cut(node, known, written):
            more = math.lcm(step, step_of(product.many, length(node, its.dim)))
        if its is not None and more and _fits(product.many, chunks, more, fixed):
            found[node], step = its, more
            dims |= {} if matmul_rows(node) is not None else {node: its.dim}
        elif any(each in dims or each in found or each in whole for each in node.all_input_nodes):
            whole.add(node)
        node = node.next
    consumers = _towards_matmuls(list(found))
    rows |= {each: found[each] for each in consumers}
    block = BLOCK // math.gcd(BLOCK, _values(last) // product.many)
    blocks = math.lcm(step, block)
    best = blocks if chunks * max(blocks, LEAST) <= product.many else step
    ends = fixed or bounds(product.many, chunks, best)
    if min(end - begin for begin, end in itertools.pairwise(ends)) < LEAST:
        return f"{product.many} rows are too few for {chunks} chunks of {LEAST} or more"
    return Region(product, start, wait, tuple(consumers), rows, ends)


def _fits(many: int, chunks: int, step: int, fixed: tuple[int, ...] | None) -> bool:
    """Whether there are so many chunks whose rows are multiples of ``step``."""
    return chunks * step <= many if fixed is None else all(row % step == 0 for row in fixed)


def _may_be_cut(node: fx.Node, known: Memory, written: Collection[int]) -> bool:
    """Whether what a node gives has a fixed size, no gaps, and nobody writes into it."""
    if not is_fixed(node) or not is_contiguous(node):
        return False
    return not any(number in written for number in known.touches[node])


def _towards_matmuls(nodes: list[fx.Node]) -> list[fx.Node]:
    """Those that are matmuls, or lead to one, with all items of what gives several."""
    kept: set[fx.Node] = set()
    for node in reversed(nodes):
        if matmul_rows(node) is not None or any(user in kept for user in node.users):
            kept.add(node)
    kept |= {node for node in nodes if node.target is operator.getitem and node.args[0] in kept}
    return [node for node in nodes if node in kept]


def _values(node: fx.Node) -> int:
    value = meta.tensor(node)
    return 0 if value is None else value.numel()
