"""Which values that are computed from sums over ranks can be computed on a part of the rows by each
rank.

An operator is *row-wise* if each row of its result depends on the same row of its inputs. Residual
additions, norms and quantisers are. Their other inputs must be equal on all ranks. Results of
all_reduce and all_gather are, and so is what is computed from these alone. Inputs of the graph are
assumed to be, since the user says so (``Policy(sequence_parallel=True)``). Results of matmuls and
addends of sums are not: each rank has its own.
"""

from __future__ import annotations

import heapq
import operator

from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.ops import is_matmul, is_repeatable, may_compute_much
from commpass.passes.fx.parse import is_wait
from commpass.passes.fx.rowwise import Axis, is_fixed, rows_of
from commpass.passes.simplify.cut import LARGEST, Region, consumers
from commpass.passes.simplify.editor import Editor, Exchange, fake
from commpass.passes.simplify.shards import Parts, Shard, shard_of
from commpass.plan.kinds import KINDS

REPLICATING = ("all_reduce", "all_gather")
"""The kinds whose results are equal on all ranks of a group."""


def region_behind_sums(exchange: Exchange, editor: Editor) -> Region | None:
    """Return what is computed row by row from a sum over ranks, and from other such sums of the
    group. None if there is nothing, or the rows are no equal parts for the ranks."""
    ranks, dim = editor.size(exchange.call), _row_dim(exchange, editor)
    if dim is None:
        return None
    region = Region(exchange, ranks, {exchange.wait: Shard(dim)})
    heap = sorted(consumers(exchange.wait))
    while heap and len(region.shards) < LARGEST:
        node = heapq.heappop(heap)
        if node in region.shards or node in editor.changing:
            continue
        shard = _shard(node, region)
        sums = None if shard is None else _sums_before(node, region, editor)
        if shard is None or sums is None:
            continue
        region.shards[node] = shard
        behind = [node]
        for wait, joined in sums.items():
            dim = _row_dim(joined, editor)
            if dim is not None and wait not in region.shards:
                region.shards[wait], region.joined[wait] = Shard(dim), joined
                behind.append(wait)
        for each in behind:
            for user in consumers(each):
                heapq.heappush(heap, user)
    if len(region.shards) == 1 or not _is_consistent(region):
        return None
    region.shards = dict(sorted(region.shards.items()))
    region.number_values()
    return region


def _is_consistent(region: Region) -> bool:
    """Whether all values have the rows where their users need them, also if they were found
    later than these."""
    sources = region.sources
    return all(
        node in sources or _shard(node, region) == shard for node, shard in region.shards.items()
    )


def _row_dim(exchange: Exchange, editor: Editor) -> int | None:
    """Return the dimension of a sum that is divided between the ranks: the first one that is longer
    than 1. None if it may not be, or not into equal parts."""
    call, value = exchange.call, fake(exchange.wait)
    ranks = editor.size(call)
    if call.kind != "all_reduce" or call.reduce_op not in ("sum", "avg") or ranks < 2:
        return None
    if not meta.is_fixed(value) or not value.is_contiguous() or editor.rank(call) is None:
        return None
    if not value.is_floating_point() or not editor.keeps_values(call.node):
        return None
    dim = next((dim for dim, size in enumerate(value.shape) if size != 1), None)
    return None if dim is None or value.shape[dim] % ranks else dim


def _shard(node: fx.Node, region: Region) -> Shard | None:
    """Return where the result of a node has the rows; None if it does not keep them, or not in
    equal parts."""
    single = all(meta.tensor(each) is not None for each in node.all_input_nodes)
    parts = Parts(region.ranks, region.even, lambda size: isinstance(size, int))
    exact = shard_of(node, region.shards, parts) if single else None
    if exact is not None:
        dim = exact.dim
    elif is_matmul(node) or not is_fixed(node):
        return None
    else:
        given = {each: region.shards.get(each) for each in node.all_input_nodes}
        axes = {each: Axis(its.dim) for each, its in given.items() if its and its.dim is not None}
        if (found := rows_of(node, axes)) is None:
            return None
        dim = found.axis.dim
    values = list(meta.tensors(node.meta["val"]))
    even = dim is None or all(value.shape[dim] % region.ranks == 0 for value in values)
    return Shard(dim) if even else None


def _sums_before(node: fx.Node, region: Region, editor: Editor) -> dict[fx.Node, Exchange] | None:
    """Return the sums over ranks that a node's inputs from outside the region are computed from.
    None if these may differ between ranks."""
    first, found = region.exchange.call, dict[fx.Node, Exchange]()
    left, seen = [*node.all_input_nodes], {*region.shards}
    while left and len(seen) < 2 * LARGEST:
        each = left.pop()
        if each in seen:
            continue
        seen.add(each)
        if each in editor.changing or _is_summed(each, editor):
            return None
        if each.op in ("placeholder", "get_attr"):
            continue
        exchange = editor.exchange(each, REPLICATING)
        if exchange is not None and exchange.call.group == first.group:
            if editor.allowed_alike(first, exchange.call):
                found[each] = exchange
        elif _depends_on_inputs_alone(each):
            left += each.all_input_nodes
        else:
            return None
    return None if left else found


def _is_summed(node: fx.Node, editor: Editor) -> bool:
    """Whether ranks add their values of a node, which therefore differ."""
    calls = (editor.call(user) for user in node.users)
    return any(call is not None and KINDS[call.kind].sums for call in calls)


def _depends_on_inputs_alone(node: fx.Node) -> bool:
    """Whether a node gives equal results on all ranks for equal inputs, and multiplies no
    weights."""
    if is_wait(node) or is_matmul(node) or may_compute_much(node):
        return False
    return node.target is operator.getitem or is_repeatable(node.target)
