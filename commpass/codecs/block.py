"""The codec that most codecs are: transform -> scale -> grid -> pack over blocks of consecutive values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.parts import Grid, Transform, absmax_scale, ceil_to, cut, from_bytes, pack, pad, to_bytes, unpack

ALIGNMENT = 128
"""Bytes to which the regions of a row are padded: odd rows lose vector stores and cost a copy."""


@dataclass(frozen=True, eq=False)
class BlockCodec(Codec):
    """``q = grid(transform(x) / scale)`` for each block; a row is all codes, then all scales.

    Error of a value: at most half a grid step of its block (``max|x| / largest / 2`` for an integer grid without a
    transform), or half the smallest normal number where that is more.
    """

    name: str
    width: int
    transform: Transform
    grid: Grid

    @property
    def spec(self) -> str:
        return self.name

    @property
    def block(self) -> int:
        return self.width

    def _blocks(self, numel: int) -> int:
        return (numel + self.width - 1) // self.width

    def _code_bytes(self, numel: int) -> int:
        return self._blocks(numel) * (self.width * self.grid.bits // 8)

    def _scale_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self._blocks(numel) * accumulation_dtype(dtype).itemsize

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return ceil_to(self._code_bytes(numel), ALIGNMENT) + ceil_to(self._scale_bytes(numel, dtype), ALIGNMENT)

    def encode_rows(self, rows: Tensor) -> Tensor:
        count, numel = rows.shape
        dtype = accumulation_dtype(rows.dtype)
        padded = pad(rows, self._blocks(numel) * self.width)
        blocks = self.transform.forward(padded.reshape(count, self._blocks(numel), self.width).to(dtype))
        scale = absmax_scale(blocks, self.grid.largest)
        codes = pack(self.grid.encode(blocks / scale), self.grid.bits).flatten(1)
        scales = to_bytes(scale.squeeze(-1))
        return torch.cat([pad(codes, ceil_to(codes.shape[1], ALIGNMENT)),
                          pad(scales, ceil_to(scales.shape[1], ALIGNMENT))], dim=1)  # fmt: skip

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        count, blocks = wire.shape[0], self._blocks(numel)
        work = accumulation_dtype(dtype)
        codes = wire.narrow(1, 0, self._code_bytes(numel)).reshape(count, blocks, self.width * self.grid.bits // 8)
        start = ceil_to(self._code_bytes(numel), ALIGNMENT)
        scale = from_bytes(wire.narrow(1, start, self._scale_bytes(numel, dtype)), work).unsqueeze(-1)
        values = self.transform.inverse(self.grid.decode(unpack(codes, self.grid.bits), work)) * scale
        limit = torch.finfo(dtype).max
        return cut(values.clamp(-limit, limit).reshape(count, blocks * self.width), numel)
