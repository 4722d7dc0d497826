"""Algorithms as steps: a generator that yields each exchange it has started and is sent what
arrives.

So one text of an algorithm runs eagerly, traces, and can be left in the air between start and end
(``Handle``). ``hop`` is the step that all are made of: encode, move, decode.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import Codec, cut_apart, operators, pad
from commpass.collectives import data_sized
from commpass.collectives.request import Move, Request, Rows, ops

Steps = Generator[Tensor, Tensor, Any]


def run(steps: Steps) -> Any:
    """The result of an algorithm, each exchange waited for when the algorithm asks for it."""
    return finish(steps, None)


def finish(steps: Steps, started: Tensor | None) -> Any:
    """The result of an algorithm that has started its first exchange, or (None) has not begun."""
    try:
        while True:
            arrived: Any = None if started is None else ops.wait_tensor(started)
            started = steps.send(arrived)
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class Coding:
    """How values travel: by which codec, in how many micro-shards; ``dtype`` is what decoded values
    are cast to in the end. It is the ``number``-th hop of its algorithm.

    ``sizes_first`` matters for a dynamic codec alone: whether sizes are exchanged before all data
    (ZipCCL's design 1), or are read off the static part, which goes first (design 2).
    """

    codec: Codec
    dtype: torch.dtype
    shards: int = 1
    sizes_first: bool = False
    number: int = 0

    def nth(self, number: int) -> Coding:
        """The same for another hop, whose random choices are others."""
        return replace(self, number=number)

    def by(self, codec: Codec) -> Coding:
        """The same with another codec."""
        return replace(self, codec=codec)

    def unsharded(self) -> Coding:
        """Without micro-shards."""
        return replace(self, shards=1)

    def in_domain(self) -> Coding:
        """Of values that have entered the codec's domain."""
        return self.by(self.codec.within)


def hop(rows: Tensor, coding: Coding, move: Move) -> Steps:
    """``[r, n]`` encoded, moved and decoded: the rows that arrive, ``[r', padded_numel(n)]``, as
    ``Codec.decode_rows`` gives them; of a codec that is not settled, ``[r', n]``."""
    codec, salt, numel = coding.codec, (move.request.rank, coding.number), rows.shape[1]
    rows = rows.to(codec.hop_dtype(coding.dtype))
    if data_sized.varies(codec, rows.dtype):
        return (yield from data_sized.hop(codec, rows, move, coding.sizes_first))
    if coding.shards > 1 and not codec.dynamic:
        return (yield from _micro_shards(rows, coding, move))
    wire = yield move.start(operators.encode(codec, rows, salt))
    decoded = operators.decode(codec, wire, codec.padded_numel(numel), coding.dtype)
    return decoded if codec.settled else cut_apart(decoded, numel)


def _micro_shards(rows: Tensor, coding: Coding, move: Move) -> Steps:
    """Side data of all shards first, then the codes of each: while one is decoded, the next arrives
    (EQuARX, section III.C)."""
    codec, dtype, shards = coding.codec, coding.dtype, coding.shards
    length = shard_length(rows.shape[1], shards, codec.block)
    rows = pad(rows, length * shards)
    wires = [
        operators.encode_parts(
            codec,
            rows.narrow(1, shard * length, length),
            (move.request.rank, coding.number, shard),
        )
        for shard in range(shards)
    ]
    side = codec.parts(length, dtype)[1:]
    first = [move.start(torch.cat([wire[1] for wire in wires], dim=1))] if side else []
    started = [move.start(wire[0].contiguous()) for wire in wires]
    sides = (yield first[0]) if side else None
    decoded = []
    for shard, exchange in enumerate(started):
        arrived = [(yield exchange)]
        if sides is not None:
            arrived.append(sides.narrow(1, shard * side[0], side[0]))
        decoded.append(operators.decode_parts(codec, arrived, length, dtype))
    return torch.cat(decoded, dim=1)


def parts_hop(
    parts: Sequence[Tensor], arriving: Sequence[int], coding: Coding, request: Request
) -> Steps:
    """Part r, of any length, to rank r: the rows ``[1, padded_numel(arriving[r])]`` that arrive,
    one from each rank.

    What two ranks send each other is what ``hop`` with a row for each rank would: a rank whose
    parts are of one length may use that instead.
    """
    codec, dtype = coding.codec, coding.dtype
    rows = [part.reshape(1, -1).to(codec.hop_dtype(dtype)) for part in parts]
    wires = [
        operators.encode(codec, row, (request.rank, coding.number, to))
        for to, row in enumerate(rows)
    ]
    if data_sized.varies(codec, dtype):
        lengths = [part.numel() for part in parts]
        return (
            yield from data_sized.parts_hop(
                codec, wires, lengths, arriving, dtype, request, coding.sizes_first
            )
        )
    sizes = [codec.wire_bytes(numel, dtype) for numel in arriving]
    move = Rows(request, tuple(wire.shape[1] for wire in wires), tuple(sizes))
    arrived = yield move.start(torch.cat(wires, dim=1).flatten())
    return [
        operators.decode(codec, wire.reshape(1, -1), codec.padded_numel(numel), dtype)
        for wire, numel in zip(arrived.split(sizes), arriving, strict=True)
    ]


def shard_length(numel: int, shards: int, block: int) -> int:
    """Values of each of so many shards: an even share, rounded up to whole blocks."""
    return (numel + shards * block - 1) // (shards * block) * block
