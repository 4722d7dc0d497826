"""Regions that are computed in chunks of rows around one collective, from the matmul before it to
those after it.

A gathered tensor has one block of rows per rank, and so has the input of a reduce_scatter
(``Axis``). Chunk i of an all_gather is the i-th part of every rank's rows.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.memory import Memory
from commpass.passes.fx.ops import aten
from commpass.passes.fx.parse import is_wait
from commpass.passes.fx.rowwise import (
    Axis,
    Rows,
    bounds,
    is_contiguous,
    is_fixed,
    length,
    matmul_rows,
    rows_of,
    step_of,
)
from commpass.passes.graph_site import GraphSite
from commpass.plan.kinds import BY_RANK, KINDS

LEAST = 16
"""The minimum rows of a chunk. A matmul of fewer rows is hardly faster."""
BLOCK = 2048
"""A multiple of the block sizes of all codecs. Chunks are multiples of it if possible."""


@dataclass(frozen=True)
class Join:
    """The nodes that join the chunks of a node; the last of ``nodes`` is the result.

    The chunks have the rows between ``bounds`` and were cut along ``axis`` at ``ends``.
    """

    chunks: tuple[fx.Node, ...]
    bounds: tuple[int, ...]
    axis: Axis
    ends: tuple[int, ...]
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Product:
    """The nodes that compute a collective's input.

    They are the matmul whose rows are cut, or the join of a matmul that is already cut, then views
    and casts, and ``input`` last. ``rows`` says how each treats the rows, and ``axis`` where the
    input has them. ``many`` is the number of rows in a block. Without nodes, nothing before the
    collective is computed in chunks.
    """

    nodes: tuple[fx.Node, ...]
    rows: dict[fx.Node, Rows]
    input: fx.Node
    axis: Axis
    many: int

    @property
    def first(self) -> fx.Node:
        return self.nodes[0] if self.nodes else self.input


@dataclass(frozen=True)
class Region:
    """The nodes that run chunk by chunk: the product, ``start`` and ``wait``, and the
    ``consumers``, with their rows.

    Chunk i has the rows from ``bounds[i]`` to ``bounds[i + 1]`` of each block.
    """

    product: Product
    start: fx.Node
    wait: fx.Node
    consumers: tuple[fx.Node, ...]
    rows: dict[fx.Node, Rows]
    bounds: tuple[int, ...]

    @property
    def chunks(self) -> int:
        return len(self.bounds) - 1

    def cut(self, node: fx.Node, axis: Axis) -> tuple[int, ...]:
        """Return the bounds of chunks within a block of a node."""
        entries = length(node, axis)
        return tuple(row * entries // self.product.many for row in self.bounds)


def product_of(
    each: GraphSite, cut: Mapping[fx.Node, Join], known: Memory, written: Collection[int]
) -> Product | str:
    """Return the product of a site's input, or why its rows cannot be cut.

    ``cut`` maps nodes that join existing chunks to their joins. ``written`` are the storages that
    some node writes.
    """
    start, kind = each.call.node, each.call.kind
    if each.call.form != "plain" or kind not in BY_RANK:
        return f"only plain {', '.join(BY_RANK)} are split, not {each.site.kind} ({each.call.form})"
    if each.site.dynamic or not is_fixed(each.input):
        return "its size is symbolic"
    if not _values(each.input):
        return "it holds no values"
    if each.site.unsupported_reason:
        return each.site.unsupported_reason
    if len(start.users) != 1 or not is_wait(next(iter(start.users))):
        return "not one node alone waits for it"
    if not (ranks := each.site.group_size):
        return "the size of its group is not known"
    chain = _producers(each, cut, known, written)
    why = chain if isinstance(chain, str) else "its rows are not one block for each rank"
    if not isinstance(chain, str):
        for root, many in _roots(chain[0], ranks, cut):
            found = _treated(chain, each.input, root, many)
            if isinstance(found, str):
                why = found
            elif _fits_kind(found.axis, kind, ranks):
                return found
    if not KINDS[kind].gathers:
        return why
    value = meta.tensor(each.input)
    if value is None or value.dim() < 2 or not (value.numel() and value.is_contiguous()):
        return f"{each.input.name} has no rows to split"
    return Product((), {}, each.input, Axis(0), value.shape[:-1].numel())


def _fits_kind(axis: Axis, kind: str, ranks: int) -> bool:
    """Whether a collective's input has rows in the form that its kind needs."""
    if KINDS[kind].scatters:
        return axis == Axis(0, ranks)
    return axis.blocks == 1 and (not KINDS[kind].gathers or axis.dim == 0)


def _producers(
    each: GraphSite, cut: Collection[fx.Node], known: Memory, written: Collection[int]
) -> list[fx.Node] | str:
    """Return the nodes from the matmul that computes a site's input to that input."""
    chain: list[fx.Node] = [each.input]
    while matmul_rows(chain[0]) is None and chain[0] not in cut:
        before = _before(chain[0])
        if not before:
            return "no matmul makes its input"
        chain[:0] = before
    inside = {*chain, each.call.node}
    for node in chain:
        if others := [user for user in node.users if user not in inside]:
            what = "the matmul's result is used" if node is chain[0] else f"{node.name} is used"
            return f"{what} elsewhere ({others[0].name})"
        if _is_written(node, known, written):
            return f"{node.name} takes or gives what is written in place"
        divides = node.target in (aten.split.Tensor, operator.getitem)
        if node is not chain[0] and not (divides or is_contiguous(node)):
            return f"{node.name} has other strides than its rows"
    return chain if all(map(is_fixed, chain)) else "its size is symbolic"


def _before(node: fx.Node) -> list[fx.Node]:
    """Return a node's source: its first argument, or a split tensor with its parts if the node
    joins all of them."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if isinstance(source, fx.Node):
        return [source]
    if node.target != aten.cat.default:
        return []
    parts = list(dict.fromkeys(node.all_input_nodes))
    whole = {part.args[0] for part in parts if part.target is operator.getitem}
    if len(whole) != 1 or any(part.target is not operator.getitem for part in parts):
        return []
    (source,) = whole
    return [source, *parts] if isinstance(source, fx.Node) else []


def _roots(matmul: fx.Node, ranks: int, cut: Mapping[fx.Node, Join]) -> list[tuple[Rows, int]]:
    """Return how a matmul may treat its rows, with the number of rows in a block. The join of an
    existing cut has one option only."""
    if (join := cut.get(matmul)) is not None:
        return [(Rows(join.axis, ()), join.bounds[-1])]
    found = [(blocks, matmul_rows(matmul, blocks)) for blocks in dict.fromkeys((1, ranks))]
    entries = length(matmul, Axis(0))
    return [(rows, entries // n) for n, rows in found if rows is not None and entries % n == 0]


def _treated(chain: list[fx.Node], value: fx.Node, root: Rows, block_rows: int) -> Product | str:
    """Return a product whose first node treats its rows as ``root``, with ``block_rows`` rows in a
    block."""
    rows = {chain[0]: root}
    for node in chain[1:]:
        if (found := rows_of(node, {one: its.axis for one, its in rows.items()})) is None:
            return f"{node.name} does not compute each row alone"
        rows[node] = found
    return Product(tuple(chain), rows, value, rows[value].axis, block_rows)


def region_of(
    each: GraphSite,
    product: Product,
    chunks: int,
    fixed: tuple[int, ...] | None,
    known: Memory,
    written: Collection[int],
) -> Region | str:
    """Return the region for a number of chunks, or why there is none. ``fixed`` are the bounds of a
    matmul that is already cut."""
    start = each.call.node
    (wait,) = start.users
    many, given = product.many, product.axis
    kind = KINDS[each.call.kind]
    blocks = each.site.group_size if kind.gathers else 1 if kind.scatters else given.blocks
    made = Axis(given.dim, blocks)
    rows = dict(product.rows)
    rows[start] = Rows(made, (given, *[None] * (len(start.args) - 1)))
    rows[wait] = Rows(made, (made,))
    step = math.lcm(*(step_of(many, length(node, its.axis)) for node, its in rows.items()))
    if fixed is not None and len(fixed) != chunks + 1:
        return f"its matmul is in {len(fixed) - 1} chunks already"
    if many < chunks * max(LEAST, step):
        return f"{many} rows are too few for {chunks} chunks of {max(LEAST, step)} or more"
    found: dict[fx.Node, Rows] = {}
    axes = {wait: rows[wait].axis}  # of nodes that more consumers may read
    whole: set[fx.Node] = set()  # nodes that need all rows, and their users
    node, ahead = wait.next, _users(wait)  # users of nodes with rows that were not visited yet
    while ahead:
        ahead.discard(node)
        its = None if any(each in whole for each in node.all_input_nodes) else rows_of(node, axes)
        more = 0
        if its is not None and _may_be_cut(node, known, written):
            more = math.lcm(step, step_of(many, length(node, its.axis)))
        if its is not None and more and _fits(many, chunks, more, fixed):
            found[node], step = its, more
            if matmul_rows(node) is None:
                axes[node] = its.axis
                ahead |= _users(node)
        elif any(each in axes or each in found or each in whole for each in node.all_input_nodes):
            whole.add(node)
        node = node.next
    consumers = _towards_matmuls(list(found))
    rows |= {each: found[each] for each in consumers}
    block = BLOCK // math.gcd(BLOCK, _values(product.input) // (many * given.blocks))
    even = math.lcm(step, block)
    best = even if chunks * max(even, LEAST) <= many else step
    ends = fixed or bounds(many, chunks, best)
    if min(end - begin for begin, end in itertools.pairwise(ends)) < LEAST:
        return f"{many} rows are too few for {chunks} chunks of {LEAST} or more"
    if not (product.nodes or consumers):
        return "nothing before it and nothing after it can be done in chunks"
    return Region(product, start, wait, tuple(consumers), rows, ends)


def _users(node: fx.Node) -> set[fx.Node]:
    return {user for user in node.users if user.op != "output"}


def _fits(count: int, chunks: int, step: int, fixed: tuple[int, ...] | None) -> bool:
    """Whether ``count`` rows allow ``chunks`` chunks whose rows are multiples of ``step``."""
    return chunks * step <= count if fixed is None else all(row % step == 0 for row in fixed)


def _may_be_cut(node: fx.Node, known: Memory, written: Collection[int]) -> bool:
    """Whether a node's result has a fixed size, is contiguous, and is never written to."""
    if not is_fixed(node) or not is_contiguous(node):
        return False
    return not _is_written(node, known, written)


def _is_written(node: fx.Node, known: Memory, written: Collection[int]) -> bool:
    """Whether a node's inputs or results are written to. Chunks of other regions are unknown here,
    but derive from unwritten memory only."""
    return any(number in written for number in known.touches.get(node, ()))


def _towards_matmuls(nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the nodes that are matmuls or lead to one, with all items of multi-result nodes."""
    kept: set[fx.Node] = set()
    for node in reversed(nodes):
        if matmul_rows(node) is not None or any(user in kept for user in node.users):
            kept.add(node)
    kept |= {node for node in nodes if node.target is operator.getitem and node.args[0] in kept}
    return [node for node in nodes if node in kept]


def _values(node: fx.Node) -> int:
    value = meta.tensor(node)
    return 0 if value is None else value.numel()
