"""The codec that most codecs are: transform -> scale -> grid -> pack over blocks of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from commpass.codecs import scales
from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.domain import VALUES, Domain, domain_of
from commpass.codecs.grids import Grid
from commpass.codecs.layouts import Flat, Layout
from commpass.codecs.noise import key_of, uniform
from commpass.codecs.packing import aligned, cut_apart, pack, pad, unpack
from commpass.codecs.scales import Scale
from commpass.codecs.transforms import NO_TRANSFORM, Transform


@dataclass(frozen=True, eq=False)
class BlockCodec(Codec):
    """``q = grid(transform(x) / scale)`` for each block; a row is all codes, then all scales, then
    what transforms need.

    ``seed`` rounds stochastically, with noise of its own for each ``salt`` (see ``salted``); None
    to the nearest. The last block of a row is filled with zeros.
    """

    spec: str
    layout: Layout
    grid: Grid
    scale: Scale = field(default_factory=Scale)
    transform: Transform = NO_TRANSFORM
    seed: int | None = None
    salt: tuple[int, ...] = ()

    def salted(self, *salt: int) -> Codec:
        return self if self.seed is None else replace(self, salt=salt)

    @property
    def block(self) -> int:
        return self.layout.unit

    def whole(self, numel: int) -> int:
        return self.layout.whole(numel)

    @property
    def bound(self) -> float:
        """Half the largest gap of the grid, if all values of a block had it: ``sqrt(block)`` times
        that of one.

        Where values above the largest are cut (rms, static), one loses no more than it was.
        """
        side = math.sqrt(self.layout.size(1 << 40))
        half = self._half
        if self.scale.rule == "static":
            return 1.0
        if self.scale.rule == "rms" or (self.scale.rule == "lsq" and scales.rms_fits(self.grid)):
            gap = half / self.grid.sigma * self.scale.growth()
            return math.sqrt(1 + gap * gap) * (1 + 2**-8)
        offset = (
            2**-8 * side if self.scale.offset else 0.0
        )  # the stored middle may be off by so much of itself
        return side * half / self.grid.largest * self.scale.growth() * (1 + 2**-7) + offset

    @property
    def _half(self) -> float:
        """The largest error of a number within the grid: half a gap to the nearest, a whole one at
        random."""
        return self.grid.half * (1 if self.seed is None else 2)

    def floor(self, dtype: torch.dtype) -> float:
        """An error that a value may have besides: from the smallest scale, or from the static
        one."""
        if self.scale.rule == "static":
            return self._half * self.scale.value
        width = self.layout.size(1 << 40) if self.transform is not NO_TRANSFORM else 1
        # A block whose scale would be below the smallest normal number is zero, on a grid that has
        # none of its own.
        steps = 2 * self._half if self.grid.has_zero else self.grid.largest + self._half
        return float(torch.finfo(accumulation_dtype(dtype)).tiny) * steps * width

    @property
    def domain(self) -> Domain:
        return domain_of(self.transform) if isinstance(self.layout, Flat) else VALUES

    @property
    def within(self) -> Codec:
        return self if self.domain is VALUES else replace(self, transform=NO_TRANSFORM)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(aligned(size) for size in self._regions(numel, dtype))

    def parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        codes, *side = (aligned(size) for size in self._regions(numel, dtype))
        return codes, sum(side)

    def _regions(self, numel: int, dtype: torch.dtype) -> list[int]:
        """Bytes of codes, of each stored number, and of the transform's side data."""
        blocks = self.layout.blocks(numel)
        number = blocks * self.scale.itemsize(accumulation_dtype(dtype))
        codes = blocks * (self.layout.size(numel) * self.grid.bits // 8)
        return [codes, *[number] * self.scale.numbers, *([blocks] if self.transform.side else [])]

    def encode_rows(self, rows: Tensor) -> Tensor:
        return torch.cat(self._encoded(rows), dim=1)

    def encode_parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        codes, *side = self._encoded(rows)
        return codes, torch.cat(side, dim=1) if side else codes.new_empty((codes.shape[0], 0))

    def _encoded(self, rows: Tensor) -> list[Tensor]:
        """The regions of the wire: codes, then stored numbers, then the transform's side data."""
        dtype = accumulation_dtype(rows.dtype)
        blocks, side = self.transform.forward(self.layout.split(rows).to(dtype))
        stored = []
        if self.scale.offset:
            middle = scales.settled(scales.middle_of(blocks, self.scale.stored), self.scale.stored)
            stored.append(middle)
            blocks = blocks - middle
        numbers = [
            scales.settled(number, self.scale.stored)
            for number in scales.measure(blocks, self.scale, self.grid)
        ]
        codes = self._codes(blocks, numbers)
        if self.scale.rule == "lsq":
            numbers = [
                scales.refit(blocks, self.grid.decode(codes, dtype), numbers[0], self.scale.stored)
            ]
        stored += numbers
        regions = [pack(codes, self.grid.bits).flatten(1)]
        regions += [scales.store(number.squeeze(-1), self.scale.stored) for number in stored]
        regions += [side.squeeze(-1)] if side is not None else []
        return [pad(region, aligned(region.shape[1])) for region in regions]

    def _codes(self, blocks: Tensor, numbers: list[Tensor]) -> Tensor:
        noise = None if self.seed is None else uniform(blocks, key_of(self.seed, self.salt))
        if self.scale.rule == "static":
            values, far = blocks / self.scale.value, 2 * self.grid.largest
            # A finite value that the division makes infinite is a large one: only what was not
            # finite is marked so.
            return self.grid.encode(
                torch.where(blocks.isfinite(), values.clamp(-far, far), values), noise
            )
        tiny = torch.finfo(blocks.dtype).tiny
        values = blocks
        for number in numbers:  # one division a block, and a product a value
            values = values * (
                1 / (number if self.grid.has_zero else torch.where(number == 0, tiny, number))
            )
        return self.grid.encode(values, noise)

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
        ):  # no strides by which bytes could be seen as numbers
            return raw.new_empty((count, 0), dtype=work)
        length, *lengths = self._regions(numel, dtype)
        codes = unpack(
            raw.narrow(1, 0, length).reshape(count, blocks, size * self.grid.bits // 8),
            self.grid.bits,
        )
        regions, start = [], 0
        for length in lengths:
            regions.append(rest.narrow(1, start, length))
            start += aligned(length)
        side = regions.pop().unsqueeze(-1) if self.transform.side else None
        numbers = [scales.load(region, self.scale.stored, work).unsqueeze(-1) for region in regions]
        sums = self.transform.sums
        # Here and not later: of one number a block, and the sums of the largest finite values stay
        # finite.
        if sums > 1:
            numbers = [
                number / sums if place != 1 or self.scale.offset else number
                for place, number in enumerate(numbers)
            ]
        middle = numbers.pop(0) if self.scale.offset else None
        values = self.grid.decode(codes, work)
        if self.scale.rule == "static":
            values = values * self.scale.value
        for number in reversed(numbers):
            values = values * number
        if middle is not None:
            values = values + middle
        values = self.transform.inverse(values, side)
        values = values * sums if sums > 1 else values
        limit = torch.finfo(dtype).max
        return cut_apart(self.layout.join(values.clamp(-limit, limit), numel), numel)
