"""Statistics of rows ``x + residual`` by kernels: equal to those of
``codecs.sparse.measure.AtenStatistics``, without writing the rows to memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs.sparse.measure import magnitude_bits
from commpass.lowering.gpu.call import Arguments, Call, call_of, launch
from commpass.lowering.gpu.tiles import sparse as tiles
from commpass.lowering.gpu.tiles import sparse_measure

FORMS = {torch.float16: tiles.FP16, torch.bfloat16: tiles.BF16, torch.float32: tiles.FP32}
WHOLE = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class KernelStatistics:
    """``Statistics`` of ``x`` in bf16, fp16 or fp32 plus a float32 residual, both ``[rows, n]``. A
    program processes ``tiles`` blocks of ``block`` entries."""

    x: Tensor
    residual: Tensor
    extremes: Tensor
    block: int
    tiles: int

    @property
    def entries(self) -> int:
        return self.x.shape[1]

    def peak(self) -> Tensor:
        return self.extremes[0].unsqueeze(-1)

    def nonfinite(self) -> Tensor:
        return self.extremes[1].unsqueeze(-1).to(torch.int64)

    def at(self, places: Tensor) -> Tensor:
        chosen = places.expand(self.x.shape[0], -1)
        wanted = self.x.gather(1, chosen).float() + self.residual.gather(1, chosen)
        return magnitude_bits(wanted.to(self.x.dtype))

    def counts(
        self, thresholds: Tensor, unless: Tensor | None = None, enough: int | None = None
    ) -> Tensor:
        found = self.x.new_zeros(thresholds.shape, dtype=torch.int32)
        launch(self.counts_call(thresholds.contiguous(), unless, found))
        return found.to(torch.int64)

    def moments(self, peak: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.x.new_zeros((self.x.shape[0], 2), dtype=torch.int64)
        launch(self.moments_call(peak, found))
        signed, squares = found.double().split(1, dim=1)
        return signed / 2.0**24, squares / 2.0**32, self.entries - self.nonfinite()

    def above(self, peak: Tensor, threshold: Tensor | None) -> tuple[Tensor, Tensor]:
        found = self.x.new_zeros((self.x.shape[0], 2), dtype=torch.int64)
        launch(self.above_call(peak, _rounded_up(peak, threshold), found))
        total, count = found.split(1, dim=1)
        return total.double() / 2.0**24, count

    # --- calls ------------------------------------------------------------------------------------

    def peak_call(self) -> Call:
        peaks, outside = self.extremes
        return self._call(sparse_measure.sparse_peak, peaks=peaks, outside=outside)

    def counts_call(self, thresholds: Tensor, unless: Tensor | None, found: Tensor) -> Call:
        none = thresholds.new_zeros((thresholds.shape[0],), dtype=torch.int32)
        skipped = none if unless is None else unless.reshape(-1).to(torch.int32)
        return self._call(
            sparse_measure.sparse_counts,
            thresholds=thresholds,
            unless=skipped,
            found=found,
            COUNT=thresholds.shape[1],
        )

    def moments_call(self, peak: Tensor, found: Tensor) -> Call:
        return self._call(sparse_measure.sparse_moments, peaks=peak, found=found)

    def above_call(self, peak: Tensor, threshold: Tensor, found: Tensor) -> Call:
        above = sparse_measure.sparse_above
        return self._call(above, peaks=peak, threshold=threshold, found=found)

    def _call(self, entry: Callable[..., None], **arguments: Tensor | int) -> Call:
        rows, n = self.x.shape
        parts = -(-n // (self.block * self.tiles))
        known: Arguments = {
            **{"x": self.x.view(WHOLE[self.x.dtype]), "residual": self.residual},
            **{"n": n, "parts": parts, "FORM": FORMS[self.x.dtype], "ONE_ROW": rows == 1},
            **{"BLOCK": self.block, "TILES": self.tiles},
        }
        return call_of(entry, known | arguments, rows * parts)


def statistics_of(
    x: Tensor, residual: Tensor, block: int = 2048, tiles: int = 8
) -> KernelStatistics:
    """Return the statistics of rows; their extremes are measured immediately."""
    extremes = x.new_zeros((2, x.shape[0]), dtype=torch.int32)
    statistics = KernelStatistics(x, residual, extremes, block, tiles)
    launch(statistics.peak_call())
    return statistics


def _rounded_up(peak: Tensor, threshold: Tensor | None) -> Tensor:
    """Round a float64 bound up to a float32, the dtype of sizes."""
    if threshold is None:
        return torch.zeros_like(peak, dtype=torch.float32)
    near = threshold.float()
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    return torch.where(near.double() < threshold, above, near)
