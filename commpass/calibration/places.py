"""Places: the sites that a rule can tell from all others, and what was measured there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from commpass.plan import Site


@dataclass(frozen=True, order=True)
class Where:
    """What a rule can say of a site: module path, kind, direction, and a label of its group."""

    module: str
    kind: str
    direction: str
    group: str

    @staticmethod
    def of(site: Site) -> Where:
        return Where(site.module, site.kind, site.direction, site.group_label or site.group)

    def __str__(self) -> str:
        return f"{self.kind} of {self.module or 'the root module'} ({self.direction}, {self.group})"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A site of a place and how often it is carried out in a step, a mean over batches. Its name
    and neighbours in the graph are left out."""

    site: Site
    calls: float


@dataclass(frozen=True, kw_only=True)
class Place:
    """All sites of one or several ``where``s, and what was measured at them.

    ``where`` are several if simplify makes one collective of theirs, which it can only while all
    are allowed the same. ``errors`` are by codec: the relative error (2-norm) of one encode and
    decode of what is sent here, over all ranks and batches, as a root mean square.
    ``sensitivity`` is the relative change of the gradients (of inference: the outputs) for each
    unit of relative error here, ``loss`` that of the loss, both root mean squares over batches.
    """

    where: tuple[Where, ...]
    sites: tuple[Carried, ...]
    errors: dict[str, float]
    sensitivity: float
    loss: float | None = None

    @property
    def calls(self) -> float:
        """Collectives of one rank in a step."""
        return sum(each.calls for each in self.sites)

    @property
    def bytes(self) -> float:
        """Bytes that one rank hands over in a step, uncompressed."""
        return sum(each.calls * max(each.site.bytes, 0) for each in self.sites)

    @property
    def word(self) -> str:
        """What a table calls it."""
        first = self.where[0]
        more = f" and {len(self.where) - 1} more" if len(self.where) > 1 else ""
        return f"{first.module or '(root)'}{more}"


def bare(site: Site) -> Site:
    """A site without its name and neighbours: equal for all that do the same in a place."""
    return dataclasses.replace(site, name="", producer=None, consumers=())
