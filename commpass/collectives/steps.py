"""Algorithms as steps: a generator that yields each exchange it has started and receives the result
by ``send``.

So the same code runs eagerly, is traced, and can be suspended while an exchange runs (``Handle``).
``hop`` is the common step: encode, move, decode.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import Codec, cut_apart, operators, pad
from commpass.collectives import data_sized
from commpass.collectives.request import Move, ops

Steps = Generator[Tensor, Tensor, Any]


def run(steps: Steps) -> Any:
    """Return the result of an algorithm, waiting for each exchange when the algorithm needs it."""
    return finish(steps, None)


def finish(steps: Steps, started: Tensor | None) -> Any:
    """Return the result of an algorithm that has started its first exchange, or (None) has not
    begun. The result is contiguous, as that of a plain collective, since a view may follow."""
    try:
        while True:
            arrived: Any = None if started is None else ops.wait_tensor(started)
            started = steps.send(arrived)
    except StopIteration as end:
        if isinstance(end.value, tuple):  # with the new state of the codec
            return end.value[0].contiguous(), *end.value[1:]
        return end.value.contiguous()


@dataclass(frozen=True)
class Flow:
    """How the data of an algorithm is divided.

    There are ``chunks`` that take turns, each with its own exchanges (see ``in_chunks``), or one
    for every ``chunk_bytes`` of the tensor. Alternatively, micro-``shards`` divide one hop, with
    all side data first.

    ``sizes_first`` only affects a dynamic codec: sizes are exchanged before all data (ZipCCL's
    design 1), or are read from the static part, which is sent first (design 2).
    """

    chunks: int = 1
    shards: int = 1
    sizes_first: bool = False
    chunk_bytes: int = 0

    def chunks_of(self, nbytes: int) -> int:
        """Return the number of chunks for a tensor of ``nbytes``; with ``chunk_bytes`` and a
        symbolic size, one."""
        if not self.chunk_bytes:
            return self.chunks
        return chunks_for(nbytes, self.chunk_bytes) if isinstance(nbytes, int) else 1


UNDIVIDED = Flow()
MOST_CHUNKS = 64


def chunks_for(nbytes: int, each: int) -> int:
    """Return how many chunks of about ``each`` bytes a tensor has."""
    return min(max(round(nbytes / each), 1), MOST_CHUNKS)


@dataclass(frozen=True)
class Coding:
    """How values are sent: the codec, the division into parts, and the ``dtype`` that decoded
    values are finally cast to.

    It describes hop ``number`` of its algorithm, in chunk ``chunk``.
    """

    codec: Codec
    dtype: torch.dtype
    flow: Flow = UNDIVIDED
    number: int = 0
    chunk: int = 0

    def nth(self, number: int) -> Coding:
        """Return the same coding for another hop, with different random numbers."""
        return replace(self, number=number)

    def by(self, codec: Codec) -> Coding:
        """Return the same coding with another codec."""
        return replace(self, codec=codec)

    def of_sum(self, of: int, ranks: int) -> Coding:
        """Return the same coding for sums over ``of`` of ``ranks`` ranks."""
        return self.by(self.codec.of_sum(of, ranks))

    def of_chunk(self, chunk: int) -> Coding:
        """Return the same coding for another chunk, with different random numbers."""
        return replace(self, chunk=chunk)

    def undivided(self) -> Coding:
        """Return the same coding without chunks and micro-shards."""
        return replace(self, flow=Flow(sizes_first=self.flow.sizes_first))

    def salt(self, rank: int, *piece: int) -> tuple[int, ...]:
        """Return the salt that makes the random numbers of a hop differ from all others."""
        return rank, self.number, *piece, *([self.chunk] if self.chunk else [])

    def in_domain(self) -> Coding:
        """Return the coding of values that are already in the codec's domain."""
        return self.by(self.codec.domain_codec)


def hop(rows: Tensor, coding: Coding, move: Move) -> Steps:
    """Encode ``[r, n]``, move and decode it.

    Return the rows that arrive, ``[r', padded_numel(n)]``, as ``Codec.decode_rows``; ``[r', n]`` if
    the codec does not have ``has_linear_padding``.
    """
    codec, salt, numel = coding.codec, coding.salt(move.request.rank), rows.shape[1]
    rows = rows.to(codec.hop_dtype(coding.dtype))
    if data_sized.varies(codec, rows.dtype):
        return (yield from data_sized.hop(codec, rows, move, coding.flow.sizes_first))
    if coding.flow.shards > 1 and not codec.dynamic:
        return (yield from _micro_shards(rows, coding, move))
    wire = yield move.start(operators.encode(codec, rows, salt))
    decoded = operators.decode(codec, wire, codec.padded_numel(numel), coding.dtype)
    return decoded if codec.has_linear_padding else cut_apart(decoded, numel)


AHEAD = 4
"""Chunks in flight at once: while one is decoded, others are sent."""
CHUNK_MULTIPLE = 64
"""The number of values of a chunk is a multiple of this, so that its codes begin at aligned
addresses."""


def in_chunks(
    rows: Tensor, coding: Coding, unit: int, steps: Callable[[Tensor, Coding], Steps]
) -> Steps:
    """Run ``steps`` for ``[r, n]`` on one chunk of columns at a time, and concatenate the results
    ``[r', n]``.

    Chunk i + 1 is encoded while chunk i is sent and chunk i - 1 is decoded (TACO, section 3). No
    block of ``unit`` values is split between chunks, so the bits equal those without chunks, except
    for codecs with stochastic rounding. There are never more chunks than blocks.
    """
    chunks = coding.flow.chunks_of(rows.numel() * rows.element_size())
    unit = math.lcm(unit, CHUNK_MULTIPLE)
    units = rows.shape[1] // unit
    if isinstance(units, int):
        chunks = min(chunks, max(units, 1))
    if chunks == 1:
        return (yield from steps(rows, coding))
    length = units // chunks * unit
    lengths = [*[length] * (chunks - 1), rows.shape[1] - length * (chunks - 1)]
    parts = [rows.narrow(1, length * number, lengths[number]) for number in range(chunks)]
    results = yield from _in_turn(
        [steps(part, coding.of_chunk(number)) for number, part in enumerate(parts)]
    )
    return operators.join(results)


def _in_turn(every: Sequence[Steps]) -> Generator[Tensor, Tensor, list[Any]]:
    """Return the results of several algorithms, run in turns of one step, ``AHEAD`` of them at
    once."""
    results: list[Any] = [None] * len(every)
    waiting = deque(enumerate(every))
    flying: deque[tuple[int, Steps, Tensor]] = deque()

    def go_on(number: int, steps: Steps, arrived: Any) -> None:
        try:
            flying.append((number, steps, steps.send(arrived)))
        except StopIteration as end:
            results[number] = end.value

    while waiting or flying:
        while waiting and len(flying) < AHEAD:
            go_on(*waiting.popleft(), None)
        if flying:
            number, steps, started = flying.popleft()
            go_on(number, steps, (yield started))
    return results


def _micro_shards(rows: Tensor, coding: Coding, move: Move) -> Steps:
    """Send the side data of all shards first, then the codes of each: while one is decoded, the
    next arrives (EQuARX, section III.C)."""
    codec, dtype, shards = coding.codec, coding.dtype, coding.flow.shards
    length = shard_length(rows.shape[1], shards, codec.block)
    rows = pad(rows, length * shards)
    wires = [
        operators.encode_parts(
            codec,
            rows.narrow(1, shard * length, length),
            coding.salt(move.request.rank, shard),
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


def shard_length(numel: int, shards: int, block: int) -> int:
    """Return the values of each of ``shards`` shards: an even share, rounded up to whole blocks."""
    return (numel + shards * block - 1) // (shards * block) * block
