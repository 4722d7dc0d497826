"""A few entries of a row and where they lie: a selector, an index code, and an inner codec for the values.

A row on the wire is the inner codec's wire of the ``k`` values, then the indices, padded to 16 bytes. Slots that are not used
hold index ``n`` and value 0. A row that would lose something that is not finite has no index at all and NaN for values: it
is decoded to NaN throughout (law 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from commpass.codecs import select
from commpass.codecs.codec import FLOATS, Codec, Wire, accumulation_dtype
from commpass.codecs.indices import IndexCode, index_code
from commpass.codecs.packing import ceil_to, cut, pad
from commpass.codecs.select import Density, Selector, density_of
from commpass.errors import PolicyError

ALIGNMENT = 16
"""Bytes to which a row is padded, so that each begins where vectors can be loaded; a sparse row is small."""


@dataclass(frozen=True, eq=False)
class SparseCodec(Codec):
    """``k = ceil(density * n)`` entries of a row; all others are decoded as zeros.

    ``kept`` is the least part of the row's squared norm that the selector promises to choose: the density for exact top-k,
    nothing for the others. What is left out is lost unless the caller adds it to the next row: see ``residual``.
    """

    name: str
    selector: Selector
    density: Density
    inner: Codec
    index: IndexCode
    kept: float

    state = "error feedback"

    @property
    def spec(self) -> str:
        return self.name

    @property
    def block(self) -> int:
        return 1

    @property
    def bound(self) -> float:
        """Of a row: what is left out, ``1 - kept`` of the squared norm at most, and the inner codec's error of the rest."""
        kept = self.kept
        return max(self.inner.bound, math.sqrt(1 - kept + self.inner.bound**2 * kept))

    def floor(self, dtype: torch.dtype) -> float:
        return self.inner.floor(dtype)

    def slots(self, numel: int) -> int:
        """How many entries of ``numel`` are sent."""
        return self.density.slots(numel)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        chosen = self.slots(numel)
        return ceil_to(inner_bytes(self.inner, chosen, dtype) + self.index.nbytes(numel, chosen), ALIGNMENT)

    def encode_rows(self, rows: Tensor) -> Tensor:
        count, numel = rows.shape
        if isinstance(numel, int) and numel == 0:
            return torch.zeros((count, 0), dtype=torch.uint8, device=rows.device)
        selection = self.selector(rows, self.density)
        indices = torch.where(selection.lost.unsqueeze(-1), numel, selection.indices)
        values = torch.where(indices < numel, rows.gather(1, indices.clamp(max=numel - 1)), 0)
        values = torch.where(selection.lost.unsqueeze(-1), math.nan, values)
        raw = torch.cat([inner_encode(self.inner, values), self.index.encode(indices, numel)], dim=1)
        return pad(raw, self.wire_bytes(numel, rows.dtype))

    def decode_sparse(self, wire: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """uint8 ``[rows, wire_bytes(numel, dtype)]`` to int64 indices and values in the accumulation dtype, each ``[rows, k]``.

        Indices ascend; those of unused slots are ``numel`` and their values 0. A row of NaN throughout has no other
        indices, and NaN for values: ``dense`` and ``sum_by_index`` know what that means.
        """
        chosen = self.slots(numel)
        split = inner_bytes(self.inner, chosen, dtype)
        values = inner_decode(self.inner, wire.narrow(1, 0, split), chosen, dtype)
        indices = self.index.decode(wire.narrow(1, split, self.index.nbytes(numel, chosen)), numel, chosen)
        unused = torch.where(_poisoned(indices, values, numel), math.nan, 0.0)
        return indices, torch.where(indices < numel, values, unused.to(values.dtype))

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if isinstance(numel, int) and numel == 0:
            return torch.zeros((wire.shape[0], 0), dtype=accumulation_dtype(dtype), device=wire.device)
        return dense(*self.decode_sparse(wire, numel, dtype), numel)


def dense(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """Rows ``[rows, numel]`` with the values at their indices and zeros elsewhere."""
    zeros = torch.zeros((values.shape[0], numel + 1), dtype=values.dtype, device=values.device)
    rows = cut(zeros.scatter(1, indices, values), numel)  # the last column takes the slots not used
    return torch.where(_poisoned(indices, values, numel), math.nan, rows)


def sum_by_index(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """The sum ``[numel]`` of all rows, row by row in order (law 4), at a cost of ``rows * k`` additions."""
    total = torch.zeros(numel + 1, dtype=values.dtype, device=values.device)
    for row in range(values.shape[0]):  # indices of one row differ: the order of additions is that of the rows
        total = total.scatter_add(0, indices[row], values[row])
    return torch.where(_poisoned(indices, values, numel).any(), math.nan, cut(total, numel))


def residual(x: Tensor, coder: Codec) -> tuple[Wire, Tensor]:
    """The wire of ``x`` and what it leaves out, in the accumulation dtype: add that to the next ``x`` (error feedback).

    0 where what is decoded is not finite: everybody has seen it, and it must not come back in every later step.
    """
    wire = coder.encode(x)
    rows = coder.decode_rows(wire.payload.reshape(1, -1), x.numel(), x.dtype).reshape(x.shape)
    return wire, torch.where(rows.isfinite(), x.to(rows.dtype) - rows, 0)


def _poisoned(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """bool ``[rows, 1]``: no slot is used, and the value of the first is not finite."""
    return (indices.narrow(1, 0, 1) == numel) & ~values.narrow(1, 0, 1).isfinite()


# --- by name ----------------------------------------------------------------------------------------------------------


def topk(spec: str, *, density: float = 0.01, values: str = "raw", indices: str = "least") -> Codec:
    """The ``ceil(density * n)`` entries of largest magnitude, exactly. Error feedback is the caller's."""
    return _sparse(spec, select.topk, density, values, indices, kept=density_of(density).ratio)


def randomk(spec: str, *, density: float = 0.01, values: str = "raw", indices: str = "least", seed: int = 0) -> Codec:
    """Entries at random, unscaled: unbiased only with error feedback. For comparison."""
    if not 0 <= seed < 2**32:
        raise PolicyError(f"seed={seed}: must be from 0 to 4294967295")
    return _sparse(spec, partial(select.randomk, seed=seed), density, values, indices)


def dgc(spec: str, *, density: float = 0.01, values: str = "raw", indices: str = "least") -> Codec:
    """Entries above the threshold of a 1 % sample (Deep Gradient Compression)."""
    return _sparse(spec, select.dgc, density, values, indices)


def gaussiank(spec: str, *, density: float = 0.01, values: str = "raw", indices: str = "least") -> Codec:
    """Entries above the threshold that a Gaussian would have."""
    return _sparse(spec, select.gaussiank, density, values, indices)


def redsync(spec: str, *, density: float = 0.01, values: str = "raw", indices: str = "least") -> Codec:
    """Entries above a threshold bisected between mean and maximum."""
    return _sparse(spec, select.redsync, density, values, indices)


def sidco(spec: str, *, density: float = 0.01, values: str = "raw", indices: str = "least") -> Codec:
    """Entries above the threshold that an exponential would have, in stages."""
    return _sparse(spec, select.sidco, density, values, indices)


def raw(spec: str) -> Codec:
    """The values as they are, in their own dtype: what sparse codecs send by default."""
    return RawCodec(spec)


def _sparse(spec: str, selector: Selector, density: float, values: str, indices: str, kept: float = 0.0) -> Codec:
    chosen = density_of(density)
    inner = inner_codec(values)
    if inner.state is not None:
        raise PolicyError(f"values={values!r}: it needs {inner.state} of its own; take a codec without state, such as 'int8'")
    return SparseCodec(spec, selector, chosen, inner, index_code(Fraction(chosen.over, chosen.under), indices), kept)


# --- a codec inside another -------------------------------------------------------------------------------------------


def inner_codec(text: str) -> Codec:
    """The codec that another one holds inside it, by name."""
    from commpass.codecs.names import NAMES, codec

    return codec(text) if text != "raw" or "raw" in NAMES else RawCodec("raw")


def inner_bytes(inner: Codec, numel: int, dtype: torch.dtype) -> int:
    """Bytes of ``numel`` values by an inner codec, filled up to whole blocks."""
    return inner.wire_bytes(whole_blocks(inner, numel), dtype)


def inner_encode(inner: Codec, rows: Tensor) -> Tensor:
    """Rows by an inner codec, filled up to whole blocks with zeros."""
    return inner.encode_rows(pad(rows, whole_blocks(inner, rows.shape[1])))


def inner_decode(inner: Codec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``inner_encode``, in the accumulation dtype.

    Whole blocks are decoded, settled, and then cut. On a CPU, Inductor (2.13) splits a loop over ``numel`` values that loads
    one scale a block into ``numel // block`` blocks, and leaves the tail unwritten, if anything elementwise follows the cut.
    """
    whole = whole_blocks(inner, numel)
    rows = inner.decode_rows(wire, whole, dtype)
    return rows if inner.block == 1 or (isinstance(numel, int) and numel == whole) else settled(rows, numel)


def settled(rows: Tensor, length: int) -> Tensor:
    """The first ``length`` columns, which must not be all. On a CPU they are cut as bytes: a view of another size is a buffer
    of its own, in which Inductor neither computes each value again for every use nor splits loops."""
    if rows.device.type != "cpu":
        return cut(rows, length)
    return cut(rows.contiguous().view(torch.uint8), length * rows.dtype.itemsize).view(rows.dtype)


def whole_blocks(inner: Codec, numel: int) -> int:
    """``numel`` rounded up to whole blocks of a codec."""
    return numel if inner.block == 1 else ceil_to(numel, inner.block)  # the same number, not a symbol like it


# --- values as they are -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RawCodec(Codec):
    """The bytes of the values, least first; no side data. Lossless: ``decode`` gives NaN payloads back, too."""

    name: str

    lossless = True

    @property
    def spec(self) -> str:
        return self.name

    @property
    def block(self) -> int:
        return 1

    @property
    def bound(self) -> float:
        return 0.0

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def encode_rows(self, rows: Tensor) -> Tensor:
        return as_bytes(rows)

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return from_raw(wire, numel, dtype).to(accumulation_dtype(dtype))

    def decode(self, wire: Wire, like: Tensor | None = None) -> Tensor:
        super().decode(wire, like)  # for its checks; a narrow NaN loses its payload on the way through float32
        numel = math.prod(wire.shape)
        return from_raw(wire.payload.reshape(1, -1), numel, wire.dtype).reshape(wire.shape)


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bytes(rows: Tensor) -> Tensor:
    """``[rows, n]`` to uint8 ``[rows, n * itemsize]``, by shifts: a view of another size would be a kernel of its own."""
    size = rows.dtype.itemsize
    whole = rows.view(_WHOLE[size]).unsqueeze(-1)
    shifts = 8 * torch.arange(size, dtype=whole.dtype, device=rows.device)
    return ((whole >> shifts) & 255).to(torch.uint8).reshape(rows.shape[0], rows.shape[1] * size)


def from_raw(wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``as_bytes``."""
    assert dtype in FLOATS
    whole = _WHOLE[dtype.itemsize]
    parts = wire.reshape(wire.shape[0], numel, dtype.itemsize).to(whole)
    shifts = 8 * torch.arange(dtype.itemsize, dtype=whole, device=wire.device)
    return (parts << shifts).sum(-1, dtype=whole).view(dtype)  # no two parts share a bit
