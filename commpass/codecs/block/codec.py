"""``BlockCodec``: transform -> scale -> grid -> pack over blocks of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from commpass.codecs.block import grids, scales, storage, transforms
from commpass.codecs.block.domain import VALUES, Domain, domain_of
from commpass.codecs.block.grids import Grid
from commpass.codecs.block.layouts import Flat, Lanes, Layout
from commpass.codecs.block.noise import Nearest, Rounding, noise_of
from commpass.codecs.block.packing import pack, unpack
from commpass.codecs.block.scales import Absmax, Midrange, Scale
from commpass.codecs.block.transforms import NoTransform, Transform
from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.rows import aligned, as_bytes, cut_apart, pad
from commpass.errors import PolicyError


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Encode each block as ``q = grid(transform(x) / scale)``.

    An encoded row holds all codes, then all scales (those of blocks, then that of the row), then
    the side data of the transform. Zeros fill the last block of a row. Stochastic rounding draws
    different noise for each ``salt`` (see ``salted``).
    """

    spec: str = field(compare=False)
    layout: Layout
    grid: Grid
    scale: Scale = field(default_factory=Absmax)
    transform: Transform = field(default_factory=NoTransform)
    offset: Midrange | None = None
    rounding: Rounding = field(default_factory=Nearest)
    salt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check that the parts fit together.

        Raises PolicyError for a rotation with a static scale. Decode divides a stored scale by the
        number of values that the rotation sums, and a static scale is not stored.
        """
        if self.transform.sums > 1 and not self.scale.numbers:
            raise PolicyError(
                f"{self.transform} with {self.scale}: a rotation needs a scale that travels, such"
                " as Absmax()"
            )

    def salted(self, *salt: int) -> Codec:
        return self if isinstance(self.rounding, Nearest) else replace(self, salt=salt)

    @property
    def block(self) -> int:
        return self.layout.unit

    @property
    def has_linear_padding(self) -> bool:
        return not isinstance(self.layout, Lanes)

    @property
    def has_independent_blocks(self) -> bool:
        return self.has_linear_padding and not isinstance(self.scale, scales.TwoLevel)

    def padded_numel(self, numel: int) -> int:
        return self.layout.padded_numel(numel)

    @property
    def bound(self) -> float:
        size = self.layout.size(1 << 40)
        bound = scales.bound(self.scale, self.grid, self._half, size)
        if self.grid.has_zero and isinstance(self.rounding, Nearest):
            bound = min(bound, scales.bound_with_zero(self.scale))
        # The stored offset may be off by this fraction of itself.
        return bound + (2**-8 * math.sqrt(size) if self.offset else 0.0)

    @property
    def _half(self) -> float:
        """The largest error of a number within the grid: half a gap if rounded to nearest, a whole
        gap if rounded stochastically."""
        return self.grid.half * self.rounding.halves

    def floor(self, dtype: torch.dtype) -> float:
        """The additional absolute error that a value may have, caused by the smallest scale or by a
        static scale."""
        width = self.layout.size(1 << 40) if self.transform.sums > 1 else 1
        return scales.floor(self.scale, self.grid, self._half, accumulation_dtype(dtype)) * width

    @property
    def domain(self) -> Domain:
        return domain_of(self.transform) if isinstance(self.layout, Flat) else VALUES

    @property
    def domain_codec(self) -> Codec:
        return self if self.domain == VALUES else replace(self, transform=NoTransform())

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(aligned(size) for size in self.regions(numel, dtype))

    def parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        codes, *side = (aligned(size) for size in self.regions(numel, dtype))
        return codes, sum(side)

    @property
    def _storage_formats(self) -> list[str]:
        """The storage formats of the numbers sent: the offset of each block and its scales, then
        those of the row."""
        return [
            *([self.offset.stored] if self.offset else []),
            *[self.scale.stored] * self.scale.numbers,
            *["fp32"] * scales.row_numbers(self.scale),
        ]

    def regions(self, numel: int, dtype: torch.dtype) -> list[int]:
        """Bytes of the codes, of each stored number, and of the transform's side data."""
        blocks, work = self.layout.blocks(numel), accumulation_dtype(dtype)
        number = {
            stored: blocks * storage.itemsize(stored, work)
            for stored in dict.fromkeys(self._storage_formats)
        }
        codes = blocks * (self.layout.size(numel) * self.grid.bits // 8)
        rows = scales.row_numbers(self.scale)
        formats = self._storage_formats
        numbers = [number[stored] for stored in formats[: len(formats) - rows]]
        empty = isinstance(blocks, int) and blocks == 0
        numbers += [0 if empty else storage.itemsize("fp32", work)] * rows
        return [codes, *numbers, *([blocks] if self.transform.side else [])]

    def encode_rows(self, rows: Tensor) -> Tensor:
        return torch.cat([as_bytes(piece) for piece in self.encode_pieces(rows)], dim=1)

    def encode_parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        codes, *side = map(as_bytes, self.encode_pieces(rows))
        return codes, torch.cat(side, dim=1) if side else codes.new_empty((codes.shape[0], 0))

    def encode_pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the regions of the wire: codes, stored numbers, the transform's side data."""
        split = self.layout.split(rows).to(accumulation_dtype(rows.dtype))
        blocks, side = transforms.forward(self.transform, split)
        middle = []
        if self.offset:
            stored = self.offset.stored
            middle.append(storage.materialized(scales.middle_of(self.offset, blocks), stored))
            blocks = blocks - middle[0]
        measured = scales.measure(self.scale, blocks, self.grid)
        formats = self._storage_formats[len(middle) :]
        numbers = [
            storage.materialized(number, stored)
            for number, stored in zip(measured, formats, strict=True)
        ]
        noise = noise_of(self.rounding, blocks, self.salt)
        codes = grids.encode(
            self.grid, scales.divide(self.scale, blocks, numbers, self.grid), noise
        )
        numbers = middle + scales.refit(self.scale, blocks, codes, numbers, self.grid)
        regions = [pack(codes, self.grid.bits).flatten(1)]
        regions += [
            storage.in_form(number.squeeze(-1), stored)
            for number, stored in zip(numbers, self._storage_formats, strict=True)
        ]
        regions += [side.squeeze(-1)] if side is not None else []
        return tuple(map(_fill, regions))

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        codes, side = self.parts(numel, dtype)
        return self.decode_parts(
            (wire.narrow(1, 0, codes), wire.narrow(1, codes, side)), numel, dtype
        )

    def decode_parts(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        raw, rest = parts
        count, blocks, size = raw.shape[0], self.layout.blocks(numel), self.layout.size(numel)
        work = accumulation_dtype(dtype)
        if (
            isinstance(numel, int) and numel == 0
        ):  # an empty region has no strides that allow a view in another dtype
            return raw.new_empty((count, 0), dtype=work)
        length, *lengths = self.regions(numel, dtype)
        codes = unpack(
            raw.narrow(1, 0, length).reshape(count, blocks, size * self.grid.bits // 8),
            self.grid.bits,
        )
        regions, start = [], 0
        for length in lengths:
            regions.append(rest.narrow(1, start, length))
            start += aligned(length)
        side = regions.pop().unsqueeze(-1) if self.transform.side else None
        numbers = [
            storage.load(region, stored, work).unsqueeze(-1)
            for region, stored in zip(regions, self._storage_formats, strict=True)
        ]
        middle, numbers = (numbers[:1], numbers[1:]) if self.offset else ([], numbers)
        sums = self.transform.sums
        # Divide here, where there is one number per block; dividing later could overflow the sums
        # of the largest finite values.
        if sums > 1:
            middle = [number / sums for number in middle]
            numbers = [number / sums for number in numbers[:1]] + numbers[1:]
        values = scales.multiply(self.scale, grids.decode(self.grid, codes, work), numbers)
        if middle:
            values = values + middle[0]
        values = transforms.inverse(self.transform, values, side)
        values = values * sums if sums > 1 else values
        limit = torch.finfo(dtype).max
        return cut_apart(self.layout.join(values.clamp(-limit, limit), numel), numel)


def _fill(region: Tensor) -> Tensor:
    """Pad a region with zeros to its length on the wire."""
    size = region.itemsize
    return pad(region, aligned(region.shape[1] * size) // size)
