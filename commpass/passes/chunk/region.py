"""What is done in chunks of rows around one collective: from the matmul before it to those after
it.

What is gathered has a block of rows from each rank, and so has what is summed and scattered
(``Axis``): chunk i of an all_gather is the i-th part of every rank's rows.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from commpass.passes.discover import GraphSite
from commpass.passes.fx import meta
from commpass.passes.fx.memory import Memory
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

aten = torch.ops.aten
LEAST = 16
"""Rows of a chunk: a matmul of fewer is hardly quicker."""
BLOCK = 2048
"""Values that all codecs' blocks divide: chunks are multiples of it where that is possible."""


KINDS = ("all_reduce", "all_gather", "reduce_scatter")
"""The collectives that are split by rows."""


@dataclass(frozen=True)
class Join:
    """What joins chunks of a node, which have the rows between ``bounds`` and were cut along
    ``axis`` at ``ends``: the last of ``nodes``."""

    chunks: tuple[fx.Node, ...]
    bounds: tuple[int, ...]
    axis: Axis
    ends: tuple[int, ...]
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Product:
    """What makes a collective's input: the ``matmul`` whose rows are cut, or what joins a matmul
    that has been cut, then views and casts, and its ``input`` last. ``rows`` is how each treats
    them, ``axis`` along what the input has them, ``chunks`` how many there are in a block. Without
    nodes nothing is computed in chunks before the collective."""

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
    """The nodes that are done chunk by chunk: the product, ``start`` and ``wait``, and the
    ``consumers``, each with its rows. Chunk i has the rows from ``bounds[i]`` to ``bounds[i + 1]``
    of each block."""

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
        """Where chunks begin and end in a block of a node."""
        entries = length(node, axis)
        return tuple(row * entries // self.product.many for row in self.bounds)


def product_of(
    each: GraphSite, cut: Mapping[fx.Node, Join], known: Memory, written: Collection[int]
) -> Product | str:
    """What makes a site's input, or why nothing does whose rows can be cut. ``cut`` are the nodes
    that join what is in chunks already, ``written`` is the memory that something writes into."""
    start, kind = each.call.node, each.call.kind
    if each.call.form != "plain" or kind not in KINDS:
        return f"only plain {', '.join(KINDS)} are split, not {each.site.kind} ({each.call.form})"
    if each.site.dynamic or not is_fixed(each.input):
        return "its size is symbolic"
    if not _values(each.input):
        return "it holds no values"
    if each.site.obstacle:
        return each.site.obstacle
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
    if kind != "all_gather":
        return why
    value = meta.tensor(each.input)
    if value is None or value.dim() < 2 or not (value.numel() and value.is_contiguous()):
        return f"{each.input.name} has no rows to split"
    return Product((), {}, each.input, Axis(0), value.shape[:-1].numel())


def _fits_kind(axis: Axis, kind: str, ranks: int) -> bool:
    """Whether what a collective takes has rows as it needs them."""
    if kind == "reduce_scatter":
        return axis == Axis(0, ranks)
    return axis.blocks == 1 and (kind == "all_reduce" or axis.dim == 0)


def _producers(
    each: GraphSite, cut: Collection[fx.Node], known: Memory, written: Collection[int]
) -> list[fx.Node] | str:
    """The nodes from the matmul that makes a site's input to that input."""
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
    """What a node is made of: its first argument, or what was divided, with its parts, if the node
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
    """How a matmul may treat its rows, each with how many there are in a block; what joins one that
    is in chunks already has no choice."""
    if (join := cut.get(matmul)) is not None:
        return [(Rows(join.axis, ()), join.bounds[-1])]
    found = [(blocks, matmul_rows(matmul, blocks)) for blocks in dict.fromkeys((1, ranks))]
    entries = length(matmul, Axis(0))
    return [(rows, entries // n) for n, rows in found if rows is not None and entries % n == 0]


def _treated(chain: list[fx.Node], value: fx.Node, root: Rows, chunks: int) -> Product | str:
    """A product whose first node treats its rows so, ``chunks`` in a block."""
    rows = {chain[0]: root}
    for node in chain[1:]:
        if (found := rows_of(node, {one: its.axis for one, its in rows.items()})) is None:
            return f"{node.name} does not compute each row alone"
        rows[node] = found
    return Product(tuple(chain), rows, value, rows[value].axis, chunks)


def region_of(
    each: GraphSite,
    product: Product,
    chunks: int,
    fixed: tuple[int, ...] | None,
    known: Memory,
    written: Collection[int],
) -> Region | str:
    """What is done in so many chunks, or why it cannot be. ``fixed`` are the rows of a matmul that
    is cut already."""
    start = each.call.node
    (wait,) = start.users
    many, given = product.many, product.axis
    blocks = {"all_gather": each.site.group_size, "reduce_scatter": 1}
    made = Axis(given.dim, blocks.get(each.call.kind, given.blocks))
    rows = dict(product.rows)
    rows[start] = Rows(made, (given, *[None] * (len(start.args) - 1)))
    rows[wait] = Rows(made, (made,))
    step = math.lcm(*(step_of(many, length(node, its.axis)) for node, its in rows.items()))
    if fixed is not None and len(fixed) != chunks + 1:
        return f"its matmul is in {len(fixed) - 1} chunks already"
    if many < chunks * max(LEAST, step):
        return f"{many} rows are too few for {chunks} chunks of {max(LEAST, step)} or more"
    found: dict[fx.Node, Rows] = {}
    axes = {wait: rows[wait].axis}  # of what may be taken further
    whole: set[fx.Node] = set()  # what takes all rows, and what takes that
    node, ahead = wait.next, _users(wait)  # of what has rows, as far as they were not met
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
    """Whether there are so many chunks whose rows are multiples of ``step``."""
    return chunks * step <= count if fixed is None else all(row % step == 0 for row in fixed)


def _may_be_cut(node: fx.Node, known: Memory, written: Collection[int]) -> bool:
    """Whether what a node gives has a fixed size, no gaps, and nobody writes into it."""
    if not is_fixed(node) or not is_contiguous(node):
        return False
    return not _is_written(node, known, written)


def _is_written(node: fx.Node, known: Memory, written: Collection[int]) -> bool:
    """Whether something writes into what a node takes or gives. What chunks of others are is not
    known, but they are made of what nobody writes into alone."""
    return any(number in written for number in known.touches.get(node, ()))


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
