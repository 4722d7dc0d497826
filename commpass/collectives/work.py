"""What an algorithm costs one rank: what it hands to the process group, hop by hop, and the values
it encodes and decodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commpass.codecs import RawCodec
from commpass.codecs import codec as codec_named
from commpass.collectives.data_sized import varies
from commpass.collectives.steps import Coding, shard_length

RAW = codec_named("raw")
"""What a stage that is not coded uses: values as they are, for which nothing is computed."""


@dataclass(frozen=True)
class Payload:
    """The tensor that one rank gives to a collective: ``numel`` values, of which one entry of the
    first dimension has ``width``."""

    numel: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Hop:
    """One exchange: its kind, and the bytes handed over. ``dynamic``: their number depends on the
    values, this is what a Gaussian needs. ``peers``: how many ranks it really talks to, None for
    all. ``inside``: only to ranks of the same node. ``rows``: how many rows those bytes are, of
    which one may be for the rank itself."""

    kind: str
    nbytes: int
    dynamic: bool = False
    peers: int | None = None
    inside: bool = False
    rows: int = 1

    @property
    def leaving(self) -> int:
        """Bytes that go to other ranks: without a row that stays, where there are more rows than
        peers."""
        return (
            self.nbytes
            if self.peers is None or self.peers >= self.rows
            else self.nbytes // self.rows * self.peers
        )


@dataclass(frozen=True)
class Work:
    """The hops of one rank in order; values encoded and decoded; and kernels, one for each time
    something is coded."""

    hops: tuple[Hop, ...]
    encoded: int
    decoded: int
    kernels: int = 2

    @property
    def wire_bytes(self) -> int:
        return sum(hop.nbytes for hop in self.hops)

    @property
    def dynamic_bytes(self) -> int:
        """Of ``wire_bytes``, those whose number depends on the values."""
        return sum(hop.nbytes for hop in self.hops if hop.dynamic)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.hops + other.hops,
            self.encoded + other.encoded,
            self.decoded + other.decoded,
            self.kernels + other.kernels,
        )


def one_hop(
    kind: str,
    rows: int,
    numel: int,
    coding: Coding,
    arriving: int | None = None,
    *,
    peers: int | None = None,
    inside: bool = False,
) -> Work:
    """The work of ``steps.hop`` with ``rows`` of ``numel`` values, and as many that arrive unless
    told otherwise."""
    arriving = rows if arriving is None else arriving
    hops = tuple(
        Hop(kind, rows * size, dynamic, peers, inside, rows)
        for size, dynamic in wire_sizes(numel, coding)
    )
    if isinstance(coding.codec, RawCodec):
        return Work(hops, 0, 0, 0)
    return Work(
        hops, rows * numel, arriving * numel, 2 if coding.codec.dynamic else 2 * coding.shards
    )


def wire_sizes(numel: int, coding: Coding) -> list[tuple[int, bool]]:
    """Bytes of a row of ``numel`` values in each exchange of a hop, and whether they depend on the
    values."""
    codec, dtype = coding.codec, coding.codec.carried(coding.dtype)
    if varies(codec, dtype):
        static, _ = codec.parts(numel, dtype)
        rest = codec.expected_bytes(numel, dtype) - static
        return (
            [(8, False), (static + rest, True)]
            if coding.sizes_first
            else [(static, False), (rest, True)]
        )
    if coding.shards > 1 and not codec.dynamic:
        codes, *side = codec.parts(shard_length(numel, coding.shards, codec.block), dtype)
        return [
            *[(size * coding.shards, False) for size in side],
            *[(codes, False)] * coding.shards,
        ]
    return [(codec.wire_bytes(numel, dtype), False)]
