"""Chosen channels in 16 bits, the others by an inner codec or on a static grid (low-bit
tensor-parallel inference).

The values of a row are tokens of ``width`` channels. ``calibrate`` determines once which channels
are kept and the range of each one. The result is plain data (``Channels``), which is not recomputed
or sent. On the wire a row is the kept values, then the inner codec's wire of the others. With 1/64
of the channels kept and 4 bits for the others, it takes 4.19 bits per value.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import constants
from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.preset import Preset
from commpass.codecs.rows import aligned, cut_apart, finite_stays, from_bytes, pad, to_bytes
from commpass.codecs.wrappers.inner import Resolve, inner_codec
from commpass.errors import PolicyError

KEPT = {
    torch.float32: torch.bfloat16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,  # the same width, and exact
    torch.float64: torch.float64,
}
"""The dtype of kept values on the wire, by the dtype of the input."""

# --- channel statistics ---------------------------------------------------------------------------


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


# --- the codec ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutlierCodec(Codec):
    """Kept channels in 16 bits, the others by ``inner``; if ``largest`` is not 0, the others are
    first divided by their static scales.

    ``largest`` is the inner grid's largest number: a channel's scale is ``range / largest``. If the
    scales differ between ranks, ``at(rank)`` sets the encoding rank, and rows to decode are those
    of all ranks in order. The constants are the channel order (kept ones first), its inverse, and
    the scales of the other channels. ``names`` are the names of the constants, ``tables`` the
    tensors if they are graph inputs. Both follow from ``channels`` and are not compared.
    """

    spec: str = field(compare=False)
    channels: Channels
    inner: Codec
    largest: int = 0
    rank: int | None = None
    variant: str = field(default="", compare=False)
    tables: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)
    names: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", _constants(self.channels, self.largest))

    @property
    def block(self) -> int:
        return self.channels.width

    @property
    def is_calibrated(self) -> bool:
        return bool(self.largest)

    @property
    def bound(self) -> float:
        """The bound for a row. On a static grid the error of a value is at most the value: the
        nearest level is 0 or closer, or the value is clamped."""
        return 1.0 if self.largest else max(self.inner.bound, 2.0**-8)

    def floor(self, dtype: torch.dtype) -> float:
        return (
            0.0 if self.largest else max(self.inner.floor(dtype), torch.finfo(torch.bfloat16).tiny)
        )

    def at(self, rank: int) -> OutlierCodec:
        """Return the codec as rank ``rank`` of the group uses it."""
        if not 0 <= rank < len(self.channels.ranges):
            raise PolicyError(
                f"rank {rank}: the statistics are of {len(self.channels.ranges)} ranks"
            )
        return replace(self, rank=rank, variant=f"rank {rank}")

    def unsupported_reason(self, ranks: int) -> str | None:
        rows = len(self.channels.ranges) if self.largest else 0
        if rows > 1 and rows != ranks:
            return f"{TEXT} were calibrated on {rows} ranks, and these are {ranks}: calibrate there"
        return None

    def unsupported_shape(self, shape: Sequence[Any]) -> str | None:
        width, last = self.channels.width, shape[-1] if shape else 1
        if not self.largest or (isinstance(last, int) and last % width == 0):
            return None
        return f"{TEXT} are of {width} channels, and the last dimension of {list(shape)} is not"

    def of_rank(self, rank: int, ranks: int) -> OutlierCodec:
        if why := self.unsupported_reason(ranks):
            raise PolicyError(why)
        return self.at(rank) if self.largest and len(self.channels.ranges) > 1 else self

    def relative_error(self) -> float:
        """The relative error, that of rank 0 if ranks differ."""
        differs = self.largest and self.rank is None and len(self.channels.ranges) > 1
        return super(OutlierCodec, self.at(0) if differs else self).relative_error()

    def sample(self) -> Tensor:
        """Return Gaussian channels with the calibrated ranges."""
        if not self.largest:
            return super().sample()
        generator = torch.Generator().manual_seed(0)
        tokens = -(-SAMPLED // self.channels.width)
        values = torch.randn(tokens, self.channels.width, generator=generator, dtype=torch.float64)
        return values * torch.tensor(self.channels.ranges[self.rank or 0]) / PEAK

    def of_sum(self, of: int, ranks: int) -> OutlierCodec:
        if not self.largest:
            return self
        row = self.channels.range_of_sum(of, ranks)
        channels = replace(self.channels, ranges=(row,), sums=())
        return replace(
            self, channels=channels, rank=None, variant=f"sum of {of} of {ranks}", names=()
        )

    def hop_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Kept channels of float16 are sent in float16: as float32 they would be encoded as
        # bfloat16.
        return dtype if dtype == torch.float16 else accumulation_dtype(dtype)

    def salted(self, *salt: int) -> OutlierCodec:
        return replace(self, inner=self.inner.salted(*salt))

    def constants(self, like: Tensor) -> tuple[Tensor, ...]:
        return self.tables or tuple(
            constants.constant(name, like, self.spec, self.variant) for name in self.names
        )

    def with_constants(self, tables: Sequence[Tensor]) -> OutlierCodec:
        return replace(self, tables=tuple(tables))

    def _tokens(self, numel: int) -> int:
        return (numel + self.channels.width - 1) // self.channels.width

    def _kept_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return aligned(self._tokens(numel) * len(self.channels.kept) * KEPT[dtype].itemsize)

    def _inner_numel(self, numel: int) -> int:
        return self._tokens(numel) * (self.channels.width - len(self.channels.kept))

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self._kept_bytes(numel, dtype) + self.inner.wire_bytes(
            self._inner_numel(numel), self._inner_dtype(dtype)
        )

    def _inner_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return accumulation_dtype(dtype) if self.largest else dtype

    def encode_rows(self, rows: Tensor) -> Tensor:
        count, numel = rows.shape
        order, _, *scales = self.constants(rows)
        tokens, split = self._tokens(numel), len(self.channels.kept)
        padded = pad(rows, tokens * self.channels.width).reshape(count, tokens, self.channels.width)
        ordered = padded.index_select(2, order)
        kept, others = (
            ordered.narrow(2, 0, split),
            ordered.narrow(2, split, self.channels.width - split),
        )
        if scales:
            work = accumulation_dtype(rows.dtype)
            others = finite_stays(
                others.to(work) / self._scale(scales[0], count, encode=True).to(work),
                others,
                work,
            )
        narrow = finite_stays(kept, kept, KEPT[rows.dtype]).to(KEPT[rows.dtype])
        first = to_bytes(narrow.reshape(count, tokens * split))
        second = self.inner.encode_rows(self._flat(others, count, self._inner_numel(numel)))
        return torch.cat([pad(first, self._kept_bytes(numel, rows.dtype)), second], dim=1)

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        count, tokens, split = wire.shape[0], self._tokens(numel), len(self.channels.kept)
        (_, back, *scales), work = self.constants(wire), accumulation_dtype(dtype)
        raw = wire.narrow(1, 0, tokens * split * KEPT[dtype].itemsize)
        kept = from_bytes(raw, KEPT[dtype]).to(work).reshape(count, tokens, split)
        start = self._kept_bytes(numel, dtype)
        second = wire.narrow(1, start, wire.shape[1] - start)
        others = self.inner.decode_rows(
            second, self._inner_numel(numel), self._inner_dtype(dtype)
        ).to(work)
        others = others.reshape(count, tokens, self.channels.width - split)
        if scales:
            others = finite_stays(
                others * self._scale(scales[0], count, encode=False).to(work), others, dtype
            )
        rows = torch.cat([kept, others], dim=2).index_select(2, back)
        return cut_apart(rows.reshape(count, tokens * self.channels.width), numel)

    def _flat(self, inner: Tensor, count: int, numel: int) -> Tensor:
        """Return ``[rows, numel]``; for a static grid, cut from a longer tensor.

        A static grid has no peak, and without the cut a compiler would compute the scaled values
        more than once.
        """
        flat = inner.reshape(count, numel)
        return cut_apart(pad(flat, numel + 1), numel) if self.largest else flat

    def _scale(self, scales: Tensor, count: int, *, encode: bool) -> Tensor:
        """Return the scales for ``count`` rows: ``[1 or rows, 1, others]``."""
        ranks = scales.shape[0]
        if ranks == 1:
            return scales.unsqueeze(1)
        if not encode and count == ranks:
            return scales.unsqueeze(1)
        if self.rank is not None and (encode or count == 1):
            return scales[self.rank].reshape(1, 1, -1)
        if encode:
            raise PolicyError(
                f"the scales of {ranks} ranks differ: use .at(rank) of the codec, or calibrate(...,"
                " shared=True)"
            )
        raise PolicyError(
            f"{count} rows to decode, but the scales are those of {ranks} ranks: rows must be"
            " theirs, in order"
        )


SAMPLED = 1 << 16
PEAK = 4.0
"""The largest of some ten thousand Gaussian values, in standard deviations: the range that
calibration finds for a Gaussian channel."""
TEXT = "the statistics of codec 'outlier'"


@lru_cache(maxsize=1024)
def _constants(channels: Channels, largest: int) -> tuple[str, ...]:
    """Return the names of the codec's constants: int64 ``[width]`` twice, and for static scales
    float64 ``[ranks or 1, others]``."""
    others = channels.inner_channels
    order = (*channels.kept, *others)
    back = sorted(range(len(order)), key=lambda place: order[place])
    names = [constants.register(order, torch.int64), constants.register(back, torch.int64)]
    if largest:
        scales = [[row[channel] / largest or 1.0 for channel in others] for row in channels.ranges]
        names.append(constants.register(scales, torch.float64))
    return tuple(names)


# --- by name --------------------------------------------------------------------------------------


def outlier(
    resolve: Resolve,
    spec: str,
    *,
    statistics: str = "",
    bits: int = 4,
    inner: str = "",
    width: int = 0,
    keep: float = 1 / 64,
    seed: int = 0,
) -> Codec:
    """Kept channels in bf16, the others on a static grid of ``bits`` bits, all from calibration
    (low-bit TP inference).

    ``statistics`` is the text of ``Channels.to_text``. If an ``inner`` codec is given or the
    statistics have no ranges, an inner codec encodes the other channels instead of the static grid.
    Without statistics, ``width`` and ``keep`` choose random channels by ``seed``, for comparison:
    the paper found this to be no better than keeping none.
    """
    if not statistics and width < 1:
        raise PolicyError(
            "give statistics, as Channels.to_text makes them, or a width to choose channels at"
            " random"
        )
    channels = (
        Channels.from_text(statistics)
        if statistics
        else Channels(width, random_channels(width, keep, seed))
    )
    if width and width != channels.width:
        raise PolicyError(f"width={width}, but the statistics are of {channels.width} channels")
    if bits not in (2, 4, 6, 8):
        raise PolicyError(f"bits={bits}: must be 2, 4, 6 or 8")
    if inner or not channels.ranges:
        return OutlierCodec(spec, channels, inner_codec(resolve, "inner", inner or f"int{bits}"))
    return OutlierCodec(
        spec, channels, inner_codec(resolve, "bits", f"int{bits}(static=1.0)"), 2 ** (bits - 1) - 1
    )


PRESETS = (
    Preset(
        "outlier",
        outlier,
        "the features of widest range in bf16, the others in int4 (Low-bit tensor parallelism):"
        " inference, calibrated",
        has_inner=True,
    ),
)
