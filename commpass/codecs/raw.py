"""The identity codec."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from commpass.codecs.codec import Codec
from commpass.codecs.preset import Preset
from commpass.codecs.rows import as_bytes


@dataclass(frozen=True)
class RawCodec(Codec):
    """Send the bytes of the values, as views, without computation or side data. Lossless."""

    spec: str = field(compare=False)

    lossless = True
    block = 1
    bound = 0.0

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def encode_rows(self, rows: Tensor) -> Tensor:
        return as_bytes(rows.contiguous())

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if isinstance(numel, int) and numel == 0:
            return wire.new_empty((wire.shape[0], 0), dtype=dtype)
        return (
            wire.reshape(-1).view(dtype).reshape(wire.shape[0], numel)
        )  # rows may have any stride


def raw(spec: str) -> Codec:
    """The values in their own dtype, uncompressed; sparse codecs send values this way by
    default."""
    return RawCodec(spec)


PRESETS = (Preset("raw", raw, "the values as they are"),)
