"""Chosen channels in 16 bits, the others by an inner codec or on a static grid (low-bit
tensor-parallel inference).

The values of a row are tokens of ``width`` channels. ``calibrate`` determines once which channels
are kept and the range of each one (``channels.py``). The result is plain data (``Channels``), which
is not recomputed or sent. On the wire a row is the kept values, then the inner codec's wire of the
others. With 1/64 of the channels kept and 4 bits for the others, it takes 4.19 bits per value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import constants
from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.preset import Preset
from commpass.codecs.rows import aligned, cut_apart, finite_stays, from_bytes, pad, to_bytes
from commpass.codecs.wrappers.channels import Channels, Running, calibrate, random_channels
from commpass.codecs.wrappers.inner import Resolve, inner_codec
from commpass.errors import PolicyError

__all__ = ["PRESETS", "Channels", "OutlierCodec", "Running", "calibrate", "outlier"]

KEPT = {
    torch.float32: torch.bfloat16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,  # the same width, and exact
    torch.float64: torch.float64,
}
"""The dtype of kept values on the wire, by the dtype of the input."""


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
