"""all_gather, all_to_all, broadcast, send and recv: values are only moved, so they are encoded and
decoded once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import (
    Codec,
    DifferenceCodec,
    change,
    changed,
    cut_apart,
    next_reference,
    operators,
)
from commpass.collectives.algorithm import Algorithm
from commpass.collectives.reductions import flow_of, no_sparse
from commpass.collectives.request import Broadcast, Gather, Move, Request, Rows, ops, scatter
from commpass.collectives.steps import Coding, Flow, Steps, hop, in_chunks, parts_hop

LONG = 1.05
"""A row is long enough for a codec if its bytes per value are at most this factor times those of a
large tensor."""


def all_gather_steps(x: Tensor, request: Request, coder: Codec, flow: Flow) -> Steps:
    """Gather ``[n, ...]`` of every rank to ``[ranks * n, ...]``: encode once, gather, decode
    all."""
    rows = yield from _moved(x.reshape(1, -1), x.dtype, coder, flow, Gather(request))
    return rows.reshape(request.ranks * x.shape[0], *x.shape[1:])


def difference_steps(
    x: Tensor, request: Request, coder: DifferenceCodec, reference: Tensor, flow: Flow
) -> Steps:
    """Gather ``[n, ...]`` of every rank to ``[ranks * n, ...]`` as the difference to ``reference``,
    which has that shape and is equal on all ranks.

    The result is a pair: the gathered values, and the reference of the next difference (SDP4Bit,
    weights).
    """
    rows = reference.reshape(request.ranks, -1)
    own = change(x.reshape(1, -1), rows.narrow(0, request.rank, 1))
    by = yield from _moved(own, own.dtype, coder.inner, flow, Gather(request))
    now = changed(rows, by, x.dtype).to(x.dtype).reshape(reference.shape)
    return now, next_reference(now, reference)


def broadcast_steps(x: Tensor, request: Request, coder: Codec, flow: Flow) -> Steps:
    """Return the root's ``x`` on all ranks; the root also returns the decoded value."""
    rows = yield from _moved(x.reshape(1, -1), x.dtype, coder, flow, Broadcast(request))
    return rows.reshape(x.shape)


def all_to_all_steps(x: Tensor, request: Request, coder: Codec, flow: Flow) -> Steps:
    """Send parts of ``[n, ...]`` to all ranks and concatenate the received parts.

    With even splits, each rank's part is a row. Otherwise each entry of the first dimension is a
    row (mixture of experts: a token), or each rank's part if entries are too short for the codec.
    """
    if request.sent is None or request.received is None:
        rows = x.reshape(request.ranks, -1)
        moved = yield from _moved(rows, x.dtype, coder, flow, scatter(request))
        return moved.reshape(x.shape)
    width, arriving = _width(x), sum(request.received)
    if by_entries(coder, width, x.dtype, request):
        move = Rows(request, request.sent, request.received)
        moved = yield from _moved(x.reshape(x.shape[0], width), x.dtype, coder, flow, move)
        return moved.reshape(arriving, *x.shape[1:])
    # Ranks whose parts are even must do the same as ranks whose parts are not.
    coding = Coding(coder, x.dtype, flow).undivided()
    if _even(request):
        rows = x.reshape(request.ranks, request.sent[0] * width)
        moved = yield from _moved(rows, x.dtype, coder, coding.flow, scatter(request))
        return moved.reshape(x.shape)
    numels = [entries * width for entries in request.received]
    parts = x.reshape(-1).split([entries * width for entries in request.sent])
    arrived = yield from parts_hop(parts, numels, coding, request)
    whole = [
        cut_apart(row.to(x.dtype), numel)
        for row, numel in zip(arrived, numels, strict=True)
        if numel
    ]
    return (torch.cat(whole, dim=1) if whole else x.new_empty(0)).reshape(arriving, *x.shape[1:])


def _moved(rows: Tensor, dtype: torch.dtype, coder: Codec, flow: Flow, move: Move) -> Steps:
    """Encode ``[r, n]``, move and decode it: ``[r', n]``."""

    def moved(rows: Tensor, coding: Coding) -> Steps:
        arrived = yield from hop(rows, coding, move)
        return cut_apart(arrived.to(dtype), rows.shape[1])

    return (yield from in_chunks(rows, Coding(coder, dtype, flow), coder.block, moved))


def _width(x: Tensor) -> int:
    width = 1
    for size in x.shape[1:]:
        width = width * size
    return width


def by_entries(coder: Codec, width: int, dtype: torch.dtype, request: Request) -> bool:
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
        coder.expected_bytes(width, dtype) * large
        <= LONG * coder.expected_bytes(large, dtype) * width
    )


def _even(request: Request) -> bool:
    return request.alike and len({*(request.sent or ()), *(request.received or ())}) == 1


def send_steps(x: Tensor, request: Request, coder: Codec) -> Steps:
    """Send ``x`` as bytes to the peer. The result has no elements, like torch's result for a tensor
    that was sent."""
    wire = operators.encode(coder, x.reshape(1, -1).to(coder.hop_dtype(x.dtype)), (request.rank,))
    sent = yield ops.isend(wire, request.peer, request.tag, request.group)
    return sent.to(x.dtype)


def recv_steps(x: Tensor, request: Request, coder: Codec) -> Steps:
    """Receive bytes from the peer and decode them. Only the shape and dtype of the buffer ``x`` are
    used."""
    wire = x.new_empty(
        (1, coder.wire_bytes(x.numel(), coder.hop_dtype(x.dtype))), dtype=torch.uint8
    )
    arrived = yield ops.irecv(wire, request.peer, request.tag, request.group)
    rows = operators.decode(coder, arrived, coder.padded_numel(x.numel()), x.dtype)
    return cut_apart(rows.to(x.dtype), x.numel()).reshape(x.shape)


def _pairwise_obstacle(coder: Codec, ranks: int) -> str | None:
    if coder.dynamic:
        return (
            f"{coder.spec} sends a number of bytes that depends on the values, which the receiver"
            " does not know"
        )
    return no_sparse(coder, ranks)


def pairwise(kind: str, spec: str) -> Algorithm:
    """One encoded message, in place of the plain operator."""
    steps = send_steps if kind == "send" else recv_steps
    return Algorithm(spec, kind, steps, obstacle=_pairwise_obstacle)


def direct(
    kind: str,
    spec: str,
    *,
    chunks: int = 1,
    chunk_bytes: int = 0,
    shards: int = 1,
    first: str = "static",
) -> Algorithm:
    """One encoded exchange, in place of the plain collective.

    ``first`` is for a lossless codec. With ``static``, its static part is sent first and contains
    the sizes of the rest. With ``sizes``, sizes are sent first, then all data (ZipCCL, designs 2
    and 1).
    """
    flow = flow_of(chunks, chunk_bytes, shards, first)
    steps: Any = {
        "all_gather": gather_steps,
        "all_to_all": all_to_all_steps,
        "broadcast": broadcast_steps,
    }[kind]
    obstacle = _gather_obstacle if kind == "all_gather" else no_sparse
    return Algorithm(spec, kind, partial(steps, flow=flow), obstacle=obstacle, chunks=flow.chunks)


def gather_steps(
    x: Tensor, request: Request, coder: Codec, reference: Tensor | None = None, *, flow: Flow
) -> Steps:
    """Gather codes, or codes of the difference to the ``reference``."""
    if isinstance(coder, DifferenceCodec):
        assert reference is not None
        return difference_steps(x, request, coder, reference, flow)
    return all_gather_steps(x, request, coder, flow)


def _gather_obstacle(coder: Codec, ranks: int) -> str | None:
    return None if isinstance(coder, DifferenceCodec) else no_sparse(coder, ranks)
