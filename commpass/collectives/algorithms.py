"""How a collective is carried out with a codec. Each algorithm is an ordinary function that runs eagerly and traces.

``x`` is the tensor of one rank, ``ranks`` the size of ``group`` (a group name), ``op`` is ``sum`` or ``avg``. Sums are made in
float32 (float64 for float64) in rank order, and every rank uses the decoded value of what it sent itself, so that all
ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs import Codec, accumulation_dtype, cut_apart, pad
from commpass.collectives.exchange import exchange, gather, reduce_rows


def all_reduce_one_shot(x: Tensor, op: str, ranks: int, group: str, codec: Codec) -> Tensor:
    """Everybody sends everything, everybody sums: one hop, one encode, ``ranks`` decodes (low-bit TP inference, section 3)."""
    wire = gather(codec.encode_rows(x.reshape(1, -1)), ranks, group)
    summed = reduce_rows(_decoded(codec, wire, x.numel(), x.dtype), op)
    return cut_apart(summed.to(x.dtype), x.numel()).reshape(x.shape)


def all_reduce_two_shot(x: Tensor, op: str, ranks: int, group: str, codec: Codec) -> Tensor:
    """Each rank sums one shard, then shares it: a compressed reduce-scatter and a compressed all-gather (TACO, EQuARX)."""
    shard = shard_length(x.numel(), ranks, codec)
    rows = pad(x.reshape(-1), shard * ranks).reshape(ranks, shard)
    summed = reduce_rows(_decoded(codec, exchange(codec.encode_rows(rows), ranks, group), shard, x.dtype), op)
    wire = gather(codec.encode_rows(summed), ranks, group)
    result = codec.decode_rows(wire, shard, summed.dtype).to(x.dtype).reshape(1, -1)
    return cut_apart(result, x.numel()).reshape(x.shape)


def all_gather_direct(x: Tensor, op: str, ranks: int, group: str, codec: Codec) -> Tensor:
    """``[n, ...]`` of every rank to ``[ranks * n, ...]``: encode once, gather, decode all."""
    wire = gather(codec.encode_rows(x.reshape(1, -1)), ranks, group)
    rows = codec.decode_rows(wire, codec.whole(x.numel()), x.dtype).to(x.dtype)
    return cut_apart(rows, x.numel()).reshape(ranks * x.shape[0], *x.shape[1:])


def reduce_scatter_direct(x: Tensor, op: str, ranks: int, group: str, codec: Codec) -> Tensor:
    """``[ranks * n, ...]`` to the sum of one's part ``[n, ...]``: a compressed all-to-all, a local sum (ZipCCL, section 4)."""
    rows = x.reshape(ranks, -1)
    summed = reduce_rows(_decoded(codec, exchange(codec.encode_rows(rows), ranks, group), rows.shape[1], x.dtype), op)
    return cut_apart(summed.to(x.dtype), rows.shape[1]).reshape(x.shape[0] // ranks, *x.shape[1:])


def _decoded(codec: Codec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Rows with what fills their last block, in the dtype in which sums are made: cut once, when they are summed."""
    return codec.decode_rows(wire, codec.whole(numel), dtype).to(accumulation_dtype(dtype))


def shard_length(numel: int, ranks: int, codec: Codec) -> int:
    """Values that one rank sums in a two-shot: an even share, rounded up to whole blocks."""
    return (numel + ranks * codec.block - 1) // (ranks * codec.block) * codec.block


@dataclass(frozen=True)
class Work:
    """What one rank does: (kind, bytes handed over) of each exchange, and values encoded and decoded."""

    exchanges: tuple[tuple[str, int], ...]
    encoded: int
    decoded: int

    @property
    def wire_bytes(self) -> int:
        return sum(size for _, size in self.exchanges)


def _one_shot_work(codec: Codec, numel: int, dtype: torch.dtype, ranks: int) -> Work:
    return Work((("all_gather", codec.wire_bytes(numel, dtype)),), numel, numel * ranks)


def _two_shot_work(codec: Codec, numel: int, dtype: torch.dtype, ranks: int) -> Work:
    shard = shard_length(numel, ranks, codec)
    there = ranks * codec.wire_bytes(shard, dtype)
    back = codec.wire_bytes(shard, accumulation_dtype(dtype))
    return Work((("all_to_all", there), ("all_gather", back)), shard * (ranks + 1), 2 * shard * ranks)


def _scatter_work(codec: Codec, numel: int, dtype: torch.dtype, ranks: int) -> Work:
    return Work((("all_to_all", ranks * codec.wire_bytes(numel // ranks, dtype)),), numel, numel)


@dataclass(frozen=True)
class Algorithm:
    """An algorithm by name, with what it costs. ``encodes`` is how often a value is encoded on its way (errors add up)."""

    name: str
    kind: str
    run: Callable[[Tensor, str, int, str, Codec], Tensor]
    work: Callable[[Codec, int, torch.dtype, int], Work]
    encodes: int = 1


ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm("one_shot", "all_reduce", all_reduce_one_shot, _one_shot_work),
    Algorithm("two_shot", "all_reduce", all_reduce_two_shot, _two_shot_work, encodes=2),
    Algorithm("direct", "all_gather", all_gather_direct, _one_shot_work),
    Algorithm("direct", "reduce_scatter", reduce_scatter_direct, _scatter_work),
)
ALGORITHM_NAMES = tuple(dict.fromkeys(algorithm.name for algorithm in ALGORITHMS))
REDUCE_OPS = ("sum", "avg")


def algorithms_of(kind: str) -> tuple[Algorithm, ...]:
    """The algorithms that carry out collectives of this kind, the simplest first."""
    return tuple(algorithm for algorithm in ALGORITHMS if algorithm.kind == kind)


def algorithm_named(kind: str, name: str) -> Algorithm:
    """The algorithm of this kind and name. Raises KeyError if the kind has none such."""
    for algorithm in algorithms_of(kind):
        if algorithm.name == name:
            return algorithm
    raise KeyError(f"{kind} has no algorithm {name!r}; it has {', '.join(a.name for a in algorithms_of(kind))}")
