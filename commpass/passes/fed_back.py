"""fed_back: whether what a site gives takes the place, in an input of the graph, of what it was
made of: weights that each rank updates a part of, and that are gathered in place.

needs: a graph of aten operators with sites.
gives: why a codec that loses bits is not for a site.
changes: nothing. Two walks from one site, by facts that all ranks share.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from commpass.passes.discover import SEE_THROUGH, GraphSite
from commpass.passes.fx import meta
from commpass.passes.fx.parse import is_wait, parse
from commpass.passes.provenance.walk import inputs, is_number, name_of, tensors

UPDATES = ("add", "sub", "rsub", "lerp", "addcmul", "addcdiv", "fma")
"""Operators that change a tensor a little, value by value."""
ADDED_TO = ("addmm", "addmv", "addbmm", "baddbmm", "addr", "index_add", "scatter_add", "index_put")
"""Those that change their first tensor so."""
SCALED = ("mul", "div", "where", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "neg")
"""Those that scale or choose values, and leave small changes of them what they are."""
WEIGHING = ("mul", "div", "lerp", "fma", "where", "constant_pad_nd")
"""Of all these, what may make a sum over ranks no larger than what each of them has."""
JOINED = ("cat", "stack", "constant_pad_nd")
PUT = (
    "slice_scatter",
    "select_scatter",
    "as_strided_scatter",
    "diagonal_scatter",
    "slice_backward",
)
"""What puts one tensor beside others, or into another."""
CONSTANTS = ("full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "empty")
COPIES = ("all_gather", "broadcast")
"""Kinds whose results may have been changed by somebody else, outside of the graph."""
SUMS = ("all_reduce", "reduce_scatter")
FOREACH = "_foreach_"


class Updated(Enum):
    """Whether what a site carries was changed since it was the input that it takes the place of."""

    NO = 0
    MAYBE = 1
    YES = 2


@dataclass(frozen=True)
class Reached:
    """A tensor that a site's values were made of. ``summed`` says that a sum over ranks lies
    between, and ``weighed`` that something does that makes an average of that."""

    node: fx.Node
    updated: Updated
    summed: bool
    weighed: bool


@dataclass(frozen=True)
class Source:
    """A tensor that a node's values were made of, one by one, by an operator of that ``name``; of a
    collective, ``reduce_op`` says how ranks were put together."""

    node: fx.Node
    name: str
    reduce_op: str | None = None
    weighed: bool = False


def fed_back_reason(site: GraphSite) -> str | None:
    """Why what is lost at a site is lost for good: the next call begins with the decoded values,
    and changes smaller than what a code can tell apart never add up.

    A sum in place of what was not updated here is one of gradients, say, which its caller fills
    anew. So is a sum that nothing weighs, in place of what was added to here: it would grow with
    each call by as much as there are ranks.
    """
    kept = _overwritten(site)
    if not kept or not isinstance(site.input, fx.Node):
        return None
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
    """What a node was made of, on the way back from a site."""
    updated, reduced = reached.updated, source.reduce_op is not None
    if source.name in (*UPDATES, *ADDED_TO):
        updated = Updated.YES
    elif reduced and updated is Updated.MAYBE:
        updated = Updated.NO  # parts of a sum: of gradients, as far as this graph tells
    summed = reached.summed or source.reduce_op == "sum"
    return Reached(source.node, updated, summed, reached.weighed or source.weighed)


def _overwritten(site: GraphSite) -> dict[fx.Node, bool]:
    """The inputs of the graph into which the result of a site is written, as it is or times a
    number, and whether something on the way there weighs it."""
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
    """The input of the graph that a node is, also after it was changed in place."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not str(getattr(node.target, "_opname", "")).endswith("_") or not node.args:
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.op == "placeholder" else None


def _unchanged_sources(node: fx.Node) -> Iterator[Source]:
    """The sources of a node whose values are still what they were there, but for a number."""
    found = [each for each in _sources(node) if each.name not in (*UPDATES, *ADDED_TO)]
    scaled = any(each.name in ("mul", "div", "minimum", "maximum") for each in found)
    if scaled and sum(not is_number(meta.tensor(each.node)) for each in found) > 1:
        return
    yield from found


def _items(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem]


def _sources(node: fx.Node) -> list[Source]:
    """The tensors that a node's values were made of, one by one."""
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
    """Whether a node does the same with several tensors, each by itself."""
    if name_of(node).startswith(FOREACH):
        return True
    call = parse(node)
    several = call.inputs if call is not None else node.args[:1] if is_wait(node) else ()
    return any(isinstance(each, (list, tuple)) for each in several) or (
        call is not None and "coalesced" in call.form
    )


def _sources_of(node: fx.Node, row: int | None = None) -> list[Source]:
    """Likewise, of one of the results of what has several ``rows``."""
    call = parse(node)
    if call is not None:
        if call.kind in ("send", "recv"):
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
    """The tensors that a node takes for one of its results: of lists those at its place."""
    if row is None:
        return inputs(node)
    given = (*node.args, *node.kwargs.values())
    return list(tensors(x[row : row + 1] if isinstance(x, (list, tuple)) else [x] for x in given))
