"""all_gather, broadcast, send and recv: values are only moved, so they are encoded and decoded
once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from commpass.codecs import (
    Codec,
    DifferenceCodec,
    add_to_reference,
    cut_apart,
    next_reference,
    operators,
    subtract_reference,
)
from commpass.collectives.algorithm import Algorithm
from commpass.collectives.reductions import flow_of, no_sparse
from commpass.collectives.request import Broadcast, Gather, Move, Request, ops
from commpass.collectives.steps import Coding, Flow, Steps, hop, in_chunks


def all_gather_steps(x: Tensor, request: Request, codec: Codec, flow: Flow) -> Steps:
    """Gather ``[n, ...]`` of every rank to ``[ranks * n, ...]``: encode once, gather, decode
    all."""
    rows = yield from move_rows(x.reshape(1, -1), x.dtype, codec, flow, Gather(request))
    return rows.reshape(request.ranks * x.shape[0], *x.shape[1:])


def difference_steps(
    x: Tensor, request: Request, codec: DifferenceCodec, reference: Tensor, flow: Flow
) -> Steps:
    """Gather ``[n, ...]`` of every rank to ``[ranks * n, ...]`` as the difference to ``reference``,
    which has that shape and is equal on all ranks.

    The result is a pair: the gathered values, and the reference of the next difference (SDP4Bit,
    weights).
    """
    rows = reference.reshape(request.ranks, -1)
    own = subtract_reference(x.reshape(1, -1), rows.narrow(0, request.rank, 1))
    by = yield from move_rows(own, own.dtype, codec.inner, flow, Gather(request))
    now = add_to_reference(rows, by, x.dtype).to(x.dtype).reshape(reference.shape)
    return now, next_reference(now, reference)


def broadcast_steps(x: Tensor, request: Request, codec: Codec, flow: Flow) -> Steps:
    """Return the root's ``x`` on all ranks; the root also returns the decoded value."""
    rows = yield from move_rows(x.reshape(1, -1), x.dtype, codec, flow, Broadcast(request))
    return rows.reshape(x.shape)


def move_rows(rows: Tensor, dtype: torch.dtype, codec: Codec, flow: Flow, move: Move) -> Steps:
    """Encode ``[r, n]``, move and decode it: ``[r', n]``."""

    def moved(rows: Tensor, coding: Coding) -> Steps:
        arrived = yield from hop(rows, coding, move)
        return cut_apart(arrived.to(dtype), rows.shape[1])

    return (yield from in_chunks(rows, Coding(codec, dtype, flow), codec.block, moved))


def send_steps(x: Tensor, request: Request, codec: Codec) -> Steps:
    """Send ``x`` as bytes to the peer. The result has no elements, like torch's result for a tensor
    that was sent."""
    wire = operators.encode(codec, x.reshape(1, -1).to(codec.hop_dtype(x.dtype)), (request.rank,))
    sent = yield ops.isend(wire, request.peer, request.tag, request.group)
    return sent.to(x.dtype)


def recv_steps(x: Tensor, request: Request, codec: Codec) -> Steps:
    """Receive bytes from the peer and decode them. Only the shape and dtype of the buffer ``x`` are
    used."""
    wire = x.new_empty(
        (1, codec.wire_bytes(x.numel(), codec.hop_dtype(x.dtype))), dtype=torch.uint8
    )
    arrived = yield ops.irecv(wire, request.peer, request.tag, request.group)
    rows = operators.decode(codec, arrived, codec.padded_numel(x.numel()), x.dtype)
    return cut_apart(rows.to(x.dtype), x.numel()).reshape(x.shape)


def _pairwise_unsupported_reason(codec: Codec, ranks: int) -> str | None:
    if codec.dynamic:
        return (
            f"{codec.spec} sends a number of bytes that depends on the values, which the receiver"
            " does not know"
        )
    return no_sparse(codec, ranks)


def gather_steps(
    x: Tensor, request: Request, codec: Codec, reference: Tensor | None = None, *, flow: Flow
) -> Steps:
    """Gather codes, or codes of the difference to the ``reference``."""
    if isinstance(codec, DifferenceCodec):
        assert reference is not None
        return difference_steps(x, request, codec, reference, flow)
    return all_gather_steps(x, request, codec, flow)


def _gather_unsupported_reason(codec: Codec, ranks: int) -> str | None:
    return None if isinstance(codec, DifferenceCodec) else no_sparse(codec, ranks)


# --- by name --------------------------------------------------------------------------------------


def direct(
    steps: Callable[..., Steps], unsupported_reason: Callable[[Codec, int], str | None] = no_sparse
) -> Callable[..., Algorithm]:
    """Return the function that builds an algorithm of one exchange from its steps."""

    def build(
        kind: str,
        spec: str,
        *,
        chunks: int = 1,
        chunk_bytes: int = 0,
        shards: int = 1,
        first: str = "static",
    ) -> Algorithm:
        """One encoded exchange, in place of the plain collective.

        ``first`` is for a lossless codec. With ``static``, its static part is sent first and
        contains the sizes of the rest. With ``sizes``, sizes are sent first, then all data (ZipCCL,
        designs 2 and 1).
        """
        flow = flow_of(chunks, chunk_bytes, shards, first)
        return Algorithm(
            spec,
            kind,
            partial(steps, flow=flow),
            steps_unsupported_reason=unsupported_reason,
            chunks=flow.chunks,
        )

    return build


def pairwise(steps: Callable[..., Steps]) -> Callable[..., Algorithm]:
    """Return the function that builds one encoded message, in place of the plain operator."""
    return lambda kind, spec: Algorithm(
        spec, kind, steps, steps_unsupported_reason=_pairwise_unsupported_reason
    )


ALGORITHMS = {
    "all_gather": {"direct": direct(gather_steps, _gather_unsupported_reason)},
    "broadcast": {"direct": direct(broadcast_steps)},
    "send": {"direct": pairwise(send_steps)},
    "recv": {"direct": pairwise(recv_steps)},
}
