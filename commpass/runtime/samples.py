"""The real error of compressed sites, measured on some calls of a graph (``Policy(watch=...)``).

What is measured is what the codec does to this rank's own values: ``|decode(encode(x)) - x| / |x|``
of the tensor x that the site is given, in 2-norms. The plan's ``error`` and ``max_error`` are about
the result of the whole algorithm, which may encode more than once: of a Gaussian, one encode has
the error ``Codec.relative_error``, and the result the plan's ``error``. What was measured is
therefore told times the second over the first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commpass.ambient import ambient_free
from commpass.codecs import Codec, codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.cast import CastCodec
from commpass.plan import PlannedSite

log = logging.getLogger("commpass")

SLICE = 1 << 22
"""Values that are encoded at a time: what is measured needs little memory."""


def is_sampled(call: int, share: float) -> bool:
    """Whether the call of that number, from 0, is among those on which errors are measured: the
    first, and so on so that their share is right. All ranks count alike (law 5)."""
    return math.floor(call * share) > math.floor((call - 1) * share)


@ambient_free
def squares(coder: Codec, x: Tensor) -> Tensor:
    """The squared 2-norms of what ``coder`` does to ``x`` and of ``x``: float64 ``[2]`` on its
    device. Nobody waits for it."""
    row = x.detach().reshape(1, -1)
    step = max(row.shape[1], 1)  # what others choose depends on all values
    if isinstance(coder, (BlockCodec, CastCodec)) and coder.block <= SLICE:
        step = SLICE - SLICE % coder.block
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    for part in row.split(step, dim=1):
        decoded = coder.decode_rows(coder.encode_rows(part), part.shape[1], x.dtype)
        lost = decoded.to(torch.float64) - part.to(torch.float64)
        total += torch.stack([lost.square().sum(), part.to(torch.float64).square().sum()])
    return total


@dataclass
class Sampled:
    """What was measured of one site on this rank: relative errors of its result, as they would be
    with the error of what this rank encoded. ``why`` says why nothing is measured; "" otherwise.
    ``bound`` is ``max_error`` as it holds there."""

    site: PlannedSite
    bound: float | None
    why: str
    count: int = 0
    last: float = 0.0
    worst: float = 0.0
    total: float = 0.0
    unclear: int = 0
    warned: bool = False

    @property
    def mean(self) -> float | None:
        """The mean over all samples; None before the first."""
        return self.total / self.count if self.count else None

    def add(self, lost: float, had: float) -> None:
        """Takes two squared norms. What is not finite, or zero everywhere, has no relative error:
        it is counted."""
        if not (math.isfinite(lost) and math.isfinite(had) and had):
            self.unclear += 1
            return
        one = codec(self.site.codec).relative_error()
        self.last = math.sqrt(lost / had) * (self.site.error / one if one else 1.0)
        self.worst, self.total = max(self.worst, self.last), self.total + self.last
        self.count += 1
        if self.bound is not None and self.last > self.bound and not self.warned:
            self.warned = True
            log.warning(ABOVE, label(self.site), self.site.kind, self.last, self.bound, MORE)


ABOVE = (
    "%s (%s): its real error is %.3g on this rank, above max_error=%.3g: its values are not spread"
    " as the codec expects. %s"
)
MORE = (
    "Give it a codec of more bits (a rule with module=...), leave it alone (keep=True), or allow"
    " more (max_error)"
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
    is the policy's ``watch``."""

    share: float
    sites: list[Sampled] = field(default_factory=list)
    calls: int = 0
    _waiting: list[tuple[int, Tensor, Any]] = field(default_factory=list)

    def look(self) -> Callable[[int, Tensor], None] | None:
        """Counts a call. Returns what its sites are to be handed to, if it is sampled."""
        call, self.calls = self.calls, self.calls + 1
        if not self.share or not any(not each.why for each in self.sites):
            return None
        self.settle()
        return self._take if is_sampled(call, self.share) else None

    def _take(self, number: int, x: Tensor) -> None:
        found = squares(codec(self.sites[number].site.codec), x)
        event = None
        if found.is_cuda:  # read when it has come, so that nothing waits
            module = torch.get_device_module(found.device)
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            found, event = host.copy_(found, non_blocking=True), module.Event()
            event.record()
        self._waiting.append((number, found, event))
        self.settle()

    def settle(self) -> None:
        """Reads what has been measured by now."""
        waiting, self._waiting = self._waiting, []
        for number, found, event in waiting:
            if event is None or event.query():
                lost, had = found.tolist()
                self.sites[number].add(lost, had)
            else:
                self._waiting.append((number, found, event))
