"""The rule that computes on a part of the rows what follows a sum over ranks, and gathers less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from commpass.costmodel.links import sent_bytes
from commpass.passes.fx.ops import aten, functional
from commpass.passes.simplify.before_gather import LocalValues
from commpass.passes.simplify.cut import Region, cheapest_cut
from commpass.passes.simplify.editor import Editor, Exchange, fake, nbytes
from commpass.passes.simplify.rules.quantise import consumers_of, operator_text
from commpass.passes.simplify.rules.rule import Applied
from commpass.passes.simplify.shards import is_extremum_of_parts
from commpass.passes.simplify.summed_rows import region_behind_sums

RULE = "sequence parallel"


def sequence_parallel(node: fx.Node, editor: Editor) -> Applied | None:
    """f(ar(x)) = ag(f(rs(x))), if f computes each row alone: what is gathered has fewer bytes.

    An all_reduce is a reduce_scatter, then an all_gather. The sums that f adds to each other are
    scattered together, so that a residual stream need not be gathered.
    """
    exchange = editor.exchange(node, ("all_reduce",))
    if exchange is None or node in editor.whole_sums:
        return None
    region = region_behind_sums(exchange, editor)
    cut = cheapest_cut(region) if region is not None else []
    why = _rejection(region, cut, editor)
    editor.reject(exchange.call, RULE, why)
    if region is None or why is not None:
        editor.whole_sums.update(region.sources if region is not None else [node])
        return None
    return _shard_rows(region, cut, editor)


def _computed(region: Region, cut: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the values that a rank computes on its rows, in graph order."""
    return sorted({*region.needed_for(cut), *cut} - region.sources.keys())


def _scattered(region: Region, cut: Sequence[fx.Node]) -> dict[fx.Node, Exchange]:
    """Return the sums that become reduce_scatters. The others are needed whole."""
    return {wait: each for wait, each in region.sources.items() if wait not in cut}


def _sent(region: Region, cut: Sequence[fx.Node]) -> list[tuple[str, float]]:
    """Return (kind, bytes handed to it) of the new exchanges."""
    parts = [each for each in cut if each not in region.sources]
    gathered = [each for each in parts if region.shards[each].dim is not None]
    computed = _computed(region, cut)
    extrema = [each for each in computed if is_extremum_of_parts(each, region.shards)]
    scattered = _scattered(region, cut).values()
    return [
        *(("reduce_scatter", nbytes(each.input)) for each in scattered),
        *(("all_gather", region.nbytes(each) / region.ranks) for each in gathered),
        *(("all_gather", nbytes(each)) for each in extrema),
    ]


def _rejection(region: Region | None, cut: Sequence[fx.Node], editor: Editor) -> str | None:
    """Return why the sums of a region stay as they are, or None if the new exchanges take less time
    by the cost model, by more than its margin. The operators take no longer: they compute a part of
    the rows."""
    if region is None:
        return f"{RULE}: no row-wise operator follows, or its rows are no equal parts for the ranks"
    call, old = region.exchange.call, _scattered(region, cut).values()
    if not old:
        return f"{RULE}: all ranks need the whole sum"
    before = sum(editor.time_us("all_reduce", nbytes(each.input), call) for each in old)
    after = sum(editor.time_us(kind, size, call) for kind, size in _sent(region, cut))
    margin = editor.profile.margin
    if before - after > margin * before:
        return None
    below = f", a gain below the model's margin of {margin:.0%}" if after < before else ""
    return f"{RULE}: it would take {after:,.1f} us instead of {before:,.1f} us{below}"


def _shard_rows(region: Region, cut: Sequence[fx.Node], editor: Editor) -> Applied:
    computed, scattered = _computed(region, cut), _scattered(region, cut)
    parts = [each for each in cut if each not in region.sources]
    names = [each.call.node.name for each in scattered.values()]
    moved = tuple(text for each in computed if (text := operator_text(each)))
    consumer = consumers_of([one for each in parts for one in region.members(each)])
    before = sum(
        sent_bytes("all_reduce", region.ranks, nbytes(each.input)) for each in scattered.values()
    )
    after = sum(sent_bytes(kind, region.ranks, size) for kind, size in _sent(region, cut))
    local = LocalValues(region, editor, RULE, region.exchange.wait)
    starts = [_scatter(wait, each, local) for wait, each in scattered.items()]
    for wait in sorted(region.sources.keys() - scattered.keys()):
        local.place = wait.next
        local.made[wait] = local.part_of(wait, _dim(wait, region))
    new: dict[fx.Node, fx.Node] = {}
    for node in computed:
        local.place = node
        local.compute_one(node)
        if node in parts:
            new[node] = _gathered(node, local)
    for first, value in new.items():
        for member in region.members(first):
            if editor.lives(member):
                editor.replace(member, value)
    for part in local.made.values():
        editor.prune(part)
    into = ", ".join([*(start.name for start in starts), *(each.text for each in local.sent)])
    site, *others = names
    saved = round(before - after)
    return Applied(site, into, saved, moved, tuple(others), consumer=consumer)


def _dim(node: fx.Node, region: Region) -> int:
    dim = region.shards[node].dim
    assert dim is not None, node
    return dim


def _scatter(wait: fx.Node, exchange: Exchange, local: LocalValues) -> fx.Node:
    """Replace an all_reduce by a reduce_scatter of its rows, and return its start."""
    call, ranks, dim = exchange.call, local.region.ranks, _dim(wait, local.region)
    shape: list[Any] = list(fake(wait).shape)
    value = exchange.input
    local.place = call.node
    if dim:
        value = local.emit(call.node, aten.reshape.default, value, shape[dim:])
    target, given = functional.reduce_scatter_tensor.default, (call.reduce_op, ranks, call.group)
    start = local.emit(call.node, target, value, *given)
    local.place = wait
    part = local.emit(call.node, functional.wait_tensor.default, start)
    if dim:
        shape[dim] //= ranks
        part = local.emit(call.node, aten.reshape.default, part, shape)
    local.made[wait] = part
    return start


def _gathered(node: fx.Node, local: LocalValues) -> fx.Node:
    """Return a value that is computed on a rank's rows as all ranks need it."""
    if local.region.shards[node].dim is None:
        return local.made[node]
    (sent,) = local.start([node]).values()
    return sent.received(node, local.editor, RULE)
