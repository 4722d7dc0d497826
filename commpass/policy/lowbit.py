"""The rules of low-bit tensor-parallel inference for one model, from its calibration.

The paper (section 3) sends the channels with the widest ranges in bf16 and all others on a static
4-bit grid. The channels are the same on all ranks, the scales are local to each rank, and one
all-gather carries both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from commpass.codecs import codec
from commpass.codecs.wrappers.outlier import Channels
from commpass.errors import PolicyError, nearest
from commpass.policy.rules import Rule
from commpass.utils.globs import covers

SHARE = 1 / 64
SHARES = (0.0, 1 / 128, 1 / 64, 1 / 32, 1 / 16)
"""The shares of channels that a layer may keep if ``share="sensitivity"``."""
BY_SENSITIVITY = "sensitivity"
MAX_ERROR = 0.25
"""Static 4-bit grids have an error of 16 % on channels without outliers."""


class Site(Protocol):
    """The fields by which a rule addresses calibrated sites."""

    @property
    def module(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def direction(self) -> str: ...
    @property
    def group(self) -> str: ...


class CalibratedSites(Protocol):
    """The properties needed of ``commpass.calibration.MeasuredSites``."""

    @property
    def where(self) -> Sequence[Site]: ...
    @property
    def statistics(self) -> str: ...
    @property
    def bytes(self) -> float: ...
    def change(self, error: float) -> float: ...


@dataclass(frozen=True)
class _Layer:
    """Calibrated sites with their channels."""

    place: CalibratedSites
    channels: Channels

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(where.module for where in self.place.where)

    def spec(self, share: float, bits: int, per_rank: bool) -> str:
        chosen = self.channels.keeping(share)
        chosen = chosen if per_rank else chosen.shared()
        return codec("outlier", statistics=chosen.to_text(), bits=bits).spec

    def change(self, share: float, bits: int) -> float:
        """Return the expected relative change of the model's outputs."""
        return self.place.change(codec(self.spec(share, bits, per_rank=False)).relative_error())


def lowbit_rules(
    places: Iterable[CalibratedSites],
    share: float | str | Mapping[str, float],
    bits: int,
    algorithm: str | Sequence[str],
    per_rank: bool,
    max_error: float,
) -> tuple[Rule, ...]:
    """Return a rule for each place that sums in forward and has channels. Arguments are as in
    ``Policy.lowbit_tp``."""
    layers = [
        _Layer(place, Channels.from_text(place.statistics))
        for place in places
        if place.statistics
        and all(each.kind == "all_reduce" and each.direction == "forward" for each in place.where)
    ]
    if not layers:
        raise PolicyError(
            "lowbit_tp: the calibration has no all_reduce of forward whose tensors have channels."
            " Calibrate inference (train=False) with outliers=True"
        )
    shares = _shares(layers, share, bits)
    algorithms = (algorithm,) if isinstance(algorithm, str) else tuple(algorithm)
    found = [
        Rule(
            module=where.module,
            kind=where.kind,
            direction=where.direction,
            group=where.group,
            codec=layer.spec(kept, bits, per_rank),
            algorithm=algorithms,
            max_error=max_error,
        )
        for layer, kept in zip(layers, shares, strict=True)
        for where in layer.place.where
    ]
    return tuple(sorted(found, key=lambda rule: -str(rule.module).count(".")))


def _shares(
    layers: Sequence[_Layer], share: float | str | Mapping[str, float], bits: int
) -> list[float]:
    """Return the share of channels that each layer keeps."""
    if isinstance(share, str):
        if share != BY_SENSITIVITY:
            raise PolicyError(f"share={share!r}{nearest(share, [BY_SENSITIVITY])} Or a number.")
        return _by_sensitivity(layers, bits)
    if not isinstance(share, Mapping):
        return [share] * len(layers)
    for glob in share:
        if not any(covers(glob, name) for layer in layers for name in layer.names):
            known = [name for layer in layers for name in layer.names]
            raise PolicyError(f"share: no layer is called {glob!r}{nearest(glob, known)}")
    return [
        next((share[glob] for glob in share for name in layer.names if covers(glob, name)), SHARE)
        for layer in layers
    ]


def _by_sensitivity(layers: Sequence[_Layer], bits: int) -> list[float]:
    """Return shares with the least expected output change that send no more than ``SHARE`` in all
    layers would.

    Greedy: each step adds channels where they gain most per byte (the paper's future work).
    """
    changes = [[layer.change(share, bits) ** 2 for share in SHARES] for layer in layers]
    sent = [layer.place.bytes for layer in layers]
    left, chosen = SHARE * math.fsum(sent), [0] * len(layers)
    while True:
        gains = [
            ((changes[at][now] - changes[at][step]) / cost, at, step, cost)
            for at, now in enumerate(chosen)
            for step in range(now + 1, len(SHARES))
            if 0 < (cost := (SHARES[step] - SHARES[now]) * sent[at]) <= left
            and changes[at][step] < changes[at][now]
        ]
        if not gains:
            return [SHARES[step] for step in chosen]
        _, at, step, cost = max(gains, key=lambda each: (each[0], -each[1]))
        chosen[at], left = step, left - cost
