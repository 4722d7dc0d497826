"""Collectives of parts that may differ in length: all_to_all, all_gather_v and reduce_scatter_v.

``Request.sent`` and ``received`` are the lengths of the parts for each rank, in entries of the
first dimension. In an all_to_all each rank knows its own. The other two are all-to-alls of lengths
that all ranks know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from commpass.codecs import VALUES, Codec, accumulation_dtype, cut_apart, operators, pad
from commpass.codecs.operators import sum_rows
from commpass.collectives import data_sized
from commpass.collectives.algorithm import Algorithm
from commpass.collectives.moves import all_gather_steps, direct, move_rows
from commpass.collectives.reductions import DIRECT, Staged, flow_of, no_sparse
from commpass.collectives.request import Request, Rows, scatter
from commpass.collectives.scatters import convert
from commpass.collectives.steps import Coding, Flow, Steps, shard_length

LONG = 1.05
"""A row is long enough for a codec if its bytes per value are at most this factor times those of a
large tensor."""


def all_to_all_steps(x: Tensor, request: Request, codec: Codec, flow: Flow) -> Steps:
    """Send parts of ``[n, ...]`` to all ranks and concatenate the received parts.

    With even splits, each rank's part is a row. Otherwise each entry of the first dimension is a
    row (mixture of experts: a token), or each rank's part if entries are too short for the codec.
    """
    if request.sent is None or request.received is None:
        rows = x.reshape(request.ranks, -1)
        moved = yield from move_rows(rows, x.dtype, codec, flow, scatter(request))
        return moved.reshape(x.shape)
    width, arriving = _width(x), sum(request.received)
    if by_entries(codec, width, x.dtype, request):
        move = Rows(request, request.sent, request.received)
        moved = yield from move_rows(x.reshape(x.shape[0], width), x.dtype, codec, flow, move)
        return moved.reshape(arriving, *x.shape[1:])
    # Ranks whose parts are even must do the same as ranks whose parts are not.
    coding = Coding(codec, x.dtype, flow).undivided()
    if _even(request):
        rows = x.reshape(request.ranks, request.sent[0] * width)
        moved = yield from move_rows(rows, x.dtype, codec, coding.flow, scatter(request))
        return moved.reshape(x.shape)
    numels = [entries * width for entries in request.received]
    parts = x.reshape(-1).split([entries * width for entries in request.sent])
    return _joined((yield from parts_hop(parts, numels, coding, request)), numels, x, arriving)


def _joined(rows: Sequence[Tensor], numels: Sequence[int], x: Tensor, entries: int) -> Tensor:
    """Join rows, of which the first ``numels`` values count, to ``entries`` like those of ``x``."""
    whole = [
        cut_apart(row.to(x.dtype), numel) for row, numel in zip(rows, numels, strict=True) if numel
    ]
    return (torch.cat(whole, dim=1) if whole else x.new_empty(0)).reshape(entries, *x.shape[1:])


def all_gather_v_steps(x: Tensor, request: Request, codec: Codec, flow: Flow) -> Steps:
    """Gather ``[received[r], ...]`` of every rank r to ``[sum(received), ...]``: encode once, send
    the same bytes to each rank, decode all."""
    if request.received is None or _even(request):
        return (yield from all_gather_steps(x, request, codec, flow))
    coding, numels = Coding(codec, x.dtype, flow), [n * _width(x) for n in request.received]
    row = x.reshape(1, -1).to(codec.hop_dtype(x.dtype))
    wire, ranks = operators.encode(codec, row, coding.salt(request.rank)), request.ranks
    arrived = yield from _exchange([wire] * ranks, [row.shape[1]] * ranks, numels, coding, request)
    return _joined(arrived, numels, x, sum(request.received))


def reduce_scatter_v_steps(x: Tensor, request: Request, codec: Codec, flow: Flow) -> Steps:
    """Sum part r of ``[sum(sent), ...]`` over the ranks on rank r, in rank order: ``[sent[r],
    ...]``."""
    if request.sent is None or _even(request):
        return (yield from Staged(DIRECT, flow=flow).reduce_scatter(x, request, codec))
    coding, domain, width = Coding(codec, x.dtype, flow), codec.domain, _width(x)
    entries, numels = request.sent[request.rank], [n * width for n in request.sent]
    padded = [shard_length(numel, 1, codec.block) for numel in numels]
    parts = [
        convert(pad(part.reshape(1, -1), length), VALUES, domain)
        for part, length in zip(x.reshape(-1).split(numels), padded, strict=True)
    ]
    length = padded[request.rank]
    arriving = [length] * request.ranks
    arrived = yield from parts_hop(parts, arriving, coding.in_domain(), request)
    if not entries:
        return x.new_empty(0, *x.shape[1:])
    rows = torch.cat([cut_apart(row, length) for row in arrived])
    total = request.from_sum(sum_rows(rows.to(accumulation_dtype(x.dtype))))
    summed = cut_apart(convert(total, domain, VALUES).to(x.dtype), entries * width)
    return summed.reshape(entries, *x.shape[1:])


def parts_hop(
    parts: Sequence[Tensor], arriving: Sequence[int], coding: Coding, request: Request
) -> Steps:
    """Send part r, of any length, to rank r. Return the rows ``[1, padded_numel(arriving[r])]``
    that arrive, one from each rank.

    Two ranks send each other the same bytes as with ``hop`` on a row per rank, so a rank whose
    parts have equal lengths may use ``hop`` instead.
    """
    codec, dtype = coding.codec, coding.dtype
    rows = [part.reshape(1, -1).to(codec.hop_dtype(dtype)) for part in parts]
    wires = [
        operators.encode(codec, row, coding.salt(request.rank, to)) for to, row in enumerate(rows)
    ]
    return (yield from _exchange(wires, [row.shape[1] for row in rows], arriving, coding, request))


def _exchange(
    wires: Sequence[Tensor],
    lengths: Sequence[int],
    arriving: Sequence[int],
    coding: Coding,
    request: Request,
) -> Steps:
    """Send wire r, of ``lengths[r]`` values, to rank r. Return the rows as ``parts_hop``."""
    codec, dtype = coding.codec, coding.dtype
    if data_sized.varies(codec, dtype):
        return (
            yield from data_sized.parts_hop(
                codec, wires, lengths, arriving, dtype, request, coding.flow.sizes_first
            )
        )
    sizes = [codec.wire_bytes(numel, dtype) for numel in arriving]
    move = Rows(request, tuple(wire.shape[1] for wire in wires), tuple(sizes))
    arrived = yield move.start(torch.cat(list(wires), dim=1).flatten())
    return [
        operators.decode(codec, wire.reshape(1, -1), codec.padded_numel(numel), dtype)
        for wire, numel in zip(arrived.split(sizes), arriving, strict=True)
    ]


def _width(x: Tensor) -> int:
    width = 1
    for size in x.shape[1:]:
        width = width * size
    return width


def by_entries(codec: Codec, width: int, dtype: torch.dtype, request: Request) -> bool:
    """Whether entries are encoded one by one. Every rank gets the same answer: it depends on the
    form of the splits, not on their sizes, which differ between ranks."""
    if request.sent is None or request.received is None:
        return False
    if request.unknown or not all(
        isinstance(size, int) for size in (*request.sent, *request.received)
    ):
        return True
    large = 1 << 16
    return (
        codec.expected_bytes(width, dtype) * large
        <= LONG * codec.expected_bytes(large, dtype) * width
    )


def _even(request: Request) -> bool:
    sizes = (*(request.sent or ()), *(request.received or ()))
    return request.has_even_peers and bool(sizes) and all(size == sizes[0] for size in sizes)


def common(
    steps: Callable[..., Steps], domain: Callable[[Codec], str] = lambda codec: ""
) -> Callable[..., Algorithm]:
    """Return the function that builds an algorithm for lengths that all ranks know."""

    def build(kind: str, spec: str, *, first: str = "static") -> Algorithm:
        """An all-to-all of the parts. Equal parts are exchanged as by the kind without ``_v``."""
        run = partial(steps, flow=flow_of(1, 0, 1, first))
        return Algorithm(spec, kind, run, steps_unsupported_reason=no_sparse, domain=domain)

    return build


ALGORITHMS = {
    "all_to_all": {"direct": direct(all_to_all_steps)},
    "all_gather_v": {"direct": common(all_gather_v_steps)},
    "reduce_scatter_v": {"direct": common(reduce_scatter_v_steps, lambda coder: coder.domain.name)},
}
