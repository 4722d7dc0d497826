"""The rule that sends what the consumers of a gathered value compute from it, if that is less."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.ops import (
    RESHAPES,
    aten,
    is_copy,
    is_matmul,
    moves_values,
    opname,
    reached,
)
from commpass.passes.simplify.before_gather import before_gather
from commpass.passes.simplify.chains import rejoined_source
from commpass.passes.simplify.cut import Region, cheapest_cut, region_of
from commpass.passes.simplify.editor import Editor, Exchange, common_nbytes, fake, nbytes
from commpass.passes.simplify.rules.rule import Applied
from commpass.passes.simplify.shards import FILLS, is_extremum_of_parts
from commpass.plan.kinds import GATHERS

RULE = "quantised before gather"
IN_16_BITS = "quantised in 16 bits before gather"
NEEDED = (
    "its values are quantised after it: other operators need them too, or the codes do not depend"
    " on each rank's part alone (docs/codes.md)"
)
"""Why a gather before a quantiser stays as it is, if not by cost."""
NEAR = 64
"""How many operators behind a gather are searched for a quantiser."""


def quantise_before_gather(node: fx.Node, editor: Editor) -> Applied | None:
    """f(gather(x)) = gather(f(x)), if f keeps the parts of the ranks: codes and scales are sent
    instead of the values that they are computed from.

    A maximum over all parts is that of the ranks' maxima. These are gathered, since an all_reduce
    with "max" loses NaN in some libraries.
    """
    return _quantise(node, editor, RULE)


def quantise_in_16_bits(node: fx.Node, editor: Editor) -> Applied | None:
    """The same for quantisers that compute in bfloat16 or float16: the bits of the graph, but not
    those of Inductor, which rounds where its kernels end."""
    return _quantise(node, editor, IN_16_BITS)


def _quantise(node: fx.Node, editor: Editor, rule: str) -> Applied | None:
    exchange = editor.exchange(node, GATHERS)
    if exchange is None:
        return None
    found = smaller_cut(node, editor, in_16_bits=rule == IN_16_BITS)
    if found is None:
        editor.reject(exchange.call, rule, NEEDED if _is_quantised(exchange, editor) else None)
        return None
    region, cut = found
    computed = sorted({*region.needed_for(cut), *cut})
    parts = [each for each in cut if region.shards[each].dim is not None]
    extrema = [each for each in computed if is_extremum_of_parts(each, region.shards)]
    before_us, after_us = _times_us(parts, extrema, region, editor)
    if after_us >= before_us:
        times = f"{after_us:,.1f} us instead of {before_us:,.1f} us"
        editor.reject(exchange.call, rule, f"{RULE}, it would take {times}")
        return None
    name, before = exchange.call.node.name, nbytes(exchange.input)
    moved = tuple(text for each in computed if (text := operator_text(each)))
    consumer = consumers_of([each for first in parts for each in region.members(first)])
    local = before_gather(region, editor, rule)
    local.compute(computed)
    sent = local.start(parts)
    new = {each: started.received(node, editor, rule) for each, started in sent.items()}
    new |= {each: local.made[each] for each in computed if region.shards[each].dim is None}
    for first, value in new.items():
        for member in region.members(first):
            if editor.lives(member):
                editor.replace(member, value)
    into = ", ".join(each.text for each in local.sent)
    saved = before - sum(each.nbytes for each in local.sent)
    return Applied(name, into, saved, moved, consumer=consumer)


def smaller_cut(
    node: fx.Node, editor: Editor, *, in_16_bits: bool = False
) -> tuple[Region, list[fx.Node]] | None:
    """Return what is computed from a gathered value, maybe ``in_16_bits``, and the values of it to
    gather instead. None if no such values have fewer bytes."""
    exchange = editor.exchange(node, GATHERS)
    if exchange is None or not _may_change(exchange, editor):
        return None
    region = region_of(exchange, editor, in_16_bits)
    cut = cheapest_cut(region) if region is not None else []
    return None if region is None or not cut or node in cut else (region, cut)


def _is_quantised(exchange: Exchange, editor: Editor) -> bool:
    """Whether codes of 8 bits are computed from a gathered value without a matmul between, as far
    as the next operators show. Values that may not change do not count."""
    left, seen = [exchange.wait], {exchange.wait}
    while _may_change(exchange, editor) and left and len(seen) < NEAR:
        for user in left.pop(0).users:
            value = meta.tensor(user)
            if user in seen or is_matmul(user):
                continue
            if value is not None and value.dtype.itemsize == 1 and value.dtype != torch.bool:
                return True  # several values, such as those of a split, are followed as well
            seen.add(user)
            left.append(user)
    return False


def _may_change(exchange: Exchange, editor: Editor) -> bool:
    """Whether it sends numbers, and the policy leaves it to the passes how.

    A forced codec was asked for by the user. Integers may be codes already, such as a wire of
    bytes.
    """
    allowed = editor.allowed.get(exchange.call.node)
    left_to_passes = allowed is None or not allowed.force
    return left_to_passes and fake(exchange.wait).dtype.is_floating_point


def _times_us(
    parts: Sequence[fx.Node], extrema: Sequence[fx.Node], region: Region, editor: Editor
) -> tuple[float, float]:
    """Return the predicted microseconds of the exchange, and of the new ones.

    The operators take no longer: they compute a part instead of the whole.
    """
    call, ranks = region.exchange.call, region.ranks
    less = sum(editor.time_us(call.kind, region.nbytes(each) / ranks, call) for each in parts)
    less += sum(editor.time_us("all_gather", nbytes(each), call) for each in extrema)
    return editor.time_us(call.kind, common_nbytes(call, ranks), call), less


def consumers_of(codes: Sequence[fx.Node]) -> str:
    """Return the names of the matmuls that take codes as they are, or views of them."""

    def step(node: fx.Node) -> list[fx.Node]:
        if is_matmul(node):
            return []
        return [each for each in node.users if is_matmul(each) or moves_values(each)]

    names = {opname(each).lstrip("_") for each in filter(is_matmul, reached(codes, step))}
    return " and ".join(sorted(names))


def operator_text(node: fx.Node) -> str | None:
    """Return an operator with its numbers, which the ranks compare; None if it has none. The sizes
    of views may differ between ranks."""
    if node.target in RESHAPES or node.target is aten.expand.default or is_copy(node):
        return None
    given = [*node.args, *node.kwargs.values()]
    for each in node.all_input_nodes:
        given += each.args[-1:] if each.target in FILLS else []
    numbers = [
        str(each).removeprefix("torch.")
        for each in given
        if isinstance(each, (int, float, torch.dtype))
        or (isinstance(each, list) and all(isinstance(one, int) for one in each))
    ]
    takes_item = node.target is operator.getitem
    if not numbers or takes_item or moves_values(node) or rejoined_source(node) is not None:
        return None
    return " ".join([opname(node), *numbers])
