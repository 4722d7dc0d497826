"""fed_back: whether a site's result overwrites the graph input that it was computed from.

This happens if each rank updates a part of the weights, and the parts are gathered in place.

needs: a graph of aten operators with sites.
gives: why a lossy codec is not allowed at a site.
changes: nothing. Walks the graph twice from one site, using only facts that all ranks share.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.ops import SEE_THROUGH, name_of, opname
from commpass.passes.fx.parse import is_wait, parse
from commpass.passes.graph_site import GraphSite
from commpass.passes.provenance.walk import inputs, is_number, tensors
from commpass.plan.kinds import COPIES, KINDS, SUMS

UPDATES = ("add", "sub", "rsub", "lerp", "addcmul", "addcdiv", "fma")
"""Operators that change a tensor slightly, elementwise."""
ADDED_TO = ("addmm", "addmv", "addbmm", "baddbmm", "addr", "index_add", "scatter_add", "index_put")
"""Operators that change their first tensor in this way."""
SCALED = ("mul", "div", "where", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "neg")
"""Operators that scale or select values. Small changes of the input remain small changes."""
WEIGHING = ("mul", "div", "lerp", "fma", "where", "constant_pad_nd")
"""Those of all these operators that may turn a sum over ranks into an average."""
JOINED = ("cat", "stack", "constant_pad_nd")
PUT = (
    "slice_scatter",
    "select_scatter",
    "as_strided_scatter",
    "diagonal_scatter",
    "slice_backward",
)
"""Operators that concatenate tensors or insert one into another."""
CONSTANTS = ("full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "empty")
FOREACH = "_foreach_"


class Updated(Enum):
    """Whether a site's input was changed since it was the graph input that the result
    overwrites."""

    NO = 0
    MAYBE = 1
    YES = 2


@dataclass(frozen=True)
class Reached:
    """A tensor that a site's values were computed from.

    ``summed`` says that a sum over ranks lies in between, ``weighed`` that an operator may turn it
    into an average.
    """

    node: fx.Node
    updated: Updated
    summed: bool
    weighed: bool


@dataclass(frozen=True)
class Source:
    """A tensor that a node's values were computed from elementwise, by an operator of that
    ``name``.

    For a collective, ``reduce_op`` says how it combines the ranks.
    """

    node: fx.Node
    name: str
    reduce_op: str | None = None
    weighed: bool = False


def fed_back_reason(site: GraphSite) -> str | None:
    """Return why a loss at a site would be permanent, else None.

    The next call starts from the decoded values, so changes smaller than the codec's resolution
    would never accumulate.

    Two cases are excluded. A sum that overwrites an input which was not updated here is, for
    example, a sum of gradients that the caller recomputes. An unweighted sum that overwrites an
    input which was added to here would grow with each call by a factor of the group size.
    """
    kept = _overwritten(site)
    if not kept or not isinstance(site.input, fx.Node):
        return None
    # Results of copies may have been changed outside of the graph.
    updated = Updated.MAYBE if site.site.kind in COPIES else Updated.NO
    start = Reached(site.input, updated, site.site.reduce_op == "sum", weighed=False)
    seen, queue = {start}, [start]
    while queue:
        here = queue.pop()
        grows = here.summed and not here.weighed and not kept.get(here.node, False)
        if here.node in kept and here.updated is not Updated.NO and not grows:
            return (
                f"its result takes the place of {here.node.name}, of which it was made, so that"
                " small changes would be lost call by call"
            )
        more = {_before(here, source) for source in _sources(here.node)} - seen
        seen |= more
        queue += more
    return None


def _before(reached: Reached, source: Source) -> Reached:
    """Return a source of a node, with what was found on the way back from the site."""
    updated, reduced = reached.updated, source.reduce_op is not None
    if source.name in (*UPDATES, *ADDED_TO):
        updated = Updated.YES
    elif reduced and updated is Updated.MAYBE:
        updated = Updated.NO  # parts of a sum: gradients, as far as this graph shows
    summed = reached.summed or source.reduce_op == "sum"
    return Reached(source.node, updated, summed, reached.weighed or source.weighed)


def _overwritten(site: GraphSite) -> dict[fx.Node, bool]:
    """Return the graph inputs that a site's result overwrites, unchanged or scaled by a number. The
    value says whether an operator on the way may average."""
    found: dict[fx.Node, bool] = {}
    seen = {(output, False) for output in site.outputs}
    queue = list(seen)
    while queue:
        value, weighed = queue.pop()
        for user in value.users:
            if user.target is torch.ops.aten.copy_.default and user.args[1] is value:
                target = _memory(user.args[0])
                if target is not None:
                    found[target] = found.get(target, False) or weighed
            for taker in (user, *_items(user)):
                more = {
                    (taker, weighed or s.weighed)
                    for s in _unchanged_sources(taker)
                    if s.node is value
                }
                queue += more - seen
                seen |= more
    return found


def _memory(node: object) -> fx.Node | None:
    """Return the graph input behind a node, through in-place changes, or None."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not opname(node).endswith("_") or not node.args:
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.op == "placeholder" else None


def _unchanged_sources(node: fx.Node) -> Iterator[Source]:
    """Yield the sources whose values the node keeps, up to a factor."""
    found = [each for each in _sources(node) if each.name not in (*UPDATES, *ADDED_TO)]
    scaled = any(each.name in ("mul", "div", "minimum", "maximum") for each in found)
    if scaled and sum(not is_number(meta.tensor(each.node)) for each in found) > 1:
        return
    yield from found


def _items(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem]


def _sources(node: fx.Node) -> list[Source]:
    """Return the tensors that a node's values were computed from, elementwise."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        several, index = node.args
        assert isinstance(several, fx.Node)
        if isinstance(index, int) and _has_rows(several):
            return _sources_of(several, index)
        return [Source(several, "getitem")]
    return [] if _has_rows(node) else _sources_of(node)


def _has_rows(node: fx.Node) -> bool:
    """Whether a node applies the same operation to several tensors independently."""
    if name_of(node).startswith(FOREACH):
        return True
    call = parse(node)
    several = call.inputs if call is not None else node.args[:1] if is_wait(node) else ()
    return any(isinstance(each, (list, tuple)) for each in several) or (
        call is not None and "coalesced" in call.form
    )


def _sources_of(node: fx.Node, row: int | None = None) -> list[Source]:
    """Return the sources of a node, or of result number ``row`` of a node with several results."""
    call = parse(node)
    if call is not None:
        if KINDS[call.kind].pairwise:
            return []
        reduce_op = call.reduce_op if call.kind in SUMS else None
        weighed = reduce_op not in (None, "sum")
        return [Source(call.inputs[row or 0], call.kind, reduce_op, weighed)]
    if is_wait(node):
        return [Source(each, "wait") for each in _row(node, row)[:1]]
    name = name_of(node).removeprefix(FOREACH).rsplit(".", 1)[0]
    sources = _row(node, row)
    if name == "copy":
        return [Source(each, name) for each in sources[1:2]]
    if name in (*ADDED_TO, *SEE_THROUGH):
        return [Source(each, name) for each in sources[:1]]
    if name in (*UPDATES, *SCALED):
        return [Source(each, name, weighed=name in WEIGHING) for each in sources]
    if name in (*JOINED, *PUT):
        beside = any(name_of(each) in CONSTANTS for each in sources)
        return [Source(each, name, weighed=name in WEIGHING or beside) for each in sources]
    return []


def _row(node: fx.Node, row: int | None) -> list[fx.Node]:
    """Return the tensors that a node reads for one of its results. Lists contribute the element at
    its index."""
    if row is None:
        return inputs(node)
    given = (*node.args, *node.kwargs.values())
    return list(tensors(x[row : row + 1] if isinstance(x, (list, tuple)) else [x] for x in given))
