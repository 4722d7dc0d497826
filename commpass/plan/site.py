"""Sites of a graph, the candidates for carrying them out, and the chosen one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from commpass.plan.kinds import KINDS
from commpass.plan.stage import Stage
from commpass.utils.keywords import named_fields

SINGLE_KERNEL = "single_kernel"
"""The lowering of a site whose whole algorithm, with its exchanges, is one kernel."""
NONE = "none"
"""The codec (and algorithm) name of an uncompressed site."""

ROWS = 1024
"""Entries of the first dimension that each rank is assumed to send to each if ranks may hold
different numbers.

All ranks know this number, so they decide alike.
"""

NOBODY = "nobody keeps it here: use commpass.backend"
"""The default reason why no state is kept for a site."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One collective of a graph, with everything that decisions depend on.

    - ``group_labels``: what users may call its group (mesh dimensions, ``world``); ``group_label``
      is the first one.
    - ``members``: the global numbers of its ranks (0, 1, ... if unknown).
    - ``shape``: the input of one rank, with symbolic sizes as text ("s0").
    - ``bytes``: the size of the input, by hints if symbolic; -1 without a hint.
    - ``width``: the number of values in one entry of the first dimension.
    - ``stateless``: why no state can be kept for it between calls, if so.
    - ``fixed``: why its graph cannot hold value-dependent sizes, if so.
    - ``splits``: what an all_to_all sends to and receives from each rank, in entries of the first
      dimension.
    - ``peer``: the rank at the other end of a send or recv; ``tag`` distinguishes messages between
      the two.
    - ``by_messages``: whether exchanges of its group are sent as messages between pairs of ranks.
    - ``annotation``: the nearest enclosing ``compress`` or ``keep``, as JSON text.
    - ``label``: what reports call it if its module's path says too little: the parameters of a
      bucket, or the root of a sharded model.
    """

    name: str
    kind: str
    reduce_op: str | None = None
    group: str
    group_label: str = ""
    group_labels: tuple[str, ...] = ()
    group_size: int
    members: tuple[int, ...] = ()
    dtype: str
    shape: tuple[int | str, ...]
    bytes: int
    width: int = 1
    splits: tuple[tuple[int | str, ...], tuple[int | str, ...]] | None = None
    peer: int | None = None
    tag: int = 0
    by_messages: bool = False
    stateless: str | None = NOBODY
    fixed: str | None = None
    device: str = "cpu"
    module: str = ""
    direction: str = "forward"
    annotation: str | None = None
    unsupported_reason: str | None = None
    label: str = ""

    @property
    def title(self) -> str:
        """What reports call it: its label, the path of its module, or its name."""
        return self.label or self.module or self.name

    @property
    def labels(self) -> tuple[str, ...]:
        """The names by which a rule or a profile may refer to its group."""
        return tuple(
            dict.fromkeys(
                text for text in (self.group_label, *self.group_labels, self.group) if text
            )
        )

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The global numbers of its group's ranks, as far as known."""
        return self.members or tuple(range(self.group_size))

    @property
    def dynamic(self) -> bool:
        return any(isinstance(size, str) for size in self.shape)

    @property
    def pairwise(self) -> bool:
        """Whether it is one end of a message between two ranks, of which the other ranks of the
        group know nothing."""
        return self.kind in KINDS and KINDS[self.kind].pairwise

    @property
    def uneven(self) -> bool:
        """Whether ranks may hold tensors of different sizes. A rank without entries does not know
        the sizes of the others."""
        lengths = {length for some in self.splits or () for length in some}
        return len(lengths) > 1 or lengths == {0} or any(isinstance(n, str) for n in lengths)

    @property
    def common_bytes(self) -> int:
        """``bytes``, or an estimate that is equal on all ranks if they may hold different sizes."""
        itemsize = {"float64": 8, "float32": 4}.get(self.dtype, 2)
        return ROWS * self.group_size * self.width * itemsize if self.uneven else self.bytes

    @property
    def common_shape(self) -> tuple[int | str, ...]:
        """The part of the shape that is equal on all ranks."""
        return self.shape[1:] if self.splits is not None else self.shape


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to carry out a site. Codec ``none`` leaves it uncompressed.

    - ``wire_bytes``: what one rank hands to the collectives; -1 if unknown.
    - ``dynamic_bytes``: the value-dependent part of it, as measured, or as a Gaussian needs.
    - ``domain``: where sums are computed, "" for the values themselves; results leave it once, at
      the end.
    - ``lowering``: what encode and decode become, inline or kernel; "" without a codec. It is
      chosen last, for all sites of a graph, except single_kernel, which has other stages.
    - ``error``: the expected relative error of the result.
    - ``stages``: those of one rank, for the size that the time was predicted for.
    - ``refused``: why it cannot be chosen. Then it has no predicted time.
    - ``note``: a requested setting that does not apply to it.
    """

    codec: str = NONE
    algorithm: str = NONE
    chunks: int = 1
    fused: bool = False
    lowering: str = ""
    wire_bytes: int = 0
    dynamic_bytes: int = 0
    domain: str = ""
    predicted_us: float = 0.0
    error: float = 0.0
    stages: tuple[Stage, ...] = ()
    refused: str = ""
    note: str = ""

    @property
    def compressed(self) -> bool:
        return self.codec != NONE


@named_fields()
@dataclass(frozen=True, kw_only=True)
class PlannedSite(Site, Candidate):
    """A site with its chosen candidate, the reason as text, and its uncompressed time.

    ``exposed_us`` is how long a rank is predicted to wait for it in the order that runs, and
    ``unmoved_us`` in the graph's original order. ``missed`` is the reason for the remaining wait.
    ``hidden`` says that it stays uncompressed because computation overlaps it. ``holds`` names the
    sizes that the decision holds for, if another plan holds for others. ``own_stream`` says that
    its single kernel runs beside computation, in a separate stream.
    """

    plain_us: float = 0.0
    reason: str = ""
    hidden: bool = False
    holds: str = ""
    own_stream: bool = False
    exposed_us: float = 0.0
    unmoved_us: float = 0.0
    missed: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is uncompressed because a pass could not carry it out."""
        return self.reason.startswith((f"{UNCOMPRESSED}pass ", f"{OLD_UNCOMPRESSED}pass "))


UNCOMPRESSED = "uncompressed: "
"""The prefix of the reason of a site that was first planned otherwise."""
OLD_UNCOMPRESSED = "left alone: "
"""The same, in dumps of older versions."""


def planned(site: Site, candidate: Candidate, reason: str, plain_us: float) -> PlannedSite:
    """Return a site with its chosen candidate."""
    of_site = {field.name: getattr(site, field.name) for field in dataclasses.fields(Site)}
    chosen = {field.name: getattr(candidate, field.name) for field in dataclasses.fields(Candidate)}
    return PlannedSite(**of_site, **chosen, reason=reason, plain_us=plain_us)


def uncompressed(site: Site, reason: str, plain_us: float = 0.0) -> PlannedSite:
    """Return a site with its uncompressed candidate, which every site has."""
    alone = Candidate(wire_bytes=site.bytes, predicted_us=plain_us)
    return planned(site, alone, reason, plain_us)


ALIKE = ("kind", "reduce_op", "group_size", "dtype", "common_shape", "module", "direction")
"""The fields that identify a site across ranks and compilations."""

AGREED_FIELDS = (
    "kind",
    "reduce_op",
    "group_size",
    "dtype",
    "common_shape",
    "module",
    "direction",
    "codec",
    "algorithm",
    "chunks",
    "fused",
    "lowering",
)
"""The fields that must be equal on every rank of a group. Times may differ, because links and
clocks do."""
