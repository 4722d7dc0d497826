"""A few entries of a row and where they lie: a selector, an index code, and an inner codec for the
values.

A row on the wire is the inner codec's wire of the ``k`` values, then the indices, padded to 16
bytes. Slots that are not used hold index ``n`` and value 0. A row that would lose something that is
not finite has no index at all and NaN for values: it is decoded to NaN throughout (law 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from commpass.codecs.codec import Codec, Wire, accumulation_dtype
from commpass.codecs.rows import ceil_to, cut, pad
from commpass.codecs.sparse import indices as index_codes
from commpass.codecs.sparse.at_once import select_at_once
from commpass.codecs.sparse.indices import IndexCode
from commpass.codecs.sparse.select import Density, Selection, Selector, guaranteed_share, select

ALIGNMENT = 16
"""Bytes to which a row is padded, so that each begins where vectors can be loaded; a sparse row is
small."""


@dataclass(frozen=True)
class SparseCodec(Codec):
    """``k = ceil(density * n)`` entries of a row; all others are decoded as zeros.

    What is left out is lost unless the caller adds it to the next row: see ``residual``.
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
        """Of a row: what is left out, ``1 - kept`` of the squared norm at most, and the inner
        codec's error of the rest."""
        part = guaranteed_share(self.selector, self.density)
        return max(self.inner.bound, math.sqrt(1 - part + self.inner.bound**2 * part))

    def floor(self, dtype: torch.dtype) -> float:
        return self.inner.floor(dtype)

    def segments(self, numel: int) -> tuple[SparseCodec, tuple[int, ...]]:
        """The codec of each part of a row that is selected from on its own, and their lengths."""
        return self, (numel,)

    def slots(self, numel: int) -> int:
        """How many entries of ``numel`` are sent."""
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

    def encode_at_once(self, row: Tensor) -> Tensor:
        """As ``encode_rows``, of one row ``[1, n]`` on a CPU, outside of graphs: the same bytes, in
        as few passes over the row as its values allow."""
        if row.numel() == 0:
            return self.encode_rows(row)
        return self._wire(row, select_at_once(self.selector, row, self.density))

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
        """uint8 ``[rows, wire_bytes(numel, dtype)]`` to int64 indices and values in the
        accumulation dtype, each ``[rows, k]``.

        Indices ascend; those of unused slots are ``numel`` and their values 0. A row of NaN
        throughout has no other indices, and NaN for values: ``dense`` and ``sum_by_index`` know
        what that means.
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
    """Rows ``[rows, numel]`` with the values at their indices and zeros elsewhere."""
    zeros = torch.zeros((values.shape[0], numel + 1), dtype=values.dtype, device=values.device)
    rows = cut(zeros.scatter(1, indices, values), numel)  # the last column takes the slots not used
    return torch.where(_poisoned(indices, values, numel), math.nan, rows)


def sum_by_index(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """The sum ``[numel]`` of all rows, row by row in order (law 4), at a cost of ``rows * k``
    additions."""
    total = torch.zeros(numel + 1, dtype=values.dtype, device=values.device)
    for row in range(
        values.shape[0]
    ):  # indices of one row differ: the order of additions is that of the rows
        total = total.scatter_add(0, indices[row], values[row])
    return torch.where(_poisoned(indices, values, numel).any(), math.nan, cut(total, numel))


def residual(x: Tensor, coder: Codec) -> tuple[Wire, Tensor]:
    """The wire of ``x`` and what it leaves out, in the accumulation dtype: add that to the next
    ``x`` (error feedback).

    0 where what is decoded is not finite: everybody has seen it, and it must not come back in every
    later step.
    """
    wire = coder.encode(x)
    rows = coder.decode_rows(wire.payload.reshape(1, -1), x.numel(), x.dtype).reshape(x.shape)
    return wire, torch.where(rows.isfinite(), x.to(rows.dtype) - rows, 0)


def _poisoned(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """bool ``[rows, 1]``: no slot is used, and the value of the first is not finite."""
    return (indices.narrow(1, 0, 1) == numel) & ~values.narrow(1, 0, 1).isfinite()
