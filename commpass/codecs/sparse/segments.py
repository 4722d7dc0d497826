"""Selection in each of several consecutive tensors of a row.

A fusion buffer holds small and large values side by side: one threshold for all of it would omit
whole tensors. SSFusion (section 3) selects in each tensor and sends the selections together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from commpass.codecs.codec import Codec
from commpass.codecs.preset import Preset
from commpass.codecs.sparse.codec import SparseCodec
from commpass.codecs.wrappers.inner import Resolve
from commpass.errors import PolicyError


@dataclass(frozen=True)
class SegmentedCodec(SparseCodec):
    """A sparse codec for each of several segments of a row, of ``lengths`` entries each. A row of
    any other length is one segment.

    The wire is the concatenation of the wires of the segments. Indices are relative to the row. If
    the row is decoded as one, a nonfinite segment makes all of it NaN (law 2).
    """

    each: SparseCodec
    lengths: tuple[int, ...]

    def segments(self, numel: int) -> tuple[SparseCodec, tuple[int, ...]]:
        return self.each, self.lengths if numel == sum(self.lengths) else (numel,)

    def slots(self, numel: int) -> int:
        each, lengths = self.segments(numel)
        return sum(map(each.slots, lengths))

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        each, lengths = self.segments(numel)
        return sum(each.wire_bytes(length, dtype) for length in lengths)

    def encode_rows(self, rows: Tensor) -> Tensor:
        each, lengths = self.segments(rows.shape[1])
        parts = rows.split(list(lengths), dim=1)
        return torch.cat([each.encode_rows(part) for part in parts], dim=1)

    def encode_eagerly(self, row: Tensor) -> Tensor:
        each, lengths = self.segments(row.shape[1])
        parts = row.split(list(lengths), dim=1)
        return torch.cat([each.encode_eagerly(part) for part in parts], dim=1)

    def decode_sparse(self, wire: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        each, lengths = self.segments(numel)
        wires = wire.split([each.wire_bytes(length, dtype) for length in lengths], dim=1)
        starts = accumulate(lengths, initial=0)
        found: list[tuple[Tensor, Tensor]] = []
        for start, length, part in zip(starts, lengths, wires, strict=False):
            indices, values = each.decode_sparse(part, length, dtype)
            found.append((torch.where(indices < length, indices + start, numel), values))
        indices = torch.cat([indices for indices, _ in found], dim=1)
        values = torch.cat([values for _, values in found], dim=1)
        # Values of unused slots are 0, except those of a segment that was not finite.
        lost = ((indices == numel) & ~values.isfinite()).any(1, keepdim=True)
        return torch.where(lost, numel, indices), torch.where(lost, torch.nan, values)


def segments(resolve: Resolve, spec: str, *, inner: str = "dgc", lengths: str = "") -> Codec:
    """Consecutive tensors of ``lengths`` entries (``n4096_512``), each selected separately by
    ``inner``: a fusion buffer."""
    codec = resolve(inner)
    if type(codec) is not SparseCodec:
        raise PolicyError(f"inner={inner!r}: must be a codec that selects, such as 'dgc'")
    try:
        known = tuple(map(int, lengths.removeprefix("n").split("_"))) if lengths else ()
    except ValueError:
        known = (0,)
    if any(length < 1 for length in known):
        raise PolicyError(f"lengths={lengths!r}: must be like 'n4096_512', each at least 1")
    parts = (codec.selector, codec.density, codec.inner, codec.index)
    return SegmentedCodec(spec, *parts, codec, known)


PRESETS = (
    Preset(
        "segments",
        segments,
        "tensors of a fusion buffer, each selected from on its own (SSFusion)",
        has_inner=True,
    ),
)


def segmented(spec: str, lengths: Sequence[int]) -> str:
    """Return the text of a codec for segments, each encoded by codec ``spec``."""
    return f"segments(inner={spec}, lengths=n{'_'.join(map(str, lengths))})"
