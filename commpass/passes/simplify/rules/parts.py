"""Rules for collectives of which a rank uses only its own part, and for gathers of all parts."""

from __future__ import annotations

import operator

from torch import fx

from commpass.passes.fx.ops import aten, functional
from commpass.passes.simplify.chains import own_parts, repeat
from commpass.passes.simplify.editor import Editor, fake, nbytes
from commpass.passes.simplify.rules.rule import Applied


def own_part(node: fx.Node, editor: Editor) -> Applied | None:
    """Replace an all_gather of which only the own part is used by its input."""
    exchange = editor.exchange(node, ("all_gather",))
    parts = own_parts(exchange, editor) if exchange is not None else None
    if exchange is None or not parts or parts[0].dim != 0:
        return None
    rule, name = "own part", exchange.call.node.name
    size, ranks = nbytes(exchange.input), editor.size(exchange.call)
    for part in parts:
        value = repeat(part.chain, exchange.input, part.node, rule, editor, part.dims, part=ranks)
        _replace(part.node, value, editor)
    return Applied(name, "the part that this rank has", size)


def _replace(part: fx.Node, shard: fx.Node, editor: Editor) -> None:
    """Replace a part of a result by the rank's own value, and remove unused items of a split."""
    items = [*part.all_input_nodes[0].users] if part.target is operator.getitem else []
    editor.replace(part, shard)
    for item in items:
        if editor.lives(item):
            editor.prune(item)


def scattered(node: fx.Node, editor: Editor) -> Applied | None:
    """Replace an all_reduce by a reduce_scatter if a rank uses only its own part.

    A reduce_scatter splits the first dimension. Another dimension is permuted to the front if this
    pays.
    """
    exchange = editor.exchange(node, ("all_reduce",))
    if exchange is None or not node.users or exchange.call.reduce_op not in ("sum", "avg"):
        return None
    parts = own_parts(exchange, editor)
    if not parts:
        return None
    rule, call, place, dim = "scattered", exchange.call, exchange.call.node, parts[0].dim
    ranks, size = editor.size(call), nbytes(exchange.input)
    turn = [dim, *(d for d in range(fake(node).dim()) if d != dim)]
    copies = any(
        not isinstance(length, int) or length != 1 for length in fake(node).shape[:dim]
    )  # otherwise nothing moves in memory
    values = size // fake(node).dtype.itemsize * (1 + 1 / ranks)
    scatter_us = editor.time_us("reduce_scatter", size, call) + (
        editor.kernels_us(2, values) if copies else 0
    )
    if scatter_us > editor.time_us("all_reduce", size, call) or not editor.may_extend(
        place, node, 2 * size // ranks if copies else 0, size
    ):
        return None
    value = exchange.input
    if dim:
        turned = editor.emit(place, rule, place, aten.permute.default, value, turn)
        value = editor.contiguous(place, rule, turned)
    target, given = functional.reduce_scatter_tensor.default, (call.reduce_op, ranks, call.group)
    start = editor.emit(place, rule, place, target, value, *given)
    mine = editor.emit(node, rule, place, functional.wait_tensor.default, start)
    if dim:
        back = [turn.index(d) for d in range(len(turn))]
        turned = editor.emit(node, rule, place, aten.permute.default, mine, back)
        mine = editor.contiguous(node, rule, turned)
    for part in parts:
        value = repeat(part.chain, mine, part.node, rule, editor, part.dims, part=ranks)
        _replace(part.node, value, editor)
    into = f"reduce_scatter {start.name}: only the own part is used"
    return Applied(place.name, into, size * (ranks - 1) // ranks)


def gather_of_scatter(node: fx.Node, editor: Editor) -> Applied | None:
    """all_gather(reduce_scatter(x)) = all_reduce(x): all parts of the sum, in rank order, are the
    sum."""
    gathered = editor.exchange(node, ("all_gather",))
    inner = editor.exchange(gathered.input, ("reduce_scatter",)) if gathered is not None else None
    if gathered is None or inner is None or list(inner.wait.users) != [gathered.call.node]:
        return None
    if inner.call.group != gathered.call.group or inner.call.reduce_op not in ("sum", "avg"):
        return None
    if not editor.allowed_alike(inner.call, gathered.call):
        return None
    size, call = nbytes(inner.input), inner.call
    before = editor.time_us("reduce_scatter", size, call) + editor.time_us(
        "all_gather", nbytes(gathered.input), call
    )
    if editor.time_us("all_reduce", size, call) > before or not editor.next_to(
        call.node, gathered.call.node
    ):
        return None
    if not editor.may_extend(call.node, gathered.call.node, size - nbytes(gathered.input), size):
        return None
    target, place = functional.all_reduce.default, call.node
    start = editor.emit(
        place, "gather of scatter", place, target, inner.input, call.reduce_op, call.group
    )
    whole = editor.emit(node, "gather of scatter", place, functional.wait_tensor.default, start)
    into = f"all_reduce {start.name} with the all_gather behind it"
    done = Applied(place.name, into, nbytes(gathered.input), others=(gathered.call.node.name,))
    editor.replace(node, whole)
    return done
