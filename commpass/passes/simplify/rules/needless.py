"""Rules that remove needless collectives: duplicates, those of constants, and those in a group of
one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from commpass.passes.fx.ops import aten, is_cast
from commpass.passes.fx.parse import is_wait, parse
from commpass.passes.simplify.chains import LONGEST
from commpass.passes.simplify.editor import Editor, Exchange, fake, nbytes, same_shape
from commpass.passes.simplify.rules.rule import Applied
from commpass.plan.kinds import COPIES, GATHERS, SUMS


def waits(node: fx.Node, editor: Editor) -> Applied | None:
    """Remove repeated waits, so that other rules see only one wait."""
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
        if first is not node:  # torch 2.14 merges equal collectives, but keeps their waits
            editor.replace(node, first)
            _merge_casts(first, editor)
    return None


def _merge_casts(value: fx.Node, editor: Editor) -> None:
    """Merge equal casts of a value whose waits were merged. Other rules look for the single user of
    a result."""
    known: dict[Any, fx.Node] = {}
    casts = [user for user in value.users if is_cast(user) and user not in editor.changing]
    for user in sorted(casts):
        cast = known.setdefault((user.target, user.args, tuple(user.kwargs.items())), user)
        if cast is not user:
            editor.replace(user, cast)


def same(node: fx.Node, editor: Editor) -> Applied | None:
    """Merge two collectives of equal values over one group.

    all_to_all is excluded: its entry counts are local to a rank and may be equal by chance.
    """
    kinds = (*SUMS, *COPIES)
    exchange, equal = editor.exchange(node, kinds), editor.equal.get(node)
    if exchange is None or equal is None or not editor.lives(equal):
        return None
    if editor.sweeps == 1 and _only_for_equal_exchanges(node, editor):
        return None  # removed once those exchanges are merged
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
    """Whether all uses of a value are inputs of exchanges that have an earlier equal one."""
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
    """Replace a collective in a group of one rank by its input."""
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
    """The sum of W equal constants c is W c. Their mean, maximum or minimum is c, and so is their
    gather."""
    exchange = editor.exchange(node, (*SUMS, *GATHERS))
    if exchange is None or exchange.input.target is not aten.full.default:
        return None
    source, value = exchange.input, fake(node)
    ranks = editor.size(exchange.call)
    result = _constant(exchange, _on_every_rank(source), ranks)
    if result is None or ranks < 1 or not all(isinstance(length, int) for length in value.shape):
        return None
    name, size = exchange.call.node.name, nbytes(source)
    given = (list(value.shape), result)
    made = editor.emit(node, "constant", source, aten.full.default, *given, **source.kwargs)
    editor.replace(node, made)
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
    """Return the constant that all ranks have, according to the operator's name, or None.

    Other numbers in the graph may be local to this rank, such as its place in the group or its
    sample count.
    """
    made_as: Any = full.meta.get("original_aten")
    return (
        NAMED.get(getattr(made_as, "_schema", made_as).name.split("::")[-1])
        if made_as is not None
        else None
    )


def _constant(exchange: Exchange, value: int | None, ranks: int) -> Any:
    """Return the result of a collective of a constant, as the operator's argument; None if its bits
    are not certain."""
    dtype, literal = fake(exchange.input).dtype, exchange.input.args[1]
    op = exchange.call.reduce_op
    if value is not None and literal != value:
        return None
    if op is None or op in ("max", "min"):
        return None if value is None else literal
    plain_zero = literal == 0 and not str(literal).startswith("-")  # the sign of zero matters
    if op not in ("sum", "avg") or (value is None and not plain_zero):
        return None
    if plain_zero:
        return literal
    return _ones(op, dtype, ranks)


def _ones(op: str, dtype: torch.dtype, ranks: int) -> int | None:
    """Return the sum or mean of ones if all partial sums are exact in any order, else None.

    For a mean, each divided addend must be exact too, because some libraries divide before they
    add.
    """
    if (
        dtype is torch.bool
        or dtype.is_complex
        or (op == "avg" and (not dtype.is_floating_point or ranks & (ranks - 1)))
    ):
        return None
    largest = (
        2 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max
    )  # all smaller integers are exact
    return None if ranks > largest else 1 if op == "avg" else ranks
