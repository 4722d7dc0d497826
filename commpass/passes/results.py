"""What single passes hand on to later passes and to the backend, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import constants
from commpass.passes.references import Source
from commpass.plan import Candidate, PlannedSite, Split

Known = Mapping[tuple[Any, ...], bool]
"""Whether a site stayed uncompressed because it is overlapped, by ``facts_of`` the site."""


Densities = Mapping[tuple[Any, ...], float]
"""The share of its entries that a site sends, by ``hidden.facts_of`` the site and its number among
equal sites."""


@dataclass(frozen=True)
class DecidedDensities:
    """The decided densities ``by_site``, and the names of the process ``groups`` in which they
    depend on this rank's computation."""

    by_site: dict[tuple[Any, ...], float] = field(default_factory=dict)
    groups: tuple[str, ...] = ()


@dataclass
class Chunked:
    """The splits that were made, and why others were not, by site name.

    ``refused`` has sites that an annotation, a rule or the cost model wanted to split.
    """

    splits: list[Split] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def with_reason(self, site: PlannedSite) -> PlannedSite:
        """Return a planned site with the refused split added to its reason."""
        why = self.refused.get(site.name)
        return site if why is None else replace(site, reason=f"{site.reason}; {why}")


@dataclass(frozen=True)
class Options:
    """The candidates of a site, the uncompressed one first.

    If ``unsupported_reason`` is set, no codec and no algorithm can compress the site.
    """

    candidates: tuple[Candidate, ...]
    unsupported_reason: str = ""

    @property
    def uncompressed(self) -> Candidate:
        """The uncompressed candidate."""
        return self.candidates[0]

    @cached_property
    def possible(self) -> tuple[Candidate, ...]:
        """The compressing candidates that are not refused."""
        return tuple(each for each in self.candidates[1:] if not each.refused)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why candidates are refused, each reason once.

        For a codec over the error budget, only the reason of its algorithm with the smallest error
        is listed.
        """
        losses = [each for each in self.candidates if each.refused and each.error]
        by_error = sorted(losses, key=lambda each: each.error)
        least = {each.codec: each for each in reversed(by_error)}
        refused = [each for each in self.candidates if each.refused]
        listed = [each for each in refused if not each.error or least[each.codec] is each]
        return tuple(dict.fromkeys(each.refused for each in listed))


@dataclass(frozen=True)
class Limit:
    """The plan holds while a site has at least ``least`` bytes if ``above``, else while it has
    fewer."""

    nbytes: torch.SymInt
    least: int
    above: bool

    @property
    def key(self) -> str:
        """A text that is equal on all ranks and in all graphs, independent of symbol names."""
        return f"from {self.least:,} bytes on" if self.above else f"below {self.least:,} bytes"

    def install_guard(self) -> None:
        """Install a guard for this limit on the compiled code, unless it has one already."""
        if bool(self.nbytes >= self.least) != self.above:
            raise AssertionError(f"{self.nbytes} >= {self.least} is not as it was planned")


@dataclass(frozen=True)
class StateInput:
    """State that a site keeps between calls: an additional last input of its graph.

    ``place`` is its permanent name: module, direction, kind, dtype and shape. ``number`` counts
    equal places in a graph. ``reaches`` lists the graph outputs that depend on the site. State of
    an all_gather is the gathered result, equal on all ranks. ``source`` computes its initial value,
    the gathered tensor, and ``parameters`` are the numbers of the parameters in it.
    """

    place: str
    number: int
    reaches: tuple[int, ...]
    op: str
    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    fake: Tensor
    source: Source | None = None
    parameters: tuple[int, ...] = ()


@dataclass(frozen=True)
class ConstantInput:
    """A constant that a graph takes as one of its last inputs."""

    name: str
    device: torch.device
    fake: Tensor

    def tensor(self) -> Tensor:
        """Return its values: one read-only tensor for all graphs of the process."""
        return constants.on_device(self.name, self.device)


@dataclass(frozen=True)
class EncodedValue:
    """What a site encodes.

    Either the fake value itself, or those of the operands from which a ``product`` of
    ``lowering.matmul`` computes and encodes it.
    """

    values: tuple[Tensor, ...]
    product: str = ""


@dataclass(frozen=True)
class Moved:
    """The result of reordering a graph.

    - ``reordered``: the sites of the exchanges in the order of their starts, if it differs from the
      program's.
    - ``exposed_us``: how long a rank is predicted to wait for each site.
    - ``original_us``: the same for the graph's original order.
    - ``missed``: why the rank still waits, by site.
    - ``pinned``: whether work overlaps an exchange, so that the order must be kept.
    - ``why``: why nothing was moved, or "".
    """

    exposed_us: dict[str, float] = field(default_factory=dict)
    original_us: dict[str, float] = field(default_factory=dict)
    reordered: tuple[str, ...] = ()
    pinned: bool = False
    why: str = ""
    missed: dict[str, str] = field(default_factory=dict)
