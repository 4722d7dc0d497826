"""Rules for sums over ranks: merge several sums, send narrow values, and join nested groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from commpass.collectives import UNROLLED_RANKS
from commpass.passes.fx import meta
from commpass.passes.fx.ops import ADDITIONS, RESHAPES, aten, convert, functional, moves_values
from commpass.passes.fx.parse import describe_group
from commpass.passes.simplify.chains import (
    WIDE,
    before_clone,
    dim_before,
    is_scaling,
    keeps_range,
    repeat,
    scales,
    trace_to_source,
)
from commpass.passes.simplify.editor import Editor, Exchange, fake, nbytes, same_shape
from commpass.passes.simplify.rules.gathers import widened
from commpass.passes.simplify.rules.rule import Applied
from commpass.plan.kinds import KINDS, SUMS


@dataclass(frozen=True)
class Term:
    """A term of a sum: a reduction's result, and the linear one-argument operators between it and
    the sum."""

    exchange: Exchange
    chain: tuple[fx.Node, ...]


def sum_of_sums(node: fx.Node, editor: Editor) -> Applied | None:
    """ar(a) + k ar(b) = ar(a + k b): sums are linear. The merged collective has the start and the
    size of the later one."""
    merge = _terms(node, editor) if node not in editor.changing else None
    if merge is None:
        return None
    left, right = merge
    first, last = (
        (left, right) if left.exchange.call.node < right.exchange.call.node else (right, left)
    )
    a, b, rule = first.exchange.call, last.exchange.call, "sum of sums"
    # The first addend waits for the last one. It is held longer if a scatter's input is larger than
    # its output.
    if not editor.may_extend(
        a.node, b.node, nbytes(a.inputs[0]) - nbytes(first.exchange.wait), nbytes(a.inputs[0])
    ):
        return None
    values = [_replay(term, b.node, editor) for term in (left, right)]
    total = editor.emit(b.node, rule, node, node.target, *values, **node.kwargs)
    merged = editor.collective(b.node, rule, b, total)
    moved = scales(left.chain + right.chain) + tuple(
        f"{name} {number}" for name, number in node.kwargs.items()
    )
    into = f"merged into {merged.args[0].name} with {b.node.name}"  # type: ignore[union-attr]
    done = Applied(a.node.name, into, nbytes(a.inputs[0]), moved, (b.node.name,))
    editor.replace(node, merged)
    return done


def _terms(node: fx.Node, editor: Editor) -> tuple[Term, Term] | None:
    """Return the two reductions that a sum or difference adds, if they can be merged."""
    if node.target not in ADDITIONS or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    left, right = (_term(arg, node, editor) for arg in node.args)
    if left is None or right is None or left.exchange.wait is right.exchange.wait:
        return None
    a, b = left.exchange.call, right.exchange.call
    if (a.kind, a.reduce_op, a.group) != (b.kind, b.reduce_op, b.group) or a.reduce_op not in (
        "sum",
        "avg",
    ):
        return None
    one, other = (arg for arg in node.args if isinstance(arg, fx.Node))
    if not (same_shape(one, other) and same_shape(node, one)):
        return None
    if fake(node).dtype not in WIDE:
        return None
    if fake(left.exchange.wait).dtype != fake(right.exchange.wait).dtype:
        return None
    if not keeps_range(left.chain) or not keeps_range(right.chain, *node.kwargs.values()):
        return None
    return (left, right) if editor.allowed_alike(a, b) else None


def _linear(node: fx.Node) -> bool:
    return is_scaling(node) or moves_values(node)


def _term(node: Any, user: fx.Node, editor: Editor) -> Term | None:
    """Return the term that a node is, if the sum is the only user of it and of the nodes in
    between."""
    walked = trace_to_source(node, _linear, lambda n: editor.exchange(n, SUMS), user)
    if walked is None:
        return None
    exchange, chain = walked
    scatter = KINDS[exchange.call.kind].scatters
    return (
        Term(exchange, chain) if not scatter or all(_keeps_first(link) for link in chain) else None
    )


def _keeps_first(link: fx.Node) -> bool:
    """Whether a link keeps the first dimension first, which is the scattered one."""
    if is_scaling(link):
        return True
    given, made = fake(link.args[0]).shape, fake(link).shape  # type: ignore[arg-type]
    if not given or not made or not all(isinstance(size, int) for size in (*given, *made)):
        return False
    return link.target in RESHAPES or dim_before(link, 0, 1) == 0


def _replay(term: Term, before: fx.Node, editor: Editor) -> fx.Node:
    """Apply a term's operators to the reduction's input instead of its result."""
    scatter = KINDS[term.exchange.call.kind].scatters
    dims, times = ([0] * len(term.chain), editor.size(term.exchange.call)) if scatter else ([], 1)
    return repeat(term.chain, term.exchange.input, before, "sum of sums", editor, dims, times=times)


def widen_then_reduce(node: fx.Node, editor: Editor) -> Applied | None:
    """sum(k to(float32, x)) = the float32 sum of all ranks' k x: send the narrow bits, then scale
    and add locally.

    Applies if this sends less and no allowed codec would send still less. A lossless codec can
    encode the narrow bits (ZipCCL, section 4: 11 bits per bfloat16 gradient instead of 27).
    """
    exchange = editor.exchange(node, SUMS)
    found = widened(exchange, editor, scaled=True) if exchange is not None else None
    if exchange is None or found is None or not editor.keeps_values(exchange.call.node):
        return None
    call, place, (source, cast, links) = exchange.call, exchange.call.node, found
    ranks, dtypes = editor.size(call), (fake(source).dtype, fake(cast).dtype)
    if not dtypes[0].is_floating_point or call.reduce_op not in ("sum", "avg"):
        return None
    if not 2 <= ranks <= UNROLLED_RANKS or not all(
        isinstance(size, int) for size in fake(node).shape
    ):
        return None
    scatter, size, wide = KINDS[call.kind].scatters, nbytes(source), nbytes(exchange.input)
    instead = "all_to_all" if scatter else "all_gather"
    before = editor.time_us(call.kind, wide, call)
    after = editor.time_us(instead, size, call) + editor.kernels_us(2)
    if before - after <= editor.profile.margin * before:
        return None
    if _better_merged(node, before, after, editor):
        return None
    arrives = size if scatter else size * ranks
    more = arrives + nbytes(node)
    if all(len(each.users) == 1 for each in (cast, *links)):  # else others keep the wide values
        more -= wide + (size if len(source.users) == 1 else 0)
    if not editor.may_extend(place, node, more, wide):
        return None
    # Arriving values are added where the sum is first needed, if this holds no more memory until
    # then. Other exchanges can then overlap this one.
    needed = min(node.users, default=node) if arrives <= nbytes(node) else node
    rule = "widen then reduce"
    laid_out = repeat([link for link in links if moves_values(link)], source, place, rule, editor)
    shape = [ranks if scatter else 1, -1]
    rows = editor.emit(place, rule, cast, aten.reshape.default, laid_out, shape)
    sizes: list[Any] = [[1] * ranks, [1] * ranks] if scatter else [ranks]
    target = functional.all_to_all_single if scatter else functional.all_gather_into_tensor
    start = editor.emit(place, rule, place, target.default, rows, *sizes, call.group)
    arrived = editor.emit(needed, rule, place, functional.wait_tensor.default, start)
    total: fx.Node | None = None
    scalings = [link for link in links if is_scaling(link)]
    for rank in range(ranks):
        row = editor.emit(needed, rule, place, aten.slice.Tensor, arrived, 0, rank, rank + 1)
        # A wide sum plus a narrow row promotes the row without a copy.
        if total is None or scalings:
            row = editor.emit(needed, rule, cast, convert, row, dtypes[1])
            row = repeat(scalings, row, needed, rule, editor)
        if total is not None:
            row = editor.emit(needed, rule, place, aten.add.Tensor, total, row)
        total = row
    assert total is not None
    if call.reduce_op == "avg":
        total = editor.emit(needed, rule, place, aten.div.Tensor, total, ranks)
    into = f"{start.name} of {meta.dtype_name(dtypes[0])}, summed here"
    done = Applied(place.name, into, wide - size, scales(scalings), moved_to="behind")
    whole = editor.emit(needed, rule, place, aten.reshape.default, total, list(fake(node).shape))
    editor.replace(node, whole)
    return done


def _better_merged(node: fx.Node, wide_us: float, narrow_us: float, editor: Editor) -> bool:
    """Whether a reduction's result is only added to another's, and one wide exchange for both is no
    slower than two narrow ones."""
    user = node
    while len(user.users) == 1 and (user is node or _linear(user)):
        user = next(iter(user.users))
    terms = _terms(user, editor)
    return terms is not None and (
        wide_us <= 2 * narrow_us or any(widened(term.exchange, editor) is None for term in terms)
    )


def expanded(node: fx.Node, editor: Editor) -> Applied | None:
    """all_reduce(expand(x)) = expand(all_reduce(x)): equal addends have equal sums.

    From 3 ranks on the bits may differ, because a ring adds each part of a tensor in another order
    of ranks.
    """
    exchange = editor.exchange(node, ("all_reduce",))
    wide = before_clone(exchange.input) if exchange is not None else None
    if exchange is None or wide is None or wide.target is not aten.expand.default:
        return None
    if wide in editor.changing:
        return None
    call = exchange.call
    narrow: Any = wide.args[0]
    if editor.time_us(call.kind, nbytes(wide), call) <= editor.time_us(
        call.kind, nbytes(narrow), call
    ) + editor.kernels_us(1):
        return None
    place, saved, name = call.node, nbytes(wide) - nbytes(narrow), call.node.name
    small = editor.collective(place, "expand", call, narrow)
    again = editor.emit(node, "expand", wide, aten.expand.default, small, *wide.args[1:])
    # A separate tensor, like the collective's result: an expanded one has internal overlap.
    whole = editor.copy(node, "expand", wide, again)
    into = small.args[0].name  # type: ignore[union-attr]
    editor.replace(node, whole)
    return Applied(name, f"{into}, expanded afterwards", saved)


def nested_groups(node: fx.Node, editor: Editor) -> Applied | None:
    """Merge sums over two mesh dimensions into one over both, if a group of these ranks exists.

    A sum and a mean become a sum, divided by the size of the averaged group. Scales and views in
    between are applied afterwards.
    """
    outer = editor.exchange(node, ("all_reduce",))
    if outer is None:
        return None
    walked = trace_to_source(
        outer.input, _linear, lambda n: editor.exchange(n, ("all_reduce",)), outer.call.node
    )
    if walked is None:
        return None
    inner, chain = walked
    ops = (inner.call.reduce_op, outer.call.reduce_op)
    op = ops[0] if ops[0] == ops[1] else "sum" if set(ops) == {"sum", "avg"} else None
    if op not in ("sum", "avg", "max", "min") or (
        op in ("max", "min") and any(is_scaling(link) for link in chain)
    ):
        return None
    if op in ("sum", "avg") and (fake(node).dtype not in WIDE or not keeps_range(chain)):
        return None  # in float16 a partial sum may be Inf while the total is finite
    size = nbytes(inner.input)
    if not editor.next_to(inner.call.node, outer.call.node):
        return None
    if not editor.allowed_alike(inner.call, outer.call):
        return None
    union = editor.union(inner.call, outer.call)
    if union is None:
        return None
    group, ranks = union
    (_, first), (_, second) = describe_group(inner.call), describe_group(outer.call)
    apart = sum(editor.time_us("all_reduce", size, each.call) for each in (inner, outer))
    together = editor.us_in(group, ranks, "all_reduce", size)
    if together + (editor.kernels_us(1) if ops[0] != ops[1] else 0) > apart:
        return None
    rule, place = "nested groups", inner.call.node
    merged = editor.collective(place, rule, inner.call, inner.input, reduce_op=op, group_name=group)
    start: Any = merged.args[0]
    into = f"{start.name} over the {ranks} ranks of both, with {outer.call.node.name}"
    done = Applied(place.name, into, size, scales(chain), (outer.call.node.name,))
    value = repeat(chain, merged, node, rule, editor)
    if ops[0] != ops[1]:
        averaged = first if ops[0] == "avg" else second
        value = editor.emit(node, rule, place, aten.div.Tensor, value, averaged)
    editor.replace(node, editor.contiguous(node, rule, value))
    return done
