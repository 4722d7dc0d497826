"""The sparse codec: a selector, an index code, and an inner codec for the values.

A row on the wire is the inner codec's wire of the ``k`` values, then the indices, padded to 16
bytes. Unused slots hold index ``n`` and value 0. A row that would lose a nonfinite value has no
indices and NaN values; all of it is decoded to NaN (law 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from commpass.codecs.codec import Codec, Wire, accumulation_dtype
from commpass.codecs.rows import ceil_to, cut, pad
from commpass.codecs.sparse import indices as index_codes
from commpass.codecs.sparse.eager import select_eagerly
from commpass.codecs.sparse.indices import IndexCode
from commpass.codecs.sparse.select import Density, Selection, Selector, guaranteed_share, select

ALIGNMENT = 16
"""Rows are padded to this many bytes, so that each one begins at an address for vector loads; a
sparse row is small."""


@dataclass(frozen=True)
class SparseCodec(Codec):
    """Send ``k = ceil(density * n)`` entries of a row; all others are decoded as zeros.

    The entries not sent are lost unless the caller adds them to the next row: see ``residual``.
    """

    spec: str = field(compare=False)
    selector: Selector
    density: Density
    inner: Codec
    index: IndexCode

    state = "error feedback"

    def salted(self, *salt: int) -> SparseCodec:
        return replace(self, inner=self.inner.salted(*salt))

    @property
    def block(self) -> int:
        return 1

    @property
    def bound(self) -> float:
        """The bound for a row: the entries not sent have at most ``1 - guaranteed_share`` of the
        squared norm, and the inner codec's error applies to the rest."""
        part = guaranteed_share(self.selector, self.density)
        return max(self.inner.bound, math.sqrt(1 - part + self.inner.bound**2 * part))

    def floor(self, dtype: torch.dtype) -> float:
        return self.inner.floor(dtype)

    def segments(self, numel: int) -> tuple[SparseCodec, tuple[int, ...]]:
        """Return the codec of each separately selected part of a row, and the lengths of the
        parts."""
        return self, (numel,)

    def slots(self, numel: int) -> int:
        """Return how many of ``numel`` entries are sent."""
        return self.density.slots(numel)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        chosen = self.slots(numel)
        return ceil_to(
            self.inner.wire_bytes(chosen, dtype) + index_codes.nbytes(self.index, numel, chosen),
            ALIGNMENT,
        )

    def encode_rows(self, rows: Tensor) -> Tensor:
        count, numel = rows.shape
        if isinstance(numel, int) and numel == 0:
            return torch.zeros((count, 0), dtype=torch.uint8, device=rows.device)
        return self._wire(rows, select(self.selector, rows, self.density))

    def encode_eagerly(self, row: Tensor) -> Tensor:
        """As ``encode_rows`` for one row ``[1, n]`` on a CPU, outside of graphs: the same bytes, in
        as few passes over the row as its values allow."""
        if row.numel() == 0:
            return self.encode_rows(row)
        return self._wire(row, select_eagerly(self.selector, row, self.density))

    def _wire(self, rows: Tensor, selection: Selection) -> Tensor:
        numel = rows.shape[1]
        indices = torch.where(selection.lost.unsqueeze(-1), numel, selection.indices)
        values = torch.where(indices < numel, rows.gather(1, indices.clamp(max=numel - 1)), 0)
        values = torch.where(selection.lost.unsqueeze(-1), math.nan, values)
        regions = [
            self.inner.encode_rows(values),
            index_codes.encode(self.index, indices, numel),
        ]
        raw = torch.cat(regions, dim=1)
        return pad(raw, self.wire_bytes(numel, rows.dtype))

    def decode_sparse(self, wire: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Decode uint8 ``[rows, wire_bytes(numel, dtype)]`` to int64 indices and values in the
        accumulation dtype, each ``[rows, k]``.

        Indices ascend; unused slots have index ``numel`` and value 0. A row that is NaN throughout
        has only unused indices, and NaN values, which ``dense`` and ``sum_by_index`` expand.
        """
        chosen = self.slots(numel)
        split = self.inner.wire_bytes(chosen, dtype)
        values = self.inner.decode_rows(wire.narrow(1, 0, split), chosen, dtype).to(
            accumulation_dtype(dtype)
        )
        coded = wire.narrow(1, split, index_codes.nbytes(self.index, numel, chosen))
        indices = index_codes.decode(self.index, coded, numel, chosen)
        unused = torch.where(_poisoned(indices, values, numel), math.nan, 0.0)
        return indices, torch.where(indices < numel, values, unused.to(values.dtype))

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if isinstance(numel, int) and numel == 0:
            return torch.zeros(
                (wire.shape[0], 0), dtype=accumulation_dtype(dtype), device=wire.device
            )
        return dense(*self.decode_sparse(wire, numel, dtype), numel)


def dense(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return rows ``[rows, numel]`` with the values at their indices and zeros elsewhere."""
    zeros = torch.zeros((values.shape[0], numel + 1), dtype=values.dtype, device=values.device)
    rows = cut(zeros.scatter(1, indices, values), numel)  # the last column is for unused slots
    return torch.where(_poisoned(indices, values, numel), math.nan, rows)


def sum_by_index(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return the sum ``[numel]`` of all rows, added row by row in order (law 4), with ``rows * k``
    additions."""
    total = torch.zeros(numel + 1, dtype=values.dtype, device=values.device)
    for row in range(
        values.shape[0]
    ):  # indices within a row differ, so additions follow the order of the rows
        total = total.scatter_add(0, indices[row], values[row])
    return torch.where(_poisoned(indices, values, numel).any(), math.nan, cut(total, numel))


def residual(x: Tensor, codec: Codec) -> tuple[Wire, Tensor]:
    """Return the wire of ``x`` and its residual in the accumulation dtype: add the residual to the
    next ``x`` (error feedback).

    The residual is 0 if the decoded value is not finite: all ranks have received that value, and it
    must not reappear in every later step.
    """
    wire = codec.encode(x)
    rows = codec.decode_rows(wire.payload.reshape(1, -1), x.numel(), x.dtype).reshape(x.shape)
    return wire, torch.where(rows.isfinite(), x.to(rows.dtype) - rows, 0)


def _poisoned(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """bool ``[rows, 1]``: no slot is used, and the first value is not finite."""
    return (indices.narrow(1, 0, 1) == numel) & ~values.narrow(1, 0, 1).isfinite()
