"""The rules of low-bit tensor-parallel inference for one model, from what was calibrated on it.

The paper (section 3) sends the channels with the widest ranges in bf16 and all others on a static
4-bit grid, the same channels on all ranks, scales of each rank its own, in one all-gather.
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
"""What a layer may keep where ``share="sensitivity"``."""
BY_SENSITIVITY = "sensitivity"
MAX_ERROR = 0.25
"""Static grids of 4 bits without a channel that stands out have 16 %."""


class Site(Protocol):
    """What a rule says of the sites of a place."""

    @property
    def module(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def direction(self) -> str: ...
    @property
    def group(self) -> str: ...


class Place(Protocol):
    """A place of a calibration (``commpass.calibration.places.Place``)."""

    @property
    def where(self) -> Sequence[Site]: ...
    @property
    def statistics(self) -> str: ...
    @property
    def bytes(self) -> float: ...
    def change(self, error: float) -> float: ...


@dataclass(frozen=True)
class _Layer:
    """A place with its channels."""

    place: Place
    channels: Channels

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(where.module for where in self.place.where)

    def spec(self, share: float, bits: int, per_rank: bool) -> str:
        chosen = self.channels.keeping(share)
        chosen = chosen if per_rank else chosen.shared()
        return codec("outlier", statistics=chosen.to_text(), bits=bits).spec

    def change(self, share: float, bits: int) -> float:
        """The relative change of the model's outputs that is expected of it."""
        return self.place.change(codec(self.spec(share, bits, per_rank=False)).relative_error())


def lowbit_rules(
    places: Iterable[Place],
    share: float | str | Mapping[str, float],
    bits: int,
    algorithm: str | Sequence[str],
    per_rank: bool,
    max_error: float,
) -> tuple[Rule, ...]:
    """A rule for each place that sums in forward and has channels; arguments as in
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
    ways = (algorithm,) if isinstance(algorithm, str) else tuple(algorithm)
    found = [
        Rule(
            module=where.module,
            kind=where.kind,
            direction=where.direction,
            group=where.group,
            codec=layer.spec(kept, bits, per_rank),
            algorithm=ways,
            max_error=max_error,
        )
        for layer, kept in zip(layers, shares, strict=True)
        for where in layer.place.where
    ]
    return tuple(sorted(found, key=lambda rule: -str(rule.module).count(".")))


def _shares(
    layers: Sequence[_Layer], share: float | str | Mapping[str, float], bits: int
) -> list[float]:
    """The share of channels that each layer keeps."""
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
    """Shares that send no more than ``SHARE`` of all layers would, with the least expected change
    of the outputs: step by step to where a kept channel gains most (the paper's future work)."""
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
