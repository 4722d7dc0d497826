"""Places: the sites that a rule can tell from all others, and what was measured there."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from commpass.plan import Site


@dataclass(frozen=True, order=True)
class Address:
    """What a rule can say of a site: module path, kind, direction, and a label of its group."""

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
class Carried:
    """A site of a place and how often it is carried out in a step, a mean over batches. Its name
    and neighbours in the graph are left out."""

    site: Site
    calls: float


@dataclass(frozen=True, kw_only=True)
class Level:
    """What an error of one size does: ``error`` is the relative error that ``codec`` made at a
    place, ``sensitivity`` the relative change of the gradients (of inference: the outputs) for each
    unit of it, both root mean squares over batches."""

    codec: str
    error: float
    sensitivity: float


@dataclass(frozen=True, kw_only=True)
class Place:
    """All sites of one or several ``where``s, and what was measured at them.

    ``where`` are several if simplify makes one collective of theirs, which it can only while all
    are allowed the same. ``errors`` are by codec: the relative error (2-norm) of one encode and
    decode of what is sent here, over all ranks and batches, as a root mean square; 0 for a codec
    that loses nothing, which is named with the bits that a value was measured to take.
    ``statistics`` are the ranges of the channels on each rank of the group, with no channel kept
    yet, as ``Channels.to_text`` writes them; "" where tensors do not have the same channels.
    ``levels`` are by ascending error; none where no codec that loses something was asked for.
    ``loss`` is the relative change of the loss for each unit of the least of those errors.
    """

    where: tuple[Address, ...]
    sites: tuple[Carried, ...]
    errors: dict[str, float]
    levels: tuple[Level, ...]
    loss: float | None = None
    statistics: str = ""

    @property
    def sensitivity(self) -> float:
        """That of the least error; 0 where none was made."""
        return self.levels[0].sensitivity if self.levels else 0.0

    def change(self, error: float) -> float:
        """The relative change that an error here makes. Sensitivities between two levels are
        interpolated over the logarithm of the error; beyond them they are those of the nearest."""
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
        """What a table calls it."""
        first = self.where[0]
        more = f" and {len(self.where) - 1} more" if len(self.where) > 1 else ""
        return f"{first.module or '(root)'}{more}"


def bare(site: Site) -> Site:
    """A site without its name and neighbours: equal for all that do the same in a place."""
    return dataclasses.replace(site, name="", producer=None, consumers=())
