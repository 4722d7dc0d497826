"""The input of threshold selection: magnitudes as bit patterns, and exact statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from commpass.codecs.codec import accumulation_dtype


class Statistics(Protocol):
    """Exact statistics of each row, ``[rows, 1]``, from which thresholds are computed. Sizes are
    magnitudes over the peak, 0 ... 1, in the accumulation dtype."""

    @property
    def entries(self) -> int: ...

    def peak(self) -> Tensor:
        """Return the largest finite magnitude, as a bit pattern."""

    def nonfinite(self) -> Tensor:
        """Return the number of nonfinite entries."""

    def at(self, places: Tensor) -> Tensor:
        """Return the patterns ``[rows, m]`` of the magnitudes at ``[1, m]`` or ``[rows, m]``."""

    def counts(
        self, thresholds: Tensor, unless: Tensor | None = None, enough: int | None = None
    ) -> Tensor:
        """Return how many entries reach each of the patterns ``[rows, m]``.

        Rows for which ``unless``, bool ``[rows, 1]``, holds may have any counts. If thresholds
        descend, all counts after one that is at least ``enough`` may be any number that is at least
        ``enough``.
        """

    def moments(self, peak: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of signed sizes (to 24 fractional bits) and of their squares (to 32
        fractional bits), as float64, and the number of finite entries."""

    def above(self, peak: Tensor, threshold: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum (to 24 fractional bits, as float64) and the number of the finite sizes
        that are not below ``threshold`` (float64)."""


@dataclass(frozen=True)
class AtenStatistics:
    """Statistics of rows and their ``magnitude_bits`` in plain aten operations."""

    rows: Tensor
    bits: Tensor

    @property
    def entries(self) -> int:
        return self.bits.shape[1]

    def peak(self) -> Tensor:
        return torch.where(finite(self.bits), self.bits, 0).amax(-1, keepdim=True)

    def nonfinite(self) -> Tensor:
        return not_finite(self.bits).unsqueeze(-1)

    def at(self, places: Tensor) -> Tensor:
        return self.bits.gather(1, places.expand(self.bits.shape[0], -1))

    def counts(
        self, thresholds: Tensor, unless: Tensor | None = None, enough: int | None = None
    ) -> Tensor:
        return counts(self.bits, thresholds)

    def moments(self, peak: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = _sizes(self.bits, peak)
        signed = torch.where(self.rows < 0, -size, size)
        count = finite(self.bits).sum(-1, keepdim=True)
        return _exact_sum(signed, 24), _exact_sum(size * size, 32), count

    def above(self, peak: Tensor, threshold: Tensor | None) -> tuple[Tensor, Tensor]:
        size, kept = _sizes(self.bits, peak), finite(self.bits)
        if threshold is not None:
            kept = kept & (size >= threshold)
        return _exact_sum(torch.where(kept, size, 0), 24), kept.sum(-1, keepdim=True)


# --- magnitudes as bit patterns -------------------------------------------------------------------


def magnitude_bits(rows: Tensor) -> Tensor:
    """Return the bit patterns of ``|x|``, int32 (int64 for float64), ordered as the magnitudes,
    with NaN above all."""
    wide = rows.to(accumulation_dtype(rows.dtype))
    whole = torch.int64 if wide.dtype == torch.float64 else torch.int32
    return wide.view(whole) & torch.iinfo(whole).max


def infinity(bits: Tensor) -> int:
    return 0x7FF0000000000000 if bits.dtype == torch.int64 else 0x7F800000


def finite(bits: Tensor) -> Tensor:
    return bits < infinity(bits)


def not_finite(bits: Tensor) -> Tensor:
    return (bits >= infinity(bits)).sum(-1)


def value(pattern: Tensor) -> Tensor:
    return pattern.view(torch.float64 if pattern.dtype == torch.int64 else torch.float32)


def pattern(threshold: Tensor, like: Tensor) -> Tensor:
    """Return a threshold (float64, at most the peak) as a pattern in the dtype of ``like``; at
    least 1, so that zeros are below it."""
    return (
        threshold.to(torch.float64 if like.dtype == torch.int64 else torch.float32)
        .view(like.dtype)
        .clamp(min=1)
    )


def _sizes(bits: Tensor, peak: Tensor) -> Tensor:
    """Return magnitudes over the largest one, 0 ... 1; zero for nonfinite values."""
    largest = value(peak)
    return torch.where(finite(bits), value(bits), 0) / torch.where(largest > 0, largest, 1)


def unit(threshold: Tensor) -> Tensor:
    return threshold.clamp(0, 1)


def _exact_sum(values: Tensor, fraction_bits: int) -> Tensor:
    """Return the sum of numbers in -1 ... 1 to ``fraction_bits`` fractional bits, as float64
    ``[rows, 1]``; the same for any order."""
    return (values * 2.0**fraction_bits).to(torch.int64).sum(
        -1, keepdim=True
    ).double() / 2.0**fraction_bits


def counts(bits: Tensor, thresholds: Tensor) -> Tensor:
    """Return how many entries reach each of the thresholds ``[rows, m]``; one pass over the row
    when compiled."""
    each = [(bits >= one.unsqueeze(-1)).sum(-1, dtype=torch.int32) for one in thresholds.unbind(-1)]
    return torch.stack(each, dim=-1).to(torch.int64)
