"""all_reduce and reduce_scatter: a reduce-scatter of ``scatters``, followed for all_reduce by an
all-gather of its result.

``stage`` selects the encoded stages: ``both``, ``rs`` (only the reduce-scatter) or ``ag`` (EQuARX,
section III.A). The other stage sends values in the collective's dtype. Every rank uses the decoded
value of what it sent, including its own part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import (
    VALUES,
    Codec,
    RawCodec,
    SparseCodec,
    accumulation_dtype,
    codec,
    cut_apart,
    operators,
    pad,
)
from commpass.codecs.operators import sum_rows
from commpass.collectives import gathers, scatters
from commpass.collectives.algorithm import Algorithm, Encodes
from commpass.collectives.request import Gather, Request
from commpass.collectives.scatters import Summed, convert
from commpass.collectives.steps import (
    MOST_CHUNKS,
    UNDIVIDED,
    Coding,
    Flow,
    Steps,
    hop,
    in_chunks,
    shard_length,
)
from commpass.errors import PolicyError, nearest

RAW = codec("raw")
"""The codec of a stage that is not encoded."""
STAGES = ("both", "rs", "ag")
LAST = 1 << 16
"""The number of the last hop of an all_reduce, larger than that of any other hop."""


@dataclass(frozen=True)
class Scatter:
    """One of the functions of ``scatters``.

    ``encodes`` is as in ``Algorithm``. ``between`` returns the codec of the last hop if it differs.
    ``hops`` says whether partial sums are sent, not only values. ``keeps_input`` says whether later
    hops read the values again. ``gather`` is the function of ``gathers`` by which an all_reduce
    then shares the sums.
    """

    run: Callable[[Tensor, Request, Coding], Summed]
    encodes: Callable[[Codec, int], Encodes]
    between: Callable[[Codec], Codec] = lambda codec: codec
    hops: bool = True
    keeps_input: bool = False
    gather: Callable[[Tensor, Request, Coding], Steps] = gathers.direct

    def unit(self, codec: Codec) -> int:
        return math.lcm(codec.block, self.between(codec).block)


DIRECT = Scatter(scatters.direct, lambda codec, ranks: ((codec, 1.0),), hops=False)
RING = Scatter(
    scatters.ring,
    lambda codec, ranks: ((codec, scatters.ring_encodes(ranks)),),
    keeps_input=True,
    gather=gathers.ring,
)
SEMI_RING = Scatter(
    scatters.semi_ring,
    lambda codec, ranks: ((codec, scatters.semi_ring_encodes(ranks)),),
    keeps_input=True,
)


@dataclass(frozen=True)
class Staged:
    """A reduction in one or two stages, with the settings of each stage."""

    scatter: Scatter
    stage: str = "both"
    flow: Flow = UNDIVIDED

    def codings(self, codec: Codec, dtype: torch.dtype, request: Request) -> tuple[Coding, Coding]:
        # Partial sums are not rounded to a narrower dtype when sent, even by an otherwise lossless
        # codec (law 4).
        partial = accumulation_dtype(dtype) if self.scatter.hops else dtype
        first = Coding(RAW if self.stage == "ag" else codec, partial, self.flow)
        second = RAW if self.stage == "rs" else self.scatter.between(codec)
        second = second.of_sum(1 if request.op == "avg" else request.ranks, request.ranks)
        return first, Coding(second, second.hop_dtype(dtype), self.flow, LAST)

    def encodes(self, codec: Codec, ranks: int) -> Encodes:
        scattered = self.scatter.encodes(codec, ranks) if self.stage != "ag" else ()
        return (*scattered, (self.scatter.between(codec), 1.0)) if self.stage != "rs" else scattered

    def unit(self, codec: Codec) -> int:
        return math.lcm(self.scatter.unit(codec), codec.block) * self.flow.shards

    def domain(self, codec: Codec) -> str:
        return codec.domain.name if self.stage != "ag" else ""

    def keeps_input(self, codec: Codec) -> bool:
        return self.scatter.keeps_input or self.stage == "ag" or isinstance(codec, RawCodec)

    def all_reduce(self, x: Tensor, request: Request, codec: Codec) -> Steps:
        first, second = self.codings(codec, x.dtype, request)
        gather_domain = second.codec.domain

        def both(rows: Tensor, first: Coding) -> Steps:
            summed, domain = yield from self.scatter.run(rows, request, first)
            summed = convert(request.from_sum(summed), domain, gather_domain)
            last = second.in_domain().of_chunk(first.chunk)
            arrived = yield from self.scatter.gather(summed, request, last)
            return convert(arrived, gather_domain, VALUES).to(x.dtype)

        shard = shard_length(x.numel(), request.ranks, self.unit(codec))
        rows = pad(x.reshape(-1), shard * request.ranks).reshape(request.ranks, shard)
        result = yield from in_chunks(rows, first, self.unit(codec), both)
        return cut_apart(result.reshape(1, -1), x.numel()).reshape(x.shape)

    def reduce_scatter(self, x: Tensor, request: Request, codec: Codec) -> Steps:
        first, _ = self.codings(codec, x.dtype, request)

        def summed_values(rows: Tensor, first: Coding) -> Steps:
            summed, here = yield from self.scatter.run(rows, request, first)
            return convert(request.from_sum(summed), here, VALUES).to(x.dtype)

        rows = x.reshape(request.ranks, -1)
        padded = pad(rows, self._padded_numel(rows.shape[1], codec))
        result = yield from in_chunks(padded, first, self.unit(codec), summed_values)
        if request.ranks == 1:  # nothing was sent, so it may be a view of x
            result = result.clone()
        return cut_apart(result, rows.shape[1]).reshape(x.shape[0] // request.ranks, *x.shape[1:])

    def _padded_numel(self, numel: int, codec: Codec) -> int:
        return shard_length(numel, 1, self.unit(codec))


# --- one-shot -------------------------------------------------------------------------------------


def one_shot_steps(x: Tensor, request: Request, codec: Codec, flow: Flow) -> Steps:
    """Every rank sends all its values to all ranks and sums: one hop, one encode, ``ranks`` decodes
    (low-bit TP inference, section 3)."""
    domain = codec.domain

    def summed(row: Tensor, coding: Coding) -> Steps:
        entered = convert(row, VALUES, domain)
        arrived = yield from hop(entered, coding.in_domain(), Gather(request))
        total = request.from_sum(sum_rows(arrived.to(accumulation_dtype(x.dtype))))
        return convert(total, domain, VALUES).to(x.dtype)

    unit = codec.block * flow.shards
    row = pad(x.reshape(1, -1), shard_length(x.numel(), 1, unit))
    result = yield from in_chunks(row, Coding(codec, x.dtype, flow), unit, summed)
    return cut_apart(result, x.numel()).reshape(x.shape)


# --- sparse ---------------------------------------------------------------------------------------


def sparse_steps(x: Tensor, request: Request, codec: Codec, residual: Tensor) -> Any:
    """Send selected values and their indices to all ranks, and sum them by index; values not sent
    are added to the next ``x``.

    ``residual`` has the shape of ``x``, in the accumulation dtype. The result is a pair of the sum
    and the new residual (SSFusion, section 2; error feedback as in Deep Gradient Compression). If
    the selections of all ranks together are at least as many as the values, rows are summed densely
    instead.
    """
    assert isinstance(codec, SparseCodec)
    numel, dtype = x.numel(), accumulation_dtype(x.dtype)
    # Segments are separate operators: equal ones are traced and compiled once.
    each, lengths = codec.segments(numel)
    rows, kept = (
        value.split(list(lengths), dim=1) if len(lengths) > 1 else [value]
        for value in (x.reshape(1, -1), residual.to(dtype).reshape(1, -1))
    )
    coded = [
        operators.encode_with_feedback(each, part, rest, (request.rank,))
        for part, rest in zip(rows, kept, strict=True)
    ]
    sent = [wire for wire, _ in coded]
    left = _side_by_side([rest for _, rest in coded]).reshape(x.shape)
    wires = yield Gather(request).start(_side_by_side(sent))
    if len(lengths) == 1:
        total = _summed(each, wires, numel, x.dtype, request.ranks)
    else:
        arrived = wires.split([wire.shape[1] for wire in sent], dim=1)
        totals = [
            _summed(each, wire.contiguous(), length, x.dtype, request.ranks).flatten()
            for wire, length in zip(arrived, lengths, strict=True)
        ]
        total = torch.cat(totals)
    return request.from_sum(total).to(x.dtype).reshape(x.shape), left


def _summed(
    codec: SparseCodec, wires: Tensor, numel: int, dtype: torch.dtype, ranks: int
) -> Tensor:
    """Return the sum of the rows of all ranks, densely if the selections are at least as many as
    the values."""
    if codec.slots(numel) * ranks >= numel:
        return sum_rows(operators.decode(codec, wires, numel, dtype).to(accumulation_dtype(dtype)))
    return operators.decode_and_sum_by_index(codec, wires, numel, dtype)


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows), dim=1)


def _needs_sparse(codec: Codec, ranks: int) -> str | None:
    return (
        None
        if isinstance(codec, SparseCodec)
        else f"algorithm 'sparse' sums by index, but {codec.spec} selects no indices"
    )


def no_sparse(codec: Codec, ranks: int) -> str | None:
    """Return why a codec cannot be summed hop by hop, or None if it can."""
    if isinstance(codec, SparseCodec):
        return f"{codec.spec} needs {codec.state}, which only algorithm 'sparse' keeps"
    return (
        f"{codec.spec} needs {codec.state}, which is kept for an all_gather of parameters alone"
        if codec.state is not None
        else None
    )


# --- by name --------------------------------------------------------------------------------------


def one_shot(
    kind: str,
    spec: str,
    *,
    chunks: int = 1,
    chunk_bytes: int = 0,
    shards: int = 1,
    first: str = "static",
) -> Algorithm:
    """One all-gather of all values: the fewest hops, for small tensors and few ranks."""
    flow = flow_of(chunks, chunk_bytes, shards, first)
    return Algorithm(
        spec,
        kind,
        partial(one_shot_steps, flow=flow),
        chunks=flow.chunks,
        steps_unsupported_reason=no_sparse,
        domain=lambda codec: codec.domain.name,
    )


def _staged(kind: str, spec: str, scatter: Scatter, stage: str, flow: Flow) -> Algorithm:
    if stage not in STAGES:
        raise PolicyError(f"stage={stage!r}{nearest(stage, STAGES)}")
    if kind == "reduce_scatter" and stage != "both":
        raise PolicyError(f"stage={stage!r}: a reduce_scatter has one stage; leave it out")
    staged = Staged(scatter, stage, flow)
    by_stage = kind == "all_reduce"
    return Algorithm(
        spec,
        kind,
        steps=staged.all_reduce if by_stage else staged.reduce_scatter,
        encodes=staged.encodes if by_stage else scatter.encodes,
        steps_unsupported_reason=no_sparse,
        domain=staged.domain,
        keeps_input=staged.keeps_input,
        chunks=flow.chunks,
    )


MOST_HOPS = 64
"""The most hops of a ring; more would make the graph and the errors too large."""


def _few_hops(algorithm: Algorithm, hops: Callable[[int], int]) -> Algorithm:
    def unsupported_reason(codec: Codec, ranks: int) -> str | None:
        if hops(ranks) > MOST_HOPS:
            return (
                f"{algorithm.spec} on {ranks} ranks would take {hops(ranks)} hops, each with an"
                " error:"
                f" more than {MOST_HOPS}"
            )
        return algorithm.steps_unsupported_reason(codec, ranks)

    return replace(algorithm, steps_unsupported_reason=unsupported_reason)


def two_shot(
    kind: str,
    spec: str,
    *,
    stage: str = "both",
    chunks: int = 1,
    chunk_bytes: int = 0,
    shards: int = 1,
    first: str = "static",
) -> Algorithm:
    """Each rank sums one shard, then shares it: an all-to-all and an all-gather (TACO, EQuARX)."""
    return _staged(kind, spec, DIRECT, stage, flow_of(chunks, chunk_bytes, shards, first))


def ring(
    kind: str,
    spec: str,
    *,
    stage: str = "both",
    chunks: int = 1,
    chunk_bytes: int = 0,
    shards: int = 1,
    first: str = "static",
) -> Algorithm:
    """Partial sums go around a ring, encoded again at each of ranks - 1 hops (EQuARX, full loop).
    For an all_reduce, the sums follow (``gathers.ring``)."""
    return _few_hops(
        _staged(kind, spec, RING, stage, flow_of(chunks, chunk_bytes, shards, first)),
        lambda ranks: ranks - 1,
    )


def semi_ring(
    kind: str,
    spec: str,
    *,
    stage: str = "both",
    chunks: int = 1,
    chunk_bytes: int = 0,
    shards: int = 1,
    first: str = "static",
) -> Algorithm:
    """As ``ring``, in both directions at once: ranks / 2 hops (EQuARX, semi-loop)."""
    return _few_hops(
        _staged(kind, spec, SEMI_RING, stage, flow_of(chunks, chunk_bytes, shards, first)),
        lambda ranks: ranks // 2,
    )


def hierarchical(
    kind: str,
    spec: str,
    *,
    node: int = 0,
    between: str = "",
    stage: str = "both",
    chunks: int = 1,
    chunk_bytes: int = 0,
    shards: int = 1,
    first: str = "static",
) -> Algorithm:
    """Reduce among the ``node`` ranks of a host, then between hosts with codec ``between``
    (SDP4Bit: 8 and 4 bits)."""
    if node < 0:
        raise PolicyError(f"node={node}: must be the number of ranks on one host")
    outer = codec(between) if between else None
    if outer is not None and outer.state is not None:
        raise PolicyError(
            f"between={between!r}: it needs {outer.state}; take a codec without state, such as"
            " 'int4'"
        )

    def of(coder: Codec) -> Codec:
        return coder if outer is None or isinstance(coder, RawCodec) else outer

    def run(rows: Tensor, request: Request, coding: Coding) -> Summed:
        return scatters.hierarchical(rows, request, coding, node=node, between=of(coding.codec))

    def unsupported_reason(coder: Codec, ranks: int) -> str | None:
        if node == 0:
            return (
                "hierarchical needs the number of ranks on a host: hierarchical(node=8), or"
                " Profile(ranks_per_host=8)"
            )
        if ranks % node or not 1 < node < ranks:
            return f"{ranks} ranks are not several nodes of {node}"
        return no_sparse(coder, ranks)

    scatter = Scatter(run, lambda coder, ranks: ((coder, 1.0), (of(coder), 1.0)), of)
    made = _staged(kind, spec, scatter, stage, flow_of(chunks, chunk_bytes, shards, first))
    return replace(made, steps_unsupported_reason=unsupported_reason)


def sparse(kind: str, spec: str) -> Algorithm:
    """An all-gather of selected values and indices, with error feedback; for sparse codecs (topk,
    dgc, ...)."""
    return Algorithm(spec, kind, sparse_steps, steps_unsupported_reason=_needs_sparse)


def flow_of(chunks: int, chunk_bytes: int, shards: int, first: str) -> Flow:
    """Return how an algorithm's parameters divide what it sends. Raises PolicyError for invalid
    parameters."""
    for name, many in (("chunks", chunks), ("shards", shards)):
        if not 1 <= many <= MOST_CHUNKS:
            raise PolicyError(f"{name}={many}: must be from 1 to {MOST_CHUNKS}")
    if chunks > 1 and shards > 1:
        raise PolicyError(
            f"chunks={chunks} and shards={shards}: give one of them. Chunks each have an exchange"
            " for every hop; shards are parts of one hop, all side data first"
        )
    if chunk_bytes < 0:
        raise PolicyError(f"chunk_bytes={chunk_bytes}: must be a number of bytes, or 0 for none")
    if chunk_bytes and (chunks > 1 or shards > 1):
        other = f"chunks={chunks}" if chunks > 1 else f"shards={shards}"
        raise PolicyError(f"chunk_bytes={chunk_bytes} and {other}: give one of them")
    if first not in ("static", "sizes"):
        raise PolicyError(f"first={first!r}{nearest(first, ('static', 'sizes'))}")
    return Flow(chunks, shards, first == "sizes", chunk_bytes)


ALGORITHMS = {
    "all_reduce": {
        "one_shot": one_shot,
        "two_shot": two_shot,
        "ring": ring,
        "semi_ring": semi_ring,
        "hierarchical": hierarchical,
        "sparse": sparse,
    },
    "reduce_scatter": {
        "direct": two_shot,
        "ring": ring,
        "semi_ring": semi_ring,
        "hierarchical": hierarchical,
    },
}
