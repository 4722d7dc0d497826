"""Calibration of codec ``outlier``: which channels are kept in 16 bits, and the range of each."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from commpass.errors import PolicyError


@dataclass(frozen=True)
class Channels:
    """The kept channels of ``width``, ascending, and the range of each channel: ``|x| <= range`` in
    calibration.

    ``ranges`` has one row of ``width`` numbers for all ranks, one row per rank, or no rows.
    ``sums`` has one number per channel, the range of the sum over all ranks, or none. They are
    rounded up to bfloat16 on construction, so that ``to_text`` and ``to_json`` are exact. Raises
    PolicyError for invalid values.
    """

    width: int
    kept: tuple[int, ...]
    ranges: tuple[tuple[float, ...], ...] = ()
    sums: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if type(self.width) is not int or not 1 <= self.width < 2**31:
            raise PolicyError(
                f"width={self.width!r}: must be a whole number of channels, at least 1"
            )
        if any(type(channel) is not int or not 0 <= channel < self.width for channel in self.kept):
            raise PolicyError(
                f"kept channels {_abbreviated(self.kept)}: each must be a whole number from 0 to"
                f" {self.width - 1}"
            )
        if any(one >= other for one, other in zip(self.kept, self.kept[1:], strict=False)):
            raise PolicyError(
                f"kept channels {_abbreviated(self.kept)}: must ascend, each at most once; sort"
                " them"
            )
        if len(self.kept) == self.width:
            raise PolicyError(
                f"all {self.width} channels are kept: nothing is left for the inner codec"
            )
        if self.sums and not self.ranges:
            raise PolicyError("ranges of sums, but none of what is summed: give ranges as well")
        for row in (*self.ranges, *([self.sums] if self.sums else [])):
            if len(row) != self.width:
                raise PolicyError(
                    f"a row of {len(row)} ranges for width={self.width}: one for each channel is"
                    " needed"
                )
            if any(not 0 <= float(reach) < 3e38 for reach in row):
                raise PolicyError(
                    f"ranges {_abbreviated(row)}: each must be a finite number, 0 or more"
                )
        object.__setattr__(self, "kept", tuple(self.kept))
        object.__setattr__(self, "ranges", tuple(tuple(map(_up, row)) for row in self.ranges))
        object.__setattr__(self, "sums", tuple(map(_up, self.sums)))

    @property
    def inner_channels(self) -> tuple[int, ...]:
        """The channels that are not kept, ascending."""
        return tuple(sorted(set(range(self.width)) - set(self.kept)))

    def keeping(self, share: float) -> Channels:
        """Return the same ranges, keeping the ``ceil(share * width)`` channels with the widest
        ranges, added up over the ranks."""
        total = [math.fsum(row[channel] for row in self.ranges) for channel in range(self.width)]
        order = sorted(range(self.width), key=lambda channel: -total[channel])
        return replace(self, kept=tuple(sorted(order[: kept_count(self.width, share)])))

    def shared(self) -> Channels:
        """Return one row for all ranks: the largest range of any rank."""
        return replace(
            self, ranges=(tuple(map(max, *self.ranges)),) if self.ranges[1:] else self.ranges
        )

    def range_of_sum(self, of: int, ranks: int) -> tuple[float, ...]:
        """Return the range of each channel of the sum over ``of`` of ``ranks`` ranks.

        Squares of ranges add up like variances: they grow linearly from the range of one rank to
        the range of all. If ``sums`` were not calibrated, ranks are assumed to be independent.
        """
        one = [max(row[channel] for row in self.ranges) for channel in range(self.width)]
        if of == 1 or ranks == 1:
            return tuple(one)
        every = self.sums or tuple(
            self._independent(channel, ranks) for channel in range(self.width)
        )
        if of == ranks:
            return every
        grown = (of - 1) / (ranks - 1)
        return tuple(
            math.sqrt(a * a + max(0.0, b * b - a * a) * grown)
            for a, b in zip(one, every, strict=True)
        )

    def _independent(self, channel: int, ranks: int) -> float:
        rows = self.ranges if len(self.ranges) > 1 else self.ranges * ranks
        return math.sqrt(sum(row[channel] ** 2 for row in rows))

    def to_json(self) -> str:
        return json.dumps(
            {"width": self.width, "kept": self.kept, "ranges": self.ranges, "sums": self.sums}
        )

    @staticmethod
    def from_json(text: str) -> Channels:
        try:
            data = json.loads(text)
            sums = tuple(data.get("sums", ()))
            ranges = tuple(map(tuple, data["ranges"]))
            return Channels(data["width"], tuple(data["kept"]), ranges, sums)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, PolicyError):
                raise
            raise PolicyError(
                f"channels: cannot read {text[:60]!r}; it should be what Channels.to_json makes"
            ) from None

    def to_text(self) -> str:
        """Return a text of letters and digits that may be part of a codec's name; ``from_text``
        restores equal Channels."""
        words = [_bfloat16_bits(reach) for row in (*self.ranges, self.sums) for reach in row]
        rows = len(self.ranges) | (WITH_SUMS if self.sums else 0)
        numbers = (self.width, len(self.kept), rows, *self.kept)
        raw = struct.pack(f"<{len(numbers)}I{len(words)}H", *numbers, *words)
        raw += struct.pack("<I", binascii.crc32(raw))
        return "c" + base64.b32encode(raw).decode().rstrip("=")

    @staticmethod
    def from_text(text: str) -> Channels:
        try:
            raw = base64.b32decode(text[1:] + "=" * (-len(text[1:]) % 8))
            (total,) = struct.unpack_from("<I", raw, len(raw) - 4)
            if text[:1] != "c" or total != binascii.crc32(raw[:-4]):
                raise ValueError
            width, kept, rows = struct.unpack_from("<3I", raw)
            summed, rows = divmod(rows, WITH_SUMS)
            words = struct.unpack_from(f"<{kept}I{(rows + summed) * width}H", raw, 12)
        except (ValueError, struct.error):
            raise PolicyError(
                f"statistics={text[:40]!r}: not what Channels.to_text makes, or cut short"
            ) from None
        reach = [_reach(word) for word in words[kept:]]
        found = [tuple(reach[row * width : (row + 1) * width]) for row in range(rows + summed)]
        return Channels(width, words[:kept], tuple(found[:rows]), *found[rows:])


WITH_SUMS = 1 << 31
"""A flag in the number of rows in the text of Channels: the last row is ``sums``."""


def _bfloat16_bits(reach: float) -> int:
    """Return the upper half of a float32, which is a bfloat16."""
    return int(struct.unpack("<I", struct.pack("<f", reach))[0] >> 16)


def _reach(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def _up(reach: float) -> float:
    """Round a number of 0 ... 3e38 up to a bfloat16."""
    word = _bfloat16_bits(reach)
    while _reach(word) < reach:
        word += 1
    return _reach(word)


def _abbreviated(numbers: Sequence[Any]) -> str:
    return str(list(numbers[:6])).replace("]", ", ...]" if len(numbers) > 6 else "]")


# --- calibration ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """Moving averages of the smallest and the largest value of each channel on one rank, float64
    ``[width]`` (equations 1, 2)."""

    low: Tensor
    high: Tensor

    @staticmethod
    def start(x: Tensor) -> Running:
        """Start from the first sequence ``[..., width]``. Raises PolicyError if it is empty or has
        nonfinite values."""
        tokens = x.detach().reshape(-1, x.shape[-1]).double()
        if tokens.numel() == 0 or not bool(tokens.isfinite().all()):
            raise PolicyError(
                f"calibration on {list(x.shape)}: there must be values, and all of them finite"
            )
        return Running(tokens.amin(0), tokens.amax(0))

    def update(self, x: Tensor, gamma: float = 0.99) -> Running:
        """Update with one more sequence: ``m <- gamma * m + (1 - gamma) * min``, and the same for
        the maximum."""
        if not 0 <= gamma < 1:
            raise PolicyError(f"gamma={gamma}: must be from 0 up to, but not, 1, such as 0.99")
        new = Running.start(x)
        if new.low.shape != self.low.shape:
            raise PolicyError(
                f"calibration on {list(x.shape)}, but before on {self.low.numel()} channels"
            )
        return Running(
            gamma * self.low + (1 - gamma) * new.low, gamma * self.high + (1 - gamma) * new.high
        )

    @property
    def ranges(self) -> Tensor:
        """``max(|m|, |M|)`` of each channel: the range that a symmetric grid must cover."""
        return torch.maximum(self.low.abs(), self.high.abs())


def calibrate(
    ranks: Sequence[Running],
    keep: float = 1 / 64,
    *,
    shared: bool = False,
    seed: int | None = None,
    sums: Running | None = None,
) -> Channels:
    """Return the channels to keep, and the ranges of all ranks. With ``shared``, there is one row:
    the largest ranges of all ranks. ``sums`` are the statistics of the sum over all ranks.

    The ``ceil(keep * width)`` channels with the widest ranges, added up over the ranks, are kept on
    all ranks. With a ``seed``, random channels are kept instead, for comparison.
    """
    ranges = torch.stack([one.ranges for one in ranks])
    if seed is None:
        order = torch.sort(ranges.sum(0), descending=True, stable=True).indices
        kept = tuple(sorted(order[: kept_count(ranges.shape[1], keep)].tolist()))
    else:
        kept = random_channels(ranges.shape[1], keep, seed)
    rows = ranges.amax(0, keepdim=True) if shared else ranges
    total = () if sums is None else tuple(sums.ranges.tolist())
    return Channels(ranges.shape[1], kept, tuple(map(tuple, rows.tolist())), total)


def random_channels(width: int, keep: float, seed: int) -> tuple[int, ...]:
    """Return ``ceil(keep * width)`` random channels, ascending: the same for the same seed on every
    machine."""
    order = sorted(
        range(width),
        key=lambda channel: hashlib.blake2b(struct.pack("<qq", seed, channel)).digest(),
    )
    return tuple(sorted(order[: kept_count(width, keep)]))


def kept_count(width: int, keep: float) -> int:
    if not 0 <= keep < 1:
        raise PolicyError(f"keep={keep}: must be from 0 up to, but not, 1, such as 0.015625")
    return math.ceil(Fraction(keep).limit_denominator(10**6) * width)
