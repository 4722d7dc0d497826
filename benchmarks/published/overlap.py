"""How far a single kernel on AMD overlaps its codec with the link: forms of the model.

    python -m benchmarks.published.overlap

The model adds the two times. Here a p-norm joins them instead: ``(link^p + codec^p)^(1/p)``. It is
the sum for p = 1, and near the longer of the two for a large p. For each p, the share of its speed
that a codec reaches and the time of a tile are fitted to the rows *fit* of fp16 on 4 MI300X. The
table shows the mean of ``|log(predicted / measured)|`` of these rows, and how many times are within
25 %, of these rows and of those that are held out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean

from rich.console import Console
from rich.table import Table

from benchmarks.published.predict import RAW, site_of, stages_of
from benchmarks.published.results import MISSED
from benchmarks.published.rows import read
from benchmarks.published.setups import SINGLE_KERNEL, Setup, setup_of
from commpass.passes.payloads import prices_of

POWERS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
SHARES = tuple(percent / 100 for percent in range(6, 60))
TILES_US = tuple(quarter / 4 for quarter in range(17))


@dataclass(frozen=True)
class Parts:
    """The measured time of a row, and the parts of its prediction, in microseconds. ``codec_us`` is
    that of kernels of its own, ``tiles`` the number of accesses of a tile."""

    fit: bool
    ranks: int
    measured_us: float
    link_us: float
    codec_us: float
    tiles: int
    fixed_us: float

    def error(self, power: float, share: float, tile_us: float) -> float:
        """Return ``log(predicted / measured)``."""
        joined = (self.link_us**power + (self.codec_us / share) ** power) ** (1 / power)
        return math.log((self.fixed_us + self.tiles * tile_us + joined) / self.measured_us)


def parts_of(setup: Setup, measured_us: float, fit: bool) -> Parts:
    """Return the parts of the prediction of one row."""
    of_group = prices_of(site_of(setup), setup.profile)
    kernels = dataclasses.replace(of_group.profile.kernels, tile_us=0.0, in_exchange=1.0)
    profile = dataclasses.replace(of_group.profile, kernels=kernels)
    of_group = dataclasses.replace(of_group, profile=profile)
    all_us = link_us = codec_us = 0.0
    tiles = 0
    for stage in stages_of(setup):
        all_us += of_group.task(dataclasses.replace(stage, rounds=1)).us
        if stage.role == "exchange":
            link_us += of_group.link.parts_us(
                stage.kind, stage.leaving, setup.ranks, stage.peers, by_messages=True
            )[1]
        elif stage.role in ("encode", "decode"):
            codec_us += kernels.values_us(stage.codec, stage.role, stage.values)
            tiles += 1
    fixed_us = all_us - link_us - codec_us
    return Parts(fit, setup.ranks, measured_us, link_us, codec_us, tiles, fixed_us)


def all_parts() -> list[Parts]:
    """Return the parts of all rows of single kernels with a codec on AMD. For fitting are those of
    fp16."""
    found: list[Parts] = []
    for row in read():
        setup = setup_of(row)
        if isinstance(setup, str) or setup.compressed != SINGLE_KERNEL or setup.codec == RAW:
            continue
        if "MI3" not in row.hardware or row.compressed is None:
            continue
        fit = row.split == "fit"
        if not fit or row.dtype == "fp16":
            found.append(parts_of(setup, row.compressed, fit))
    return found


def within(rows: Sequence[Parts], *form: float) -> str:
    """Return how many of the rows are predicted within 25 %."""
    near = sum(abs(math.expm1(each.error(*form))) <= MISSED for each in rows)
    return f"{near} of {len(rows)}"


def main() -> None:
    rows = all_parts()
    fit = [each for each in rows if each.fit]
    table = Table("p", "share", "tile us", "mean log error, fit", "within 25 %, fit")
    held_out = {ranks: [e for e in rows if not e.fit and e.ranks == ranks] for ranks in (2, 4, 8)}
    for ranks in held_out:
        table.add_column(f"held-out, {ranks} ranks")

    def loss(form: tuple[float, ...]) -> float:
        return mean(abs(each.error(*form)) for each in fit)

    for power in POWERS:
        best = min(product([power], SHARES, TILES_US), key=loss)
        near = [within(each, *best) for each in (fit, *held_out.values())]
        table.add_row(*(f"{number:g}" for number in best), f"{loss(best):.3f}", *near)
    Console().print(table)


if __name__ == "__main__":
    main()
