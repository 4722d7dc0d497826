"""The real error of compressed sites, measured on some calls of a graph: on its first ones, where
there is an error budget (``budget``), and on a share of all (``Policy(watch=...)``).

What is measured is what the codec does to this rank's own values: ``|decode(encode(x)) - x| / |x|``
of the tensor x that the site is given, in 2-norms. The plan's ``error`` and ``max_error`` are about
the result of the whole algorithm, which may encode more than once: of a Gaussian, one encode has
the error ``Codec.relative_error``, and the result the plan's ``error``. What was measured is
therefore told times the second over the first.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commpass import groups
from commpass.codecs import Codec, codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.cast import CastCodec
from commpass.plan import PlannedSite
from commpass.utils.ambient import ambient_free

log = logging.getLogger("commpass")

SLICE = 1 << 22
SLICE_CPU = 1 << 16
"""Values that are encoded at a time: what is measured needs little memory, and stays in the cache
of a CPU, where that takes half the time."""
CHECKED = 1 << 18
"""Values of a site that are measured where its budget is checked: 64 pieces of 4,096."""


def is_sampled(call: int, share: float) -> bool:
    """Whether the call of that number, from 0, is among those on which errors are measured: the
    first, and so on so that their share is right. All ranks count alike (law 5)."""
    return math.floor(call * share) > math.floor((call - 1) * share)


PIECES = 64
"""Where a tensor is measured in part: from so many places, evenly apart."""
BLOCK = 256
"""Values of a block, of a codec that has none of its own."""
SMALL = 0.01
"""Share of the mean energy of a block below which the error of one is compared with that share: a
block of next to nothing may be lost."""


@dataclass(frozen=True)
class Reading:
    """What one call lost at a site of this rank: the relative root mean square ``error`` of its
    result; the share of its non-zero values that are ``lost``, which became 0 or are off by as much
    as they are; the relative error of its ``worst`` block; and whether all values are ``whole``
    numbers, as counts and ids are, though many of them could have a fraction."""

    error: float
    lost: float
    worst: float
    whole: bool = False


SOME = 16
"""Whole numbers that no field has by chance."""


def reading_of(found: Sequence[float], site: PlannedSite) -> Reading | None:
    """What ``measure`` found of a site, with the error as that of its result. None where there was
    nothing to measure: all values are zero, or some are not finite."""
    lost, had, values, gone, worst, fractions, could = found
    if not (math.isfinite(lost) and math.isfinite(had) and had):
        return None
    one = codec(site.codec).relative_error()
    error = math.sqrt(lost / had) * (site.error / one if one else 1.0)
    return Reading(error, gone / values, worst, whole=could >= SOME and not fractions)


@ambient_free
def measure(coder: Codec, x: Tensor, limit: int | None = None) -> Tensor:
    """What ``coder`` does to ``x``: float64 ``[7]`` on its device, which nobody waits for. The
    squared 2-norms of the error and of ``x``; how many values are not zero, and how many of those
    are lost; the largest relative error of a block; how many values have a fraction, and how many
    that are not zero could have one in their dtype. With ``limit``, of that many values of a larger
    tensor, where the codec codes blocks by themselves."""
    row = x.detach().reshape(1, -1)
    blocks = isinstance(coder, (BlockCodec, CastCodec)) and coder.block <= SLICE
    block = coder.block if blocks and coder.block > 1 else BLOCK
    parts = _parts(row, block, limit) if blocks else [row]  # what others choose depends on all
    wide = torch.promote_types(x.dtype, torch.float32)
    least_whole = 1 / torch.finfo(x.dtype).eps
    errors, energies, counts = [], [], []
    for part in parts:
        decoded = coder.decode_rows(coder.encode_rows(part), part.shape[1], x.dtype)
        had = part.to(wide)
        lost = decoded.to(wide) - had
        size, count = had.abs(), had.count_nonzero()
        gone = ((lost.abs() >= size) & (size != 0)).count_nonzero()
        could = count - (size >= least_whole).count_nonzero()
        counts.append(torch.stack([count, gone, had.frac().count_nonzero(), could]))
        errors.append(_by_block(lost, block))
        energies.append(_by_block(had, block))
    error, energy, count = torch.cat(errors), torch.cat(energies), sum(counts, counts[0] * 0)
    floor = energy.mean() * SMALL
    worst = (error / torch.maximum(energy, floor)).nan_to_num(0.0, posinf=0.0).amax().sqrt()
    values, lost_values, *whole = count.to(torch.float64)
    return torch.stack([error.sum(), energy.sum(), values, lost_values, worst, *whole])


def coder_of(site: PlannedSite) -> Codec:
    """The codec by which this rank encodes what a site is given."""
    coder, rank = codec(site.codec), groups.rank_in(site.group)
    return coder if rank is None else coder.of_rank(rank, site.group_size)


def _parts(row: Tensor, block: int, limit: int | None) -> list[Tensor]:
    """A row in parts of whole blocks, or so many of its values."""
    if limit is not None and row.shape[1] > limit:
        length = max(limit // PIECES // block, 1) * block
        last = (row.shape[1] - length) // block
        starts = sorted({round(last * n / (PIECES - 1)) * block for n in range(PIECES)})
        row = torch.cat([row[:, start : start + length] for start in starts], dim=1)
    longest = SLICE_CPU if row.device.type == "cpu" else SLICE
    return list(row.split(max(longest - longest % block, block), dim=1))


def _by_block(values: Tensor, block: int) -> Tensor:
    """The sums of squares, in float64, of the blocks of a row ``[1, n]``; of none, one of 0."""
    short = -values.shape[1] % block if values.shape[1] else block
    blocks = torch.nn.functional.pad(values, (0, short)) if short else values
    squares = blocks.reshape(-1, block).to(torch.float64).square()
    return squares.sum(1)


@dataclass
class Sampled:
    """What was measured of one site on this rank: relative errors of its result, as they would be
    with the error of what this rank encoded. ``why`` says why nothing is measured; "" otherwise.
    ``bound`` is ``max_error`` as it holds there, and ``checked`` says that the first calls hold the
    site to it; ``reading`` is that of the latest call, if there was something to measure."""

    site: PlannedSite
    bound: float | None
    why: str
    checked: bool = False
    count: int = 0
    last: float = 0.0
    worst: float = 0.0
    total: float = 0.0
    unclear: int = 0
    warned: bool = False
    reading: Reading | None = None

    @property
    def mean(self) -> float | None:
        """The mean over all samples; None before the first."""
        return self.total / self.count if self.count else None

    def add(self, found: Sequence[float]) -> None:
        """Takes what was measured. What is not finite, or zero everywhere, has no relative error:
        it is counted."""
        reading = reading_of(found, self.site)
        if reading is None:
            self.unclear += 1
            return
        self.reading, self.last = reading, reading.error
        self.worst, self.total = max(self.worst, self.last), self.total + self.last
        self.count += 1

    def warn(self) -> None:
        """Says once that the error is above the bound."""
        if self.count and self.bound is not None and self.last > self.bound and not self.warned:
            self.warned = True
            log.warning(ABOVE, label(self.site), self.site.kind, self.last, self.bound, MORE)


ABOVE = (
    "%s (%s): its real error is %.3g on this rank, above max_error=%.3g: its values are not spread"
    " as the codec expects. %s"
)
MORE = (
    "Give it a codec of more bits (a rule with module=...), leave it alone (keep=True), or allow"
    " more (max_error, and force=True where its values are whole numbers)"
)


PLAIN = "it is sent as it is"
"""Why nothing is measured of a site that is left alone."""


def label(site: PlannedSite) -> str:
    """A site in a few words: ``layers.0.mlp.down int8/two_shot``."""
    where = site.module or site.name
    return f"{where} {site.codec}/{site.algorithm}" if site.compressed else f"{where} as it is"


@dataclass
class Samples:
    """The sites of one graph, in the order of its plan, and what was measured of them. ``share``
    is the policy's ``watch``. While ``checking``, ``CHECKED`` values of each site are measured as
    well, and what is above its bound is for others to say."""

    share: float
    sites: list[Sampled] = field(default_factory=list)
    calls: int = 0
    checking: bool = False
    _waiting: list[tuple[int, Tensor, Any]] = field(default_factory=list)

    def next_sink(self) -> Callable[[int, Tensor], None] | None:
        """Counts a call. Returns what its sites are to be handed to, if it is sampled."""
        call, self.calls = self.calls, self.calls + 1
        if not any(not each.why for each in self.sites):
            return None
        self.read_measured()
        if self.share and is_sampled(call, self.share):
            return self._take
        return functools.partial(self._take, limit=CHECKED) if self.checking else None

    def _take(self, number: int, x: Tensor, limit: int | None = None) -> None:
        found = measure(coder_of(self.sites[number].site), x, limit)
        event = None
        if found.is_cuda:  # read when it has come, so that nothing waits
            module = torch.get_device_module(found.device)
            host = torch.empty(len(found), dtype=torch.float64, pin_memory=True)
            found, event = host.copy_(found, non_blocking=True), module.Event()
            event.record()
        self._waiting.append((number, found, event))
        self.read_measured()

    def read_measured(self, *, wait: bool = False) -> None:
        """Reads what has been measured by now, or waits for all."""
        waiting, self._waiting = self._waiting, []
        for number, found, event in waiting:
            if wait and event is not None:
                event.synchronize()
            if event is None or event.query():
                self.sites[number].add(found.tolist())
                if not self.checking:
                    self.sites[number].warn()
            else:
                self._waiting.append((number, found, event))
