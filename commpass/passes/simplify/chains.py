"""Chains of one-input operators that rules move past a collective.

A *view* moves values; a *one-to-one* operator maps each value separately. Both commute with taking
a part, if the dimensions can be followed. One-to-one operators also commute with a gather. A
*scaling* is linear as well, so it also commutes with a sum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.ops import (
    MULTIPLICATIONS,
    RESHAPES,
    SCALINGS,
    SPLITS,
    aten,
    is_cast,
    is_copy,
    moves_values,
)
from commpass.passes.simplify.editor import Editor, Exchange, fake

WIDE = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes whose values may be added or scaled before a sum over ranks instead of after it.

float16 is excluded: it ends at 65,504 and 2^-24. A sum of two values may be Inf although the sums
over all ranks are finite. A scaled value may be 0 although the scaled sum is not.
"""
FARTHEST = 32
"""The maximum total scaling, in powers of two, that a chain may apply before a sum.

These dtypes end at 2^127 and 2^-126. Values between 2^-60 and 2^60 thus stay in range, over up to
2^30 ranks.
"""
LONGEST = 16
"""The maximum number of links in a chain, which keeps the pass linear."""


def is_scaling(node: fx.Node) -> bool:
    """Whether a node multiplies or divides by a number, in the same dtype."""
    if node.target not in SCALINGS or any(isinstance(arg, fx.Node) for arg in node.args[1:]):
        return False
    return isinstance(node.args[0], fx.Node) and fake(node).dtype == fake(node.args[0]).dtype


def keeps_range(chain: Sequence[fx.Node], *numbers: Any) -> bool:
    """Whether the scalings of a chain, and by these numbers, can cross a sum over ranks without
    overflow or underflow."""
    links = [link for link in chain if is_scaling(link)]
    given = [number for link in links for number in link.args[1:]] + list(numbers)
    if not all(isinstance(number, (int, float)) and number for number in given):
        return False
    in_range = all(fake(link).dtype in WIDE for link in links)
    return in_range and sum(abs(math.log2(abs(number))) for number in given) <= FARTHEST


def maps_values(node: fx.Node) -> bool:
    """Whether a node maps values elementwise in place, without moving them."""
    return is_cast(node) or is_scaling(node)


def is_one_to_one(node: fx.Node) -> bool:
    return is_copy(node) or maps_values(node)


def before_clone(node: fx.Node) -> fx.Node:
    """Return the source of a copy. Collectives need contiguous inputs, so expanded tensors are
    copied before them."""
    return node.args[0] if node.target is aten.clone.default else node  # type: ignore[return-value]


def scales(chain: Sequence[fx.Node]) -> tuple[str, ...]:
    """Return the numbers by which a chain scales, for the plan, because ranks must agree on them.
    Call it before the chain is erased."""
    return tuple(_scale(link) for link in chain if is_scaling(link))


def _scale(link: fx.Node) -> str:
    if link.target is aten.neg.default:
        return "times -1"
    return f"{'times' if link.target in MULTIPLICATIONS else 'divided by'} {link.args[1]}"


def trace_to_source(
    node: Any,
    allowed: Callable[[fx.Node], bool],
    found: Callable[[fx.Node], Any],
    user: fx.Node | None = None,
) -> tuple[Any, tuple[fx.Node, ...]] | None:
    """Walk back through allowed links to the first node for which ``found`` returns a value. Return
    that value and the links, in graph order.

    If ``user`` is given, neither the node nor any link may have another user.
    """
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node) and len(chain) <= LONGEST:
        if user is not None and (len(node.users) != 1 or user not in node.users):
            return None
        if (result := found(node)) is not None:
            return result, tuple(reversed(chain))
        if not allowed(node):
            return None
        chain.append(node)
        node, user = rejoined_source(node) or node.args[0], node if user is not None else None
    return None


def repeat(
    chain: Sequence[fx.Node],
    value: fx.Node,
    before: fx.Node,
    rule: str,
    editor: Editor,
    dims: Sequence[int] = (),
    times: int = 1,
    part: int = 1,
) -> fx.Node:
    """Apply a chain's operators to another value.

    ``dims`` gives a dimension of each link's result. Its length is multiplied by ``times`` and
    divided by ``part``.
    """
    for number, link in enumerate(chain):
        target, args = link.target, link.args[1:]
        if link.target is aten.cat.default:  # one part of rejoined parts is the part itself
            continue
        if target in RESHAPES:
            # The value may have another layout than the link's input, so a view of it may need a
            # copy.
            target = aten.reshape.default
            if dims:
                shape = list(fake(link).shape)
                shape[dims[number]] = shape[dims[number]] * times // part
                args = (shape,)
        value = editor.emit(before, rule, link, target, value, *args, **link.kwargs)
    return value


# --- parts ---


@dataclass(frozen=True)
class Part:
    """A rank's own part of a collective's result.

    It is a part of dimension ``dim`` of the wait's result, taken after a chain of links. ``dims``
    are the dimensions of the links' results that are then divided.
    """

    exchange: Exchange
    node: fx.Node
    dim: int
    chain: tuple[fx.Node, ...]
    dims: tuple[int, ...]


def _part_of(node: fx.Node, kind: str, editor: Editor) -> Part | None:
    """Return the own part of a collective's result that a node takes, or None."""
    whole = _divided(node) if node not in editor.changing else None
    walked = trace_to_source(whole, _may_divide, lambda n: editor.exchange(n, (kind,)))
    if walked is None or whole is None:
        return None
    exchange, chain = walked
    ranks, rank = editor.size(exchange.call), editor.rank(exchange.call)
    dim = None if rank is None or ranks < 2 else _own_dim(node, fake(whole).shape, ranks, rank)
    dims: list[int] = []
    for link in reversed(chain):
        if dim is None:
            return None
        dims.append(dim)
        dim = dim_before(link, dim, ranks)
    return None if dim is None else Part(exchange, node, dim, chain, tuple(reversed(dims)))


def own_parts(exchange: Exchange, editor: Editor) -> list[Part] | None:
    """Return the parts that are the only uses of an exchange's result; None if it has other
    uses."""
    leaves: list[fx.Node] = []
    stack = [exchange.wait]
    for _ in range(LONGEST):
        if not stack:
            break
        node = stack.pop()
        for user in node.users:
            if user.target in SPLITS:
                items = [item for item in user.users if item.users]
                behind = {each for item in items for each in item.users}
                whole_again = len(behind) == 1 and rejoined_source(next(iter(behind))) is not None
                stack += behind if whole_again else []
                leaves += [] if whole_again else items
            elif user.target is aten.slice.Tensor:
                leaves.append(user)
            elif user.users and _may_divide(user):
                stack.append(user)
            else:
                return None
    found = [_part_of(leaf, exchange.call.kind, editor) for leaf in leaves[: LONGEST + 1]]
    parts = [part for part in found if part is not None and part.exchange.wait is exchange.wait]
    one = len({part.dim for part in parts}) == 1
    return parts if one and not stack and len(leaves) == len(parts) <= LONGEST else None


def _divided(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a node takes a part of, or None."""
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and source.target in SPLITS:
        source = source.args[0]
    elif node.target is not aten.slice.Tensor:
        return None
    return source


def _own_dim(node: fx.Node, shape: torch.Size, ranks: int, rank: int) -> int | None:
    """Return the dimension of which a slice or split item takes this rank's equal part, or None."""
    if node.target is aten.slice.Tensor:
        given: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
        dim, start, end, step = given
    else:
        split: Any = node.args[0]
        dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    dim %= len(shape)
    length = shape[dim]
    if not isinstance(length, int) or length == 0 or length % ranks:
        return None
    part = length // ranks
    if node.target is aten.slice.Tensor:
        start, end = start or 0, length if end is None else end
        if not isinstance(start, int) or not isinstance(end, int):
            return None
        first, last = start + length * (start < 0), min(end + length * (end < 0), length)
        own = (first, last, step) == (rank * part, (rank + 1) * part, 1)
    else:
        own = bool(node.args[1] == rank) and split.args[1] in (part, [part] * ranks)
    return dim if own else None


def rejoined_source(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose equal split parts a node joins again, possibly along another
    dimension, or None.

    A gather along a dimension other than the first has this form.
    """
    pieces: Any = node.args[0] if node.target is aten.cat.default else ()
    split: Any = pieces[0].args[0] if pieces and pieces[0].target is operator.getitem else None
    if (
        split is None
        or split.target is not aten.split.Tensor
        or len(pieces) != len(split.meta["val"])
    ):
        return None
    all_of_it = all(
        p.target is operator.getitem and p.args == (split, number)
        for number, p in enumerate(pieces)
    )
    equal = len({meta.shape(value) for value in split.meta["val"]}) == 1
    return split.args[0] if all_of_it and equal else None


def _may_divide(node: fx.Node) -> bool:
    if is_one_to_one(node) or rejoined_source(node) is not None:
        return True
    if node.target in RESHAPES:
        sizes = (*fake(node).shape, *fake(node.all_input_nodes[0]).shape)
        return all(isinstance(size, int) for size in sizes)
    return moves_values(node)


def dim_before(link: fx.Node, dim: int, ranks: int) -> int | None:
    """Return the dimension of a link's argument whose equal parts become those of dimension ``dim``
    of its result, or None."""
    args: Any = link.args
    if is_one_to_one(link):
        return dim
    if link.target is aten.cat.default:
        split, along = args[0][0].args[0], args[1] if len(args) > 1 else 0
        if dim != along % fake(link).dim() or len(args[0]) != ranks:
            return None
        return (split.args[2] if len(split.args) > 2 else 0) % fake(link).dim()
    given, made = fake(args[0]).shape, fake(link).shape
    if link.target is aten.permute.default:
        return args[1][dim] % len(given)
    if link.target in (aten.transpose.int, aten.t.default):
        a, b = (
            (args[1] % len(given), args[2] % len(given))
            if link.target is aten.transpose.int
            else (0, len(given) - 1)
        )
        return {a: b, b: a}.get(dim, dim)
    if link.target is aten.unsqueeze.default:
        new = args[1] % len(made)
        return None if dim == new else dim - (dim > new)
    if link.target is aten.squeeze.dim:
        return dim if len(given) == len(made) else dim + (dim >= args[1] % len(given))
    # A reshape keeps the order of values. Equal parts correspond if the preceding dimensions have
    # equal products.
    before = math.prod(made[:dim])
    fits = (
        d
        for d in range(len(given))
        if math.prod(given[:d]) == before and given[d] and given[d] % ranks == 0
    )
    return next(fits, None) if made[dim] % ranks == 0 else None
