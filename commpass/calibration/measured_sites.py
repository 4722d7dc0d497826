"""Sites that a rule can distinguish from all others (a *place*), and what was measured there."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from commpass.distributed.samples import Reading
from commpass.plan import Site

NO_EFFECT = 1e-6
"""A relative change of the gradients, or outputs, that is no larger is taken for noise: kernels
that add in another order in each run change them as much."""


@dataclass(frozen=True, order=True)
class Address:
    """The facts of a site that a rule can match: module path, kind, direction, and a label of its
    group."""

    module: str
    kind: str
    direction: str
    group: str

    @staticmethod
    def of(site: Site) -> Address:
        return Address(site.module, site.kind, site.direction, site.group_label or site.group)

    def __str__(self) -> str:
        return f"{self.kind} of {self.module or 'the root module'} ({self.direction}, {self.group})"


@dataclass(frozen=True, kw_only=True)
class CountedSite:
    """A site of a place and its mean number of executions in a step.

    Its name and neighbours in the graph are left out.
    """

    site: Site
    calls: float


@dataclass(frozen=True, kw_only=True)
class ErrorLevel:
    """The effect of an error of one size.

    ``error`` is the relative error that ``codec`` made at a place. ``sensitivity`` is the relative
    change of the gradients (of inference: the outputs) for each unit of it. Both are root mean
    squares over batches.
    """

    codec: str
    error: float
    sensitivity: float


@dataclass(frozen=True, kw_only=True)
class MeasuredSites:
    """All sites of one or several ``where``s, and what was measured at them.

    - ``where``: several, if simplify merges their collectives into one. It can only do that while
      the same is allowed for all of them.
    - ``errors``: by codec, the relative error (2-norm) of one encode and decode of what is sent
      here. It is a root mean square over all ranks and batches. It is 0 for a lossless codec, which
      is named with the measured bits of a value.
    - ``statistics``: the ranges of the channels on each rank of the group, with no channel kept
      yet, as ``Channels.to_text`` writes them; "" if tensors do not have the same channels.
    - ``levels``: by ascending error; none if only lossless codecs were requested.
    - ``loss``: the relative change of the loss for each unit of the least of those errors.
    - ``peaks``: by lossy codec, the largest readings of one call on one rank, of one encode. The
      error check of compiled graphs takes such readings.
    """

    where: tuple[Address, ...]
    sites: tuple[CountedSite, ...]
    errors: dict[str, float]
    levels: tuple[ErrorLevel, ...]
    loss: float | None = None
    statistics: str = ""
    peaks: dict[str, Reading] = field(default_factory=dict)

    @property
    def sensitivity(self) -> float:
        """The sensitivity to the least error; 0 if there is none."""
        return self.levels[0].sensitivity if self.levels else 0.0

    @property
    def without_effect(self) -> bool:
        """Whether no error here changed anything: the budget does not limit such a place.

        Its values reach no parameter whose gradient is measured, or they are all 0. False if only
        lossless codecs were requested.
        """
        return bool(self.levels) and not any(
            each.error * each.sensitivity > NO_EFFECT for each in self.levels
        )

    def no_effect_remark(self, of: str) -> str:
        """Return what a user should know of a place ``without_effect``; ``of`` is that of the
        calibration."""
        if any(each.error for each in self.levels):
            why = f"no error there changes the {of}"
        else:
            why = "all values there are 0"
        more = f" and {len(self.where) - 1} more" if len(self.where) > 1 else ""
        return (
            f"only lossless codecs: {self.where[0]}{more}: {why}, so the budget does not limit it"
        )

    def change(self, error: float) -> float:
        """Return the relative change that an error here causes.

        Sensitivities between two levels are interpolated over the logarithm of the error. Beyond
        the levels they are those of the nearest.
        """
        known = [each for each in self.levels if each.error > 0]
        below = [each for each in known if each.error <= error][-1:] or known[:1]
        above = [each for each in known if each.error > error][:1] or known[-1:]
        if not known or not error:
            return 0.0
        low, high = below[0], above[0]
        if high.error <= low.error:
            return error * low.sensitivity
        share = math.log(error / low.error) / math.log(high.error / low.error)
        return error * (low.sensitivity + share * (high.sensitivity - low.sensitivity))

    @property
    def calls(self) -> float:
        """Collectives of one rank in a step."""
        return sum(each.calls for each in self.sites)

    @property
    def bytes(self) -> float:
        """Bytes that one rank hands over in a step, uncompressed."""
        return sum(each.calls * max(each.site.bytes, 0) for each in self.sites)

    @property
    def label(self) -> str:
        """The name of the place in a table."""
        first = self.where[0]
        more = f" and {len(self.where) - 1} more" if len(self.where) > 1 else ""
        return f"{first.module or '(root)'}{more}"


def without_name(site: Site) -> Site:
    """Return a site without its name: equal for all that do the same in a place."""
    return dataclasses.replace(site, name="")
