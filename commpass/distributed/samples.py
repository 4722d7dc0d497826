"""Measure the real error of compressed sites on some calls of a graph.

Errors are measured on the first calls if there is an error budget (``budget``), and on a share of
all calls (``Policy(error_sample_rate=...)``).

The measurement is what the codec does to this rank's own values: ``|decode(encode(x)) - x| / |x|``
of the tensor x that the site is given, in 2-norms. The plan's ``error`` and ``max_error`` are about
the result of the whole algorithm, which may encode more than once. For Gaussian values, one encode
has the error ``Codec.relative_error``, and the result has the plan's ``error``. The measured error
is therefore reported times the ratio of the plan's ``error`` to that of one encode.

Values that are not finite have no error. They are left out, with the block that they make
non-finite (law 2), and the other blocks are measured as if zeros were in their place. So values
that share more with them than a block (scales of ``equarx``, bits of ``ecq``) do count.
"""

from __future__ import annotations

import dataclasses
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
from commpass.distributed.inference_of_shapes import infers_shapes
from commpass.plan import PlannedSite
from commpass.utils.ambient import ambient_free

log = logging.getLogger("commpass")

SLICE = 1 << 22
SLICE_CPU = 1 << 16
"""Values that are encoded at a time. Measuring then needs little memory and stays in the cache of a
CPU, where that takes half the time."""
CHECKED = 1 << 18
"""Values of a site that are measured when its budget is checked: 64 pieces of 4,096."""


def is_sampled(call: int, share: float) -> bool:
    """Return whether errors are measured on the call of that number, from 0.

    The first call is measured, and then as many as keep the share right. All ranks count alike (law
    5).
    """
    return math.floor(call * share) > math.floor((call - 1) * share)


PIECES = 64
"""The number of places, evenly spaced, from which a tensor is measured in part."""
BLOCK = 256
"""Values per block, for a codec without a block size."""
SMALL = 0.01
"""Share of the mean block energy below which a block's error is compared with that share instead: a
block of almost zero may be lost."""


@dataclass(frozen=True)
class Reading:
    """What one call lost at a site of this rank.

    - ``error``: the relative root mean square error of its result.
    - ``lost``: the share of its non-zero values that became 0 or are off by their own size.
    - ``worst``: the relative error of its worst block.
    - ``whole``: whether all values are whole numbers, as counts and ids are, though many could have
      a fraction.
    """

    error: float
    lost: float
    worst: float
    whole: bool = False


LEAST_FINITE = 1 / 8
"""The least share of blocks that must be finite for a reading. Few blocks, such as those of padding
beside a mask, may be unlike the others."""
SOME = 16
"""Values are taken for whole numbers only if this many of them could have had a fraction."""


def reading_of(found: Sequence[float], site: PlannedSite) -> Reading | None:
    """Convert the output of ``measure`` for a site, with the error scaled to that of its result.

    Return None if there was nothing to measure: few blocks are finite (``LEAST_FINITE``), or those
    that are hold only zeros, or numbers whose squares no float64 holds. A finite block that decodes
    to a non-finite value has an infinite error.
    """
    reading = one_encode(found)
    if reading is None:
        return None
    one = codec(site.codec).relative_error()
    return dataclasses.replace(reading, error=reading.error * (site.error / one if one else 1.0))


def one_encode(found: Sequence[float]) -> Reading | None:
    """Convert the output of ``measure``, with the error of one encode and decode. Return None if
    there was nothing to measure."""
    lost, original, values, lost_count, worst, fractions, fraction_candidates = found
    if not (math.isfinite(original) and original):
        return None
    return Reading(
        math.sqrt(lost / original),
        lost_count / values,
        worst,
        whole=fraction_candidates >= SOME and not fractions,
    )


def largest(readings: Sequence[Reading]) -> Reading:
    """Return the largest of each number of some readings, one or more."""
    return Reading(
        error=max(each.error for each in readings),
        lost=max(each.lost for each in readings),
        worst=max(each.worst for each in readings),
        whole=any(each.whole for each in readings),
    )


@ambient_free
def measure(codec: Codec, x: Tensor, limit: int | None = None) -> Tensor:
    """Measure what ``codec`` does to ``x``, without a synchronization.

    Return float64 ``[7]`` on the device of ``x``: the squared 2-norms of the error and of ``x``;
    the number of non-zero values, and of those that are lost; the largest relative error of a
    block; the number of values with a fraction, and of non-zero values that could have one in their
    dtype. Blocks with a non-finite value are left out of all of these (of a codec that codes each
    value by itself: only the non-finite values).

    ``limit`` measures only that many values of a larger tensor, if the codec codes blocks
    independently.
    """
    row = x.detach().reshape(1, -1)
    blocks = isinstance(codec, (BlockCodec, CastCodec)) and codec.block <= SLICE
    block = codec.block if blocks and codec.block > 1 else BLOCK
    parts = _parts(row, block, limit) if blocks else [row]  # other codecs need all values
    wide = torch.promote_types(x.dtype, torch.float32)
    least_whole = 1 / torch.finfo(x.dtype).eps
    errors, energies, used_blocks, counts = [], [], [], []
    for part in parts:
        given, used, original = part, None, part.to(wide)
        if not _is_known_finite(original):
            finite = part.isfinite()
            used = finite if codec.block == 1 else _in_finite_blocks(finite, block)
            given = torch.where(finite, part, 0.0)
            original = torch.where(used, part, 0.0).to(wide)
        decoded = codec.decode_rows(codec.encode_rows(given), part.shape[1], x.dtype)
        lost = decoded.to(wide) - original
        if used is not None:
            lost = torch.where(used, lost, 0.0)
        size, count = original.abs(), original.count_nonzero()
        lost_count = count - (lost.abs() < size).count_nonzero()
        fraction_candidates = count - (size >= least_whole).count_nonzero()
        counts.append(
            torch.stack([count, lost_count, original.frac().count_nonzero(), fraction_candidates])
        )
        errors.append(_by_block(lost, block))
        energies.append(_by_block(original, block))
        if used is None:
            used_blocks.append(torch.tensor(-(-part.shape[1] // block)))
        else:
            used_blocks.append(_blocks(used, block).any(1).count_nonzero())
    error = torch.cat(errors).nan_to_num(math.inf, math.inf)
    energy, count = torch.cat(energies), sum(counts, counts[0] * 0)
    floor = energy.sum() / sum(used_blocks, used_blocks[0] * 0).clamp_min(1) * SMALL
    least = torch.maximum(energy, floor)
    worst = torch.where(least > 0, error / least, 0.0).amax().sqrt()
    values, lost_values, *whole = count.to(torch.float64)
    measured = torch.stack([error.sum(), energy.sum(), values, lost_values, worst, *whole])
    enough = sum(used_blocks, used_blocks[0] * 0) >= LEAST_FINITE * len(energy)
    return torch.where(enough, measured, 0.0)


def codec_of(site: PlannedSite) -> Codec:
    """Return the codec with which this rank encodes the site's input."""
    found, rank = codec(site.codec), groups.rank_in(site.group)
    return found if rank is None else found.of_rank(rank, site.group_size)


def _parts(row: Tensor, block: int, limit: int | None) -> list[Tensor]:
    """Split a row, or ``limit`` of its values, into parts of whole blocks."""
    if limit is not None and row.shape[1] > limit:
        length = max(limit // PIECES // block, 1) * block
        last = (row.shape[1] - length) // block
        starts = sorted({round(last * n / (PIECES - 1)) * block for n in range(PIECES)})
        row = torch.cat([row[:, start : start + length] for start in starts], dim=1)
    longest = SLICE_CPU if row.device.type == "cpu" else SLICE
    return list(row.split(max(longest - longest % block, block), dim=1))


def _blocks(values: Tensor, block: int, padding: float = 0) -> Tensor:
    """Return the blocks of a row ``[1, n]``; one of ``padding`` if n is 0."""
    missing = -values.shape[1] % block if values.shape[1] else block
    padded = torch.nn.functional.pad(values, (0, missing), value=padding) if missing else values
    return padded.reshape(-1, block)


def _is_known_finite(values: Tensor) -> bool:
    """Return whether all values are finite, as their sum is; False where reading it would wait for
    the computation of another device."""
    return values.device.type == "cpu" and math.isfinite(values.sum())


def _in_finite_blocks(finite: Tensor, block: int) -> Tensor:
    """Return, for each value of a row ``[1, n]``, whether its block is finite."""
    blocks = _blocks(finite, block, padding=True).all(1, keepdim=True)
    return blocks.expand(-1, block).reshape(1, -1)[:, : finite.shape[1]]


def _by_block(values: Tensor, block: int) -> Tensor:
    """Return the sums of squares, in float64, of the blocks of a row ``[1, n]``."""
    return _blocks(values, block).to(torch.float64).square().sum(1)


@dataclass
class Sampled:
    """The errors that were measured of one site on this rank.

    They are relative errors of its result, estimated from the error of what this rank encoded.
    ``why`` is the reason why nothing is measured, "" otherwise. ``bound`` is the ``max_error`` that
    applies there, and ``checked`` says that the first calls enforce it. ``reading`` is that of the
    latest call, if there was something to measure.
    """

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
        """Add a measurement. One of no finite block, or of zeros only, is only counted in
        ``unclear``."""
        reading = reading_of(found, self.site)
        if reading is None:
            self.unclear += 1
            return
        self.reading, self.last = reading, reading.error
        self.worst, self.total = max(self.worst, self.last), self.total + self.last
        self.count += 1

    def warn(self) -> None:
        """Log a warning once if the error is above the bound."""
        if self.count and self.bound is not None and self.last > self.bound and not self.warned:
            self.warned = True
            log.warning(ABOVE, label(self.site), self.site.kind, self.last, self.bound, MORE)


ABOVE = (
    "%s (%s): its real error is %.3g on this rank, above max_error=%.3g: its values are not"
    " distributed as the codec assumes. %s"
)
MORE = (
    "Give it a codec of more bits (a rule with module=...), do not compress it (keep=True), or"
    " allow more (max_error, and force=True where its values are whole numbers)"
)


PLAIN = "it is sent uncompressed"
"""Why nothing is measured of an uncompressed site."""


def label(site: PlannedSite) -> str:
    """Return a short label of a site: ``layers.0.mlp.down int8/two_shot``."""
    where = site.title
    return f"{where} {site.codec}/{site.algorithm}" if site.compressed else f"{where} uncompressed"


@dataclass
class Samples:
    """The sites of one graph, in the order of its plan, and their measured errors.

    ``share`` is the policy's ``error_sample_rate``. While ``checking``, ``CHECKED`` values of each
    site are measured as well, and the caller reports what is above its bound.
    """

    share: float
    sites: list[Sampled] = field(default_factory=list)
    calls: int = 0
    checking: bool = False
    _waiting: list[tuple[int, Tensor, Any]] = field(default_factory=list)

    def next_sink(self) -> Callable[[int, Tensor], None] | None:
        """Count a call. Return the function that receives its sites' tensors, or None if it is not
        sampled. A call on memory that nobody has written does not count."""
        sampled = any(not each.why for each in self.sites)
        if sampled and self.share and infers_shapes():
            return None
        call, self.calls = self.calls, self.calls + 1
        if not sampled:
            return None
        self.read_measured()
        if self.share and is_sampled(call, self.share):
            return self._take
        return functools.partial(self._take, limit=CHECKED) if self.checking else None

    def _take(self, number: int, x: Tensor, limit: int | None = None) -> None:
        found = measure(codec_of(self.sites[number].site), x, limit)
        event = None
        if found.is_cuda:  # read once the copy is done, so that nothing waits
            module = torch.get_device_module(found.device)
            host = torch.empty(len(found), dtype=torch.float64, pin_memory=True)
            found, event = host.copy_(found, non_blocking=True), module.Event()
            event.record()
        self._waiting.append((number, found, event))
        self.read_measured()

    def read_measured(self, *, wait: bool = False) -> None:
        """Read the measurements that have arrived, or wait for all."""
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
