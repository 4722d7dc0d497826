"""Collectives that need not be at all: equal ones, of constants, over a group of one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from commpass.passes.fx.parse import is_wait, parse
from commpass.passes.simplify.chains import LONGEST, is_cast
from commpass.passes.simplify.editor import Editor, Exchange, aten, fake, nbytes, same_shape
from commpass.passes.simplify.rules.rule import GATHERS, Applied
from commpass.plan.kinds import SUMS


def waits(node: fx.Node, editor: Editor) -> Applied | None:
    """Waiting for what has been waited for is nothing: rules see one wait."""
    if not (is_wait(node) and isinstance(node.args[0], fx.Node)):
        return None
    source = node.args[0]
    if (
        is_wait(source)
        and isinstance(source.args[0], fx.Node)
        and parse(source.args[0]) is not None
    ):
        editor.replace(node, source)
    elif (call := editor.call(source)) is not None and call.form == "plain":
        first = min(user for user in source.users if is_wait(user))
        if first is not node:  # torch 2.14 merges equal collectives, and leaves a wait for each
            editor.replace(node, first)
            _merge_casts(first, editor)
    return None


def _merge_casts(value: fx.Node, editor: Editor) -> None:
    """Equal casts of a value that several had, each after its own wait, are one: rules look for the
    only user of a result."""
    known: dict[Any, fx.Node] = {}
    casts = [user for user in value.users if is_cast(user) and user not in editor.changing]
    for user in sorted(casts):
        cast = known.setdefault((user.target, user.args, tuple(user.kwargs.items())), user)
        if cast is not user:
            editor.replace(user, cast)


def same(node: fx.Node, editor: Editor) -> Applied | None:
    """Two collectives of equal values over one group are one: a function of equal arguments. Not an
    all_to_all: the numbers of its entries are a rank's own, and may be equal there by chance."""
    kinds = (*SUMS, "all_gather", "broadcast")
    exchange, equal = editor.exchange(node, kinds), editor.equal.get(node)
    if exchange is None or equal is None or not editor.lives(equal):
        return None
    if editor.sweeps == 1 and _only_for_equal_exchanges(node, editor):
        return None  # it goes by itself, and need not be kept for longer, once those are one
    first = editor.exchange(equal, kinds)
    if first is None or not editor.allowed_alike(first.call, exchange.call):
        return None
    until = editor.last_user(first.wait)
    if until < node and not editor.may_extend(until, node, nbytes(node), nbytes(node)):
        return None
    name, size, kept = exchange.call.node.name, nbytes(exchange.input), first.call.node.name
    editor.replace(node, first.wait)
    return Applied(name, f"{kept}, which sends the same", size, others=(kept,))


def _only_for_equal_exchanges(node: fx.Node, editor: Editor) -> bool:
    """Whether all that is made of a value goes into exchanges that have an equal one before
    them."""
    stack = [node]
    for _ in range(LONGEST):
        if not stack:
            return True
        users = stack.pop().users
        if not users or not all(user in editor.equal for user in users):
            return False
        stack += [user for user in users if editor.call(user) is None]
    return False


def single_rank(node: fx.Node, editor: Editor) -> Applied | None:
    """A collective over a group of one rank gives what it took."""
    exchange = editor.exchange(node, (*SUMS, *GATHERS))
    if (
        exchange is None
        or editor.size(exchange.call) != 1
        or exchange.call.reduce_op not in (None, "sum", "avg", "max", "min")
    ):
        return None
    if not same_shape(exchange.input, node):
        return None
    name, size = exchange.call.node.name, nbytes(exchange.input)
    editor.replace(node, exchange.input)
    return Applied(name, "nothing: the group has one rank", size)


def constant(node: fx.Node, editor: Editor) -> Applied | None:
    """The sum of W equal constants c is W c, their mean, maximum or minimum c, and gathered they
    are c again."""
    exchange = editor.exchange(node, (*SUMS, *GATHERS))
    if exchange is None or exchange.input.target is not aten.full.default:
        return None
    source, value = exchange.input, fake(node)
    ranks = editor.size(exchange.call)
    result = _constant(exchange, _on_every_rank(source), ranks)
    if result is None or ranks < 1 or not all(isinstance(length, int) for length in value.shape):
        return None
    name, size = exchange.call.node.name, nbytes(source)
    editor.replace(
        node,
        editor.emit(
            node, "constant", source, aten.full.default, list(value.shape), result, **source.kwargs
        ),
    )
    return Applied(name, f"the constant {result}, which need not be sent", size)


NAMED = {
    "zero": 0,
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "one": 1,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
}


def _on_every_rank(full: fx.Node) -> int | None:
    """The constant that all ranks have there: what the operator's name says. A number in the graph
    may be this rank's own (its place in the group, how many samples it has), and only of these two
    is it known that it is not."""
    made_as: Any = full.meta.get("original_aten")
    return (
        NAMED.get(getattr(made_as, "_schema", made_as).name.split("::")[-1])
        if made_as is not None
        else None
    )


def _constant(exchange: Exchange, value: int | None, ranks: int) -> Any:
    """What a collective makes of a constant, as its operator takes it; None if that is not known to
    the bit."""
    dtype, literal = fake(exchange.input).dtype, exchange.input.args[1]
    op = exchange.call.reduce_op
    if value is not None and literal != value:
        return None
    if op is None or op in ("max", "min"):
        return None if value is None else literal
    plain_zero = literal == 0 and not str(literal).startswith(
        "-"
    )  # the sign of a zero is a bit as well
    if op not in ("sum", "avg") or (value is None and not plain_zero):
        return None
    if plain_zero:
        return literal
    return _ones(op, dtype, ranks)


def _ones(op: str, dtype: torch.dtype, ranks: int) -> int | None:
    """The sum or mean of ones, where every partial sum is exact, in any order; and of a mean every
    part, as some libraries divide before they add."""
    if (
        dtype is torch.bool
        or dtype.is_complex
        or (op == "avg" and (not dtype.is_floating_point or ranks & (ranks - 1)))
    ):
        return None
    largest = (
        2 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max
    )  # of which all below are exact
    return None if ranks > largest else 1 if op == "avg" else ranks
