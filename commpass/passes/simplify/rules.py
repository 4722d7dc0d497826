"""The rules, each a small function from a node to what was done, with a proof in one line.

A rule looks at one node, changes the graph if it fits, and says so. It must hold: no value that somebody else uses, that is an
output or that is saved for backward is lost; group and reduce op are the same; nothing non-linear is crossed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from commpass import groups
from commpass.collectives import UNROLLED_RANKS
from commpass.passes import meta
from commpass.passes.collective import is_wait, parse
from commpass.passes.discover import describe_group
from commpass.passes.simplify.editor import CASTS, VIEWS, Editor, Exchange, aten, fake, nbytes, same_shape

functional = torch.ops._c10d_functional
REDUCTIONS = ("all_reduce", "reduce_scatter")
GATHERS = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class Done:
    """What a rule did: the site that it took away or made smaller, what became of it, and bytes that one rank need not send."""

    site: str
    into: str
    saved_bytes: int


@dataclass(frozen=True)
class Rule:
    """A rule by name. ``exact``: bit-exact; the others round a float sum differently."""

    name: str
    apply: Callable[[fx.Node, Editor], Done | None]
    exact: bool


def same(node: fx.Node, editor: Editor) -> Done | None:
    """Two collectives of the same value over the same group are one: a function of equal arguments."""
    exchange = editor.exchange(node, (*REDUCTIONS, *GATHERS, "broadcast"))
    if exchange is None:
        return None
    start, size = exchange.call.node, nbytes(exchange.input)
    first = editor.first.setdefault((start.target, str(start.args), str(start.kwargs)), exchange)
    other = first.call.node
    if other is start or not (editor.lives(first.wait) and first.wait < node and _equal(other, start)):
        return None
    editor.replace(node, first.wait)
    return Done(start.name, f"{other.name}, which sends the same", size)


def _equal(a: fx.Node, b: fx.Node) -> bool:
    return a.target is b.target and a.args == b.args and a.kwargs == b.kwargs


def sum_of_sums(node: fx.Node, editor: Editor) -> Done | None:
    """ar(a) + k ar(b) = ar(a + k b): sums are linear. The merged collective starts when the later one did and is as long."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    left, right = (_term(arg, node, editor) for arg in node.args)
    if left is None or right is None or left.exchange.wait is right.exchange.wait:
        return None
    a, b = left.exchange.call, right.exchange.call
    if (a.kind, a.reduce_op, a.group) != (b.kind, b.reduce_op, b.group) or a.reduce_op not in ("sum", "avg"):
        return None
    if not (same_shape(node.args[0], node.args[1]) and same_shape(node, node.args[0])):  # type: ignore[arg-type]
        return None
    if not fake(node).dtype.is_floating_point or fake(left.exchange.wait).dtype != fake(right.exchange.wait).dtype:
        return None
    place = editor.order(a.node, b.node)
    values = [_again(term, place, editor) for term in (left, right)]
    total = editor.emit(place, "sum of sums", node, node.target, *values, **node.kwargs)
    merged = editor.collective(place, "sum of sums", (editor.order(a.node, b.node) is a.node and a) or b, total)
    first, second = (a, b) if place is b.node else (b, a)
    done = Done(first.node.name, f"merged into {merged.args[0].name} with {second.node.name}", nbytes(first.inputs[0]))  # type: ignore[union-attr]
    editor.replace(node, merged)
    return done


@dataclass(frozen=True)
class Term:
    """An addend: a reduction's result, and the linear operators with one argument between it and the sum."""

    exchange: Exchange
    chain: tuple[fx.Node, ...]


SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default)


def _term(node: Any, user: fx.Node, editor: Editor) -> Term | None:
    """The term that a node is, if nobody but the sum takes it or anything on its way."""
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node) and list(node.users) == [user]:
        exchange = editor.exchange(node, REDUCTIONS)
        if exchange is not None:
            views = any(link.target in VIEWS for link in chain)
            return None if views and exchange.call.kind == "reduce_scatter" else Term(exchange, tuple(reversed(chain)))
        scaled = node.target in SCALINGS and not any(isinstance(arg, fx.Node) for arg in node.args[1:])
        if not scaled and node.target not in VIEWS:
            return None
        if fake(node).dtype != fake(node.args[0]).dtype:  # type: ignore[arg-type]
            return None
        chain.append(node)
        node, user = node.args[0], node
    return None


def _again(term: Term, before: fx.Node, editor: Editor) -> fx.Node:
    """The operators of a term, on what was reduced instead of on the result."""
    value = term.exchange.input
    for link in term.chain:
        # The input may lie otherwise in memory than the result: a view of it may need a copy.
        target = aten.reshape.default if link.target in (aten.view.default, aten._unsafe_view.default) else link.target
        value = editor.emit(before, "sum of sums", link, target, value, *link.args[1:], **link.kwargs)
    return value


def scattered(node: fx.Node, editor: Editor) -> Done | None:
    """An all_reduce of which a rank uses only its own part is a reduce_scatter, by definition of that."""
    exchange = editor.exchange(node, ("all_reduce",))
    if exchange is None or not node.users or exchange.call.reduce_op not in ("sum", "avg"):
        return None
    ranks, rank = editor.size(exchange.call), editor.rank(exchange.call)
    parts = list(node.users)
    if ranks < 2 or rank is None or not all(_is_part(part, node, ranks, rank) for part in parts):
        return None
    size = nbytes(exchange.input)
    if editor.us("reduce_scatter", size, exchange.call) > editor.us("all_reduce", size, exchange.call):
        return None
    place = exchange.call.node
    target = functional.reduce_scatter_tensor.default
    start = editor.emit(place, "scattered", place, target, exchange.input, exchange.call.reduce_op, ranks, exchange.call.group)
    mine = editor.emit(node, "scattered", place, functional.wait_tensor.default, start)
    for part in parts:
        editor.replace(part, mine)
    return Done(place.name, f"reduce_scatter {start.name}: only the own part is used", size * (ranks - 1) // ranks)


def _is_part(node: fx.Node, whole: fx.Node, ranks: int, rank: int) -> bool:
    """Whether a node is the part of a tensor that a rank owns: the rank-th of equal parts of the first dimension."""
    rows = fake(whole).shape[0] if fake(whole).dim() else 0
    if not isinstance(rows, int) or rows == 0 or rows % ranks:
        return False
    if node.target is not aten.slice.Tensor or node.args[0] is not whole:
        return False
    given: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, end, step = given
    part = rows // ranks
    return (dim, start or 0, min(rows if end is None else end, rows), step) == (0, rank * part, (rank + 1) * part, 1)


def gather_of_scatter(node: fx.Node, editor: Editor) -> Done | None:
    """all_gather(reduce_scatter(x)) = all_reduce(x): all parts of the sum, in rank order, are the sum."""
    gathered = editor.exchange(node, ("all_gather",))
    inner = editor.exchange(gathered.input, ("reduce_scatter",)) if gathered is not None else None
    if gathered is None or inner is None or list(inner.wait.users) != [gathered.call.node]:
        return None
    if inner.call.group != gathered.call.group or inner.call.reduce_op not in ("sum", "avg"):
        return None
    size, call = nbytes(inner.input), inner.call
    before = editor.us("reduce_scatter", size, call) + editor.us("all_gather", nbytes(gathered.input), call)
    if editor.us("all_reduce", size, call) > before:
        return None
    target, place = functional.all_reduce.default, gathered.call.node
    start = editor.emit(place, "gather of scatter", place, target, inner.input, call.reduce_op, call.group)
    whole = editor.emit(node, "gather of scatter", place, functional.wait_tensor.default, start)
    editor.replace(node, whole)
    return Done(call.node.name, f"all_reduce {start.name} with the all_gather behind it", nbytes(gathered.input))


def own_part(node: fx.Node, editor: Editor) -> Done | None:
    """The own part of an all_gather is what one gave to it."""
    if node.target is not aten.slice.Tensor:
        return None
    exchange = editor.exchange(node.args[0], ("all_gather",))
    rank = editor.rank(exchange.call) if exchange is not None else None
    if exchange is None or rank is None or not _is_part(node, exchange.wait, editor.size(exchange.call), rank):
        return None
    last = len(exchange.wait.users) == 1
    name, size = exchange.call.node.name, nbytes(exchange.input)
    editor.replace(node, _own(exchange.input, node, "own part", editor))
    return Done(name, "the part that this rank has", size if last else 0)


def _own(value: fx.Node, before: fx.Node, rule: str, editor: Editor) -> fx.Node:
    """A value in place of a collective's result: not the graph's input itself, which an output must not be."""
    return value if value.op != "placeholder" else editor.emit(before, rule, before, aten.clone.default, value)


def gather_then_narrow(node: fx.Node, editor: Editor) -> Done | None:
    """to(narrow, gather(x)) = gather(to(narrow, x)): a gather moves values, a cast maps each on its own."""
    if node.target not in CASTS:
        return None
    exchange = editor.exchange(node.args[0], GATHERS)
    if exchange is None or list(exchange.wait.users) != [node]:
        return None
    wide, narrow = fake(exchange.wait).dtype, fake(node).dtype
    if narrow.itemsize >= wide.itemsize or fake(node).device != fake(exchange.wait).device:
        return None
    place = exchange.call.node
    value = editor.emit(place, "gather then narrow", node, torch.ops.prims.convert_element_type.default, exchange.input, narrow)
    saved = nbytes(exchange.input) - nbytes(value)
    name = place.name
    gathered = editor.collective(place, "gather then narrow", exchange.call, value)
    editor.replace(node, gathered)
    return Done(name, f"{gathered.args[0].name} of {meta.dtype_name(narrow)}", saved)  # type: ignore[union-attr]


EXACT_WIDENINGS = {
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64), (torch.float32, torch.float64), (torch.int8, torch.int32), (torch.uint8, torch.int32),
    (torch.int8, torch.int64), (torch.uint8, torch.int64), (torch.int32, torch.int64),
}  # fmt: skip


def widen_then_gather(node: fx.Node, editor: Editor) -> Done | None:
    """gather(to(wide, x)) = to(wide, gather(x)): likewise, and widening loses nothing."""
    exchange = editor.exchange(node, GATHERS)
    cast = exchange.input if exchange is not None else None
    if exchange is None or cast is None or cast.target not in CASTS:
        return None
    source: Any = cast.args[0]
    if (fake(source).dtype, fake(cast).dtype) not in EXACT_WIDENINGS or fake(source).device != fake(cast).device:
        return None
    place, saved, name = exchange.call.node, nbytes(cast) - nbytes(source), exchange.call.node.name
    narrow = editor.collective(place, "widen then gather", exchange.call, source)
    wide = editor.emit(node, "widen then gather", cast, torch.ops.prims.convert_element_type.default, narrow, fake(cast).dtype)
    into = f"{narrow.args[0].name} of {meta.dtype_name(fake(source).dtype)}"  # type: ignore[union-attr]
    editor.replace(node, wide)
    return Done(name, into, saved)


def widen_then_reduce(node: fx.Node, editor: Editor) -> Done | None:
    """sum(to(float32, x)) = the float32 sum of all ranks' x: send the narrow bits, add locally. Where that is less, and where
    no codec is allowed that would make it less still."""
    exchange = editor.exchange(node, REDUCTIONS)
    cast = exchange.input if exchange is not None else None
    if exchange is None or cast is None or cast.target not in CASTS or editor.may_compress(exchange.call.node):
        return None
    call, place, source = exchange.call, exchange.call.node, cast.args[0]
    ranks, dtypes = editor.size(call), (fake(source).dtype, fake(cast).dtype)  # type: ignore[arg-type]
    if dtypes not in EXACT_WIDENINGS or not dtypes[0].is_floating_point or call.reduce_op not in ("sum", "avg"):
        return None
    if not 2 <= ranks <= UNROLLED_RANKS or not all(isinstance(size, int) for size in fake(node).shape):
        return None
    scatter = call.kind == "reduce_scatter"
    instead, size = "all_to_all" if scatter else "all_gather", nbytes(source)  # type: ignore[arg-type]
    before = editor.us(call.kind, nbytes(cast), call)
    if before - editor.us(instead, size, call) <= editor.profile.margin * before:
        return None
    name = "widen then reduce"
    rows = editor.emit(place, name, cast, aten.reshape.default, source, [ranks if scatter else 1, -1])
    splits = [1] * ranks
    start = (
        editor.emit(place, name, place, functional.all_to_all_single.default, rows, splits, splits, call.group)
        if scatter
        else editor.emit(place, name, place, functional.all_gather_into_tensor.default, rows, ranks, call.group)
    )
    arrived = editor.emit(node, name, place, functional.wait_tensor.default, start)
    wide = editor.emit(node, name, cast, torch.ops.prims.convert_element_type.default, arrived, dtypes[1])
    total, *others = (editor.emit(node, name, place, aten.slice.Tensor, wide, 0, r, r + 1) for r in range(ranks))
    for other in others:
        total = editor.emit(node, name, place, aten.add.Tensor, total, other)
    if call.reduce_op == "avg":
        total = editor.emit(node, name, place, aten.div.Tensor, total, ranks)
    done = Done(place.name, f"{start.name} of {meta.dtype_name(dtypes[0])}, summed here", nbytes(cast) - size)
    editor.replace(node, editor.emit(node, name, place, aten.reshape.default, total, list(fake(node).shape)))
    return done


def expanded(node: fx.Node, editor: Editor) -> Done | None:
    """all_reduce(expand(x)) = expand(all_reduce(x)): equal addends have equal sums. (Not equal bits from 3 ranks on: a ring
    adds each part of a tensor in another order of ranks.)"""
    exchange = editor.exchange(node, ("all_reduce",))
    if exchange is None or exchange.input.target is not aten.expand.default:
        return None
    wide = exchange.input
    narrow: Any = wide.args[0]
    if nbytes(narrow) >= nbytes(wide):
        return None
    place, saved, name = exchange.call.node, nbytes(wide) - nbytes(narrow), exchange.call.node.name
    small = editor.collective(place, "expand", exchange.call, narrow)
    again = editor.emit(node, "expand", wide, aten.expand.default, small, *wide.args[1:])
    # A new tensor, as the collective's result was: an expanded one shares its memory.
    whole = editor.emit(node, "expand", wide, aten.clone.default, again, memory_format=torch.contiguous_format)
    into = small.args[0].name  # type: ignore[union-attr]
    editor.replace(node, whole)
    return Done(name, f"{into}, expanded afterwards", saved)


def alone(node: fx.Node, editor: Editor) -> Done | None:
    """A collective over a group of one rank gives what it took."""
    exchange = editor.exchange(node, (*REDUCTIONS, *GATHERS))
    if exchange is None or editor.size(exchange.call) != 1 or exchange.call.reduce_op not in (None, "sum", "avg", "max", "min"):
        return None
    if not same_shape(exchange.input, node):
        return None
    name, size = exchange.call.node.name, nbytes(exchange.input)
    editor.replace(node, _own(exchange.input, node, "alone", editor))
    return Done(name, "nothing: the group has one rank", size)


def zero(node: fx.Node, editor: Editor) -> Done | None:
    """The sum of zeros is zero, and gathered zeros are zeros."""
    exchange = editor.exchange(node, (*REDUCTIONS, *GATHERS))
    if exchange is None or exchange.call.reduce_op not in (None, "sum", "avg"):
        return None
    source = exchange.input
    # The sign of a zero is a bit as well: only plain zeros.
    if source.target is not aten.full.default or source.args[1] != 0 or str(source.args[1]).startswith("-"):
        return None
    value, name, size = fake(node), exchange.call.node.name, nbytes(source)
    if not all(isinstance(length, int) for length in value.shape):
        return None
    made = editor.emit(node, "zero", source, aten.full.default, list(value.shape), source.args[1], **source.kwargs)
    editor.replace(node, made)
    return Done(name, "zeros, which need not be sent", size)


def nested_groups(node: fx.Node, editor: Editor) -> Done | None:
    """Sums over one dimension of a mesh and then over the other are the sum over both, where those are all ranks."""
    outer = editor.exchange(node, ("all_reduce",))
    inner = editor.exchange(outer.input, ("all_reduce",)) if outer is not None else None
    if outer is None or inner is None or list(inner.wait.users) != [outer.call.node]:
        return None
    if inner.call.reduce_op != outer.call.reduce_op or outer.call.reduce_op not in ("sum", "avg", "max", "min"):
        return None
    (_, a, first), (_, b, second) = describe_group(inner.call), describe_group(outer.call)
    mesh = a and b and a != b and "world" not in (a, b)
    if not mesh or not groups.ready() or first * second != dist.get_world_size():
        return None  # only of a mesh over all ranks is it known that the groups are its rows and columns
    world, size = dist.group.WORLD.group_name, nbytes(inner.input)  # type: ignore[union-attr]
    apart = editor.us("all_reduce", size, inner.call) + editor.us("all_reduce", size, outer.call)
    if editor.profile.link_of("world").us("all_reduce", size, first * second) > apart:
        return None
    name = inner.call.node.name
    merged = editor.collective(inner.call.node, "nested groups", inner.call, inner.input, group_name=world)
    into = f"{merged.args[0].name} over all ranks, with {outer.call.node.name}"  # type: ignore[union-attr]
    editor.replace(node, merged)
    return Done(name, into, size)


def waits(node: fx.Node, editor: Editor) -> Done | None:
    """Waiting for what has been waited for is nothing: rules see one wait."""
    if not (is_wait(node) and isinstance(node.args[0], fx.Node)):
        return None
    source = node.args[0]
    if is_wait(source) and isinstance(source.args[0], fx.Node) and parse(source.args[0]) is not None:
        editor.replace(node, source)
    return None


RULES: tuple[Rule, ...] = (
    Rule("waits", waits, exact=True),
    Rule("alone", alone, exact=True),
    Rule("zero", zero, exact=True),
    Rule("same", same, exact=True),
    Rule("own part", own_part, exact=True),
    Rule("gather then narrow", gather_then_narrow, exact=True),
    Rule("widen then gather", widen_then_gather, exact=True),
    Rule("expand", expanded, exact=False),
    Rule("widen then reduce", widen_then_reduce, exact=False),
    Rule("sum of sums", sum_of_sums, exact=False),
    Rule("scattered", scattered, exact=False),
    Rule("gather of scatter", gather_of_scatter, exact=False),
    Rule("nested groups", nested_groups, exact=False),
)
