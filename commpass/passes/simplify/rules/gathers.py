"""Rules for gathers: send each value in its narrowest dtype, and only once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from commpass import groups
from commpass.passes.fx import meta
from commpass.passes.fx.ops import aten, convert, is_cast, is_copy, moves_values
from commpass.passes.simplify.carriers import CARRIERS, SENT_EVERYWHERE
from commpass.passes.simplify.chains import (
    before_clone,
    is_scaling,
    maps_values,
    repeat,
    scales,
    trace_to_source,
)
from commpass.passes.simplify.editor import Editor, Exchange, common_nbytes, fake, nbytes
from commpass.passes.simplify.rules.rule import Applied
from commpass.plan.kinds import COPIES, GATHERS

AS_BYTES = "as bytes"
EXACT_WIDENINGS = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
    (torch.int8, torch.int32),
    (torch.uint8, torch.int32),
    (torch.int8, torch.int64),
    (torch.uint8, torch.int64),
    (torch.int32, torch.int64),
}


def gather_then_narrow(node: fx.Node, editor: Editor) -> Applied | None:
    """to(narrow, gather(x)) = gather(to(narrow, x)): a gather moves values, a cast is elementwise.

    Views and copies in between stay after the gather. Scales in between move before it with the
    cast, in their order.
    """
    if not is_cast(node) or node in editor.changing:
        return None
    between = trace_to_source(node.args[0], _is_link, lambda n: editor.exchange(n, GATHERS), node)
    if between is None:
        return None
    exchange, chain = between
    maps, rest = [n for n in chain if maps_values(n)], [n for n in chain if _lays_out(n)]
    wide, narrow = fake(exchange.wait).dtype, fake(node).dtype
    if narrow.itemsize >= wide.itemsize or narrow not in SENT_EVERYWHERE:
        return None
    place, rule = exchange.call.node, "gather then narrow"
    value = repeat(maps, exchange.input, place, rule, editor)
    value = editor.emit(place, rule, node, convert, value, narrow)
    saved = nbytes(exchange.input) - nbytes(value)
    gathered = editor.collective(place, rule, exchange.call, value)
    into = f"{gathered.all_input_nodes[0].name} of {meta.dtype_name(narrow)}"
    done = Applied(place.name, into, saved, scales(chain))
    editor.replace(node, repeat(rest, gathered, node, rule, editor))
    return done


def _is_link(node: fx.Node) -> bool:
    return _lays_out(node) or maps_values(node)


def _lays_out(node: fx.Node) -> bool:
    return moves_values(node) or is_copy(node)


def widened(
    exchange: Exchange, editor: Editor, *, scaled: bool = False
) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """Return the source of a collective's input that was widened without loss, the cast, and the
    views in between.

    If ``scaled``, scalings after the cast are accepted too. Return None if the narrow values are
    written to, because they would now be read later.
    """

    def may_follow(node: fx.Node) -> bool:
        return moves_values(node) or (scaled and is_scaling(node))

    walked = trace_to_source(exchange.input, may_follow, lambda n: n if is_cast(n) else None)
    if walked is None:
        return None
    cast, views = walked
    source = cast.args[0]
    exact = (fake(source).dtype, fake(cast).dtype) in EXACT_WIDENINGS
    return (source, cast, views) if exact and source not in editor.changing else None


def widen_then_gather(node: fx.Node, editor: Editor) -> Applied | None:
    """gather(to(wide, x)) = to(wide, gather(x)): a gather moves values, and widening loses
    nothing."""
    exchange = editor.exchange(node, GATHERS)
    found = widened(exchange, editor) if exchange is not None else None
    if exchange is None or found is None:
        return None
    source, cast, views = found
    place, rule, name = exchange.call.node, "widen then gather", exchange.call.node.name
    less = 1 - fake(source).dtype.itemsize / fake(cast).dtype.itemsize
    call, saved = exchange.call, nbytes(exchange.input) * less
    size = common_nbytes(call, editor.size(call))
    sent = size - round(size * less)
    before, after = (editor.time_us(call.kind, each, call) for each in (size, sent))
    if before - after < editor.kernels_us(1):
        # The cast may have been overlapped by another exchange; now it comes after this one.
        return None
    if len(cast.users) > 1 and not editor.may_extend(cast, place, sent, size):
        return None
    laid_out = repeat(views, source, place, rule, editor)
    narrow = editor.collective(place, rule, exchange.call, laid_out)
    wide = editor.emit(node, rule, cast, convert, narrow, fake(cast).dtype)
    into = f"{narrow.all_input_nodes[0].name} of {meta.dtype_name(fake(source).dtype)}"
    editor.replace(node, wide)
    return Applied(name, into, round(saved))


def gather_of_expand(node: fx.Node, editor: Editor) -> Applied | None:
    """all_gather(expand(x)) = expand(all_gather(x)): send repeated values, or a single number, only
    once."""
    exchange = editor.exchange(node, ("all_gather",))
    wide = before_clone(exchange.input) if exchange is not None else None
    if (
        exchange is None
        or wide is None
        or wide.target not in (aten.expand.default, aten.full.default)
        or wide in editor.changing
    ):
        return None
    shape = fake(wide).shape
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        return None
    rule, place, ranks = "gather of expand", exchange.call.node, editor.size(exchange.call)
    small: Any = wide.args[0] if wide.target is aten.expand.default else None
    kept = (
        [1] * len(shape)
        if small is None
        else [1] * (len(shape) - fake(small).dim()) + list(fake(small).shape)
    )
    saved = nbytes(wide) - math.prod(kept) * fake(wide).dtype.itemsize
    if editor.time_us("all_gather", nbytes(wide), exchange.call) <= (
        editor.time_us("all_gather", nbytes(wide) - saved, exchange.call) + editor.kernels_us(1)
    ):
        return None
    if small is None:
        small = editor.emit(place, rule, wide, aten.full.default, kept, wide.args[1], **wide.kwargs)
    elif list(fake(small).shape) != kept:
        small = editor.emit(place, rule, wide, aten.reshape.default, small, kept)
    name = place.name
    gathered = editor.collective(place, rule, exchange.call, small)
    # Row r of the gathered result stands for all rows of rank r.
    apart = editor.emit(node, rule, wide, aten.reshape.default, gathered, [ranks, *kept])
    whole = editor.emit(node, rule, wide, aten.expand.default, apart, [ranks, *shape])
    whole = editor.copy(node, rule, wide, whole)
    sizes = list(fake(node).shape)
    editor.replace(node, editor.emit(node, rule, wide, aten.reshape.default, whole, sizes))
    return Applied(name, f"{gathered.all_input_nodes[0].name}, expanded afterwards", saved)


def as_bytes(node: fx.Node, editor: Editor) -> Applied | None:
    """gather(x) = view(gather(view(x, uint8)), dtype): a gather moves bytes, and gloo has no
    float8.

    Libraries that can send such values get them as they are.
    """
    exchange = editor.exchange(node, (*GATHERS, *COPIES))
    value = fake(exchange.input) if exchange is not None else None
    if (
        exchange is None
        or value is None
        or value.dtype in SENT_EVERYWHERE
        or value.dtype.itemsize != 1
        or not groups.sends_messages(str(exchange.call.group), value.device.type)
    ):
        return None
    place, rule, view = exchange.call.node, AS_BYTES, aten.view.dtype
    carrier = CARRIERS[value.dtype.itemsize]
    # in contiguous memory first: torch views other memory too, but not in every compiler
    x = editor.contiguous(place, rule, exchange.input)
    sent = editor.emit(place, rule, exchange.input, view, x, carrier)
    arrived = editor.collective(place, rule, exchange.call, sent)
    name, dtype = place.name, meta.dtype_name(value.dtype)
    editor.replace(node, editor.emit(node, rule, node, view, arrived, value.dtype))
    into = f"{arrived.all_input_nodes[0].name}, {dtype} as {meta.dtype_name(carrier)}"
    return Applied(name, into, 0)
