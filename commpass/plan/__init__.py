"""Sites, plans and their JSON: what was found in a graph, and what was decided about it.

A plan is plain data. It can be written as JSON and read back unchanged, and it has a digest that is
equal on all ranks of a group.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from commpass.plan.kinds import KINDS
from commpass.plan.older import plan_from_older
from commpass.plan.stage import Stage
from commpass.utils.html_text import summary
from commpass.utils.printable import amount, plural

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


@dataclass(frozen=True, kw_only=True)
class PlannedSite(Site, Candidate):
    """A site with its chosen candidate, the reason as text, and its uncompressed time.

    ``exposed_us`` is how long a rank is predicted to wait for it in the order that runs, and
    ``unmoved_us`` in the graph's original order. ``missed`` is the reason for the remaining wait.
    ``hidden`` says that it stays uncompressed because computation overlaps it. ``holds`` names the
    sizes that the decision holds for, if another plan holds for others.
    """

    plain_us: float = 0.0
    reason: str = ""
    hidden: bool = False
    holds: str = ""
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


@dataclass(frozen=True, kw_only=True)
class Simplification:
    """A collective that an algebraic rule reduced or removed.

    ``rule`` is the rule, ``into`` the result, and ``saved_bytes`` what one rank no longer sends.
    ``moved`` holds the numbers by which an input is now scaled instead of a result; they must be
    equal on all ranks. ``own`` says that only this rank is known to use only its own part.
    ``numbers`` are the places, from 0, of the site and those merged with it among the collectives
    of their process groups, in the original graph.
    """

    rule: str
    site: str
    into: str
    saved_bytes: int
    group: str = ""
    moved: tuple[str, ...] = ()
    own: bool = False
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Small sites that were fused into one.

    ``into`` is the name of the fused site. ``numbers`` are the members' places, from 0, among the
    earlier sites of their process group, and ``bytes`` their sizes, in the same order.
    """

    sites: tuple[str, ...]
    modules: tuple[str, ...]
    into: str
    group: str
    numbers: tuple[int, ...]
    bytes: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """A collective that is carried out in chunks of rows.

    ``into`` are the resulting sites, ``rows`` the rows of the preceding matmul per chunk, and
    ``through`` the nodes that are computed chunk by chunk.
    """

    site: str
    into: tuple[str, ...]
    rows: tuple[int, ...]
    through: tuple[str, ...] = ()
    group: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen candidate of every site of one graph, in graph order.

    The sites are those after simplification, grouping of small ones, and splits into chunks of
    rows. ``fallback`` is empty if the plan was carried out, or else the reason why the untouched
    graph was compiled. ``reordered`` are the sites of the exchanges in the order of their starts,
    if it differs from the program's. ``order`` says why nothing was moved, if so. ``matched`` are
    the numbers, from 0, of the policy's rules that match a site as found. ``timed`` are the process
    groups in which gradient densities depend on this rank's computation.
    """

    graph: str
    direction: str
    policy: str
    profile: str
    sites: tuple[PlannedSite, ...] = ()
    simplified: tuple[Simplification, ...] = ()
    grouped: tuple[Grouped, ...] = ()
    split: tuple[Split, ...] = ()
    fallback: str = ""
    matched: tuple[int, ...] = ()
    reordered: tuple[str, ...] = ()
    order: str = ""
    timed: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[PlannedSite]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __bool__(self) -> bool:
        return True  # even without sites

    def __repr__(self) -> str:
        counts = {
            "compressed": len(self.compressed),
            "simplified": len(self.simplified),
            "grouped": len(self.grouped),
            "split": len(self.split),
        }
        parts = [
            f"graph {self.graph!r}",
            self.direction,
            f"policy {self.policy!r}",
            f"profile {self.profile!r}",
            plural(len(self), "site"),
            *(f"{count} {what}" for what, count in counts.items() if count),
            *([f"fallback {self.fallback!r}"] if self.fallback else []),
        ]
        return f"<Plan: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Return the plan as a table, for notebooks."""
        head = [repr(self).strip("<>"), *([self.fallback] if self.fallback else [])]
        return summary(head, HTML_HEADER, [_html_cells(site) for site in self.executed])

    def collectives(self, sites: Iterable[Site]) -> int:
        """Return how many collectives some sites of this plan are, if chunks of rows of one count
        once."""
        names = [site.name for site in sites]
        held = (sum(part in names for part in each.into) for each in self.split)
        return len(names) - sum(max(parts - 1, 0) for parts in held)

    @property
    def executed(self) -> tuple[PlannedSite, ...]:
        """The sites as they run: all uncompressed in a graph that fell back."""
        if not self.fallback:
            return self.sites
        return tuple(
            dataclasses.replace(uncompressed(s, s.reason, s.plain_us), missed=s.missed)
            for s in self.sites
        )

    @property
    def compressed(self) -> tuple[PlannedSite, ...]:
        return () if self.fallback else tuple(site for site in self.sites if site.compressed)

    def untouched(self, sites: Iterable[PlannedSite], why: str) -> Plan:
        """Return the plan of the same graph without any change. ``why`` is the reason."""
        return dataclasses.replace(
            self,
            sites=tuple(sites),
            simplified=(),
            grouped=(),
            split=(),
            reordered=(),
            timed=(),
            fallback=why,
        )

    @property
    def changed(self) -> bool:
        """Whether the compiled graph differs from the original one."""
        return not self.fallback and (self._differs or bool(self.reordered))

    @property
    def bound_groups(self) -> tuple[str, ...]:
        """The groups whose size is built into the changed graph: all except those with only a
        changed order of collectives."""
        names = dict.fromkeys(site.group for site in self.sites) if self.changed else ()
        return tuple(name for name in names if self.of_group(name)._differs)

    @property
    def _differs(self) -> bool:
        return any((self.compressed, self.simplified, self.grouped, self.split))

    def of_group(self, group: str) -> Plan:
        """Return the part of the plan that the ranks of one group share."""
        sites = tuple(site for site in self.sites if site.group == group)
        return dataclasses.replace(
            self,
            sites=sites,
            simplified=tuple(step for step in self.simplified if step.group == group),
            grouped=tuple(each for each in self.grouped if each.group == group),
            split=tuple(each for each in self.split if each.group == group),
        )

    def common(self) -> Plan:
        """Return the part of the plan that is equal on all ranks: without messages between
        pairs."""
        return dataclasses.replace(
            self, sites=tuple(site for site in self.sites if not site.pairwise)
        )

    def digest(self) -> str:
        """Return a digest of every common decision. It is equal on two ranks if and only if they
        will do the same."""
        rows = [[getattr(site, field) for field in AGREED_FIELDS] for site in self.common()]
        did = (self.rules(), self.groups(), self.splits(), self.starts())
        facts = [self.direction, rows, *did, bool(self.fallback)]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]

    def starts(self) -> list[int]:
        """Return the numbers of the sites in the order in which their exchanges start; empty for
        the program's order."""
        numbers: dict[str, int] = {}
        for number, site in enumerate(self.sites):
            numbers.setdefault(site.name, number)
            numbers.setdefault(site.name.rpartition(".")[0], number)  # a coalesced collective
        return [numbers[name] for name in self.reordered if name in numbers]

    def rules(self) -> list[str]:
        """Return the simplifications, as far as the ranks must apply the same ones."""
        return [
            ", ".join((f"{step.rule} at {' and '.join(map(str, step.numbers))}", *step.moved))
            for step in self.simplified
        ]

    def groups(self) -> list[str]:
        """Return which sites were fused, by their places in their process group. This must be equal
        on all ranks."""
        return [f"sites {', '.join(map(str, each.numbers))}" for each in self.grouped]

    def splits(self) -> list[str]:
        """Return the splits, as far as the ranks must apply the same ones."""
        return [f"rows {' + '.join(map(str, each.rows))}" for each in self.split]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Parse the output of ``to_json``, also of older versions.

        Raises ``msgspec.ValidationError`` or ``DecodeError`` for other text.
        """
        return msgspec.convert(plan_from_older(msgspec.json.decode(text)), Plan)


HTML_HEADER = ("collective", "module", "group", "bytes", "codec", "predicted", "reason")


def _html_cells(site: PlannedSite) -> tuple[str, ...]:
    coded = site.compressed
    return (
        f"{site.kind} ({site.reduce_op})" if site.reduce_op else site.kind,
        site.module or site.name,
        f"{site.group_label or site.group}/{site.group_size}",
        f"{amount(site.bytes)} -> {amount(site.wire_bytes)}" if coded else amount(site.bytes),
        f"{site.codec} by {site.algorithm}" if coded else "uncompressed",
        f"{site.plain_us:,.0f} -> {site.predicted_us:,.0f} us",
        site.reason,
    )


@dataclass(frozen=True)
class Difference:
    """One difference between two plans of a site, or a site that only one of them has."""

    site: str
    field: str
    left: Any
    right: Any

    def __str__(self) -> str:
        if self.field == "site":
            return (
                f"{self.site}: {'only in the second' if self.left is None else 'only in the first'}"
            )
        return (
            f"{self.site}: {self.field} is {self.left!r} in the first and {self.right!r} in the"
            " second"
        )


def diff(first: Plan, right: Plan, fields: Iterable[str] = AGREED_FIELDS) -> list[Difference]:
    """Return the differences between two plans of the same graph, site by site."""
    fields = tuple(fields)
    found = []
    lefts, rights = ({site.name: site for site in plan.sites} for plan in (first, right))
    for name in dict.fromkeys((*lefts, *rights)):
        a, b = lefts.get(name), rights.get(name)
        if a is None or b is None:
            found.append(Difference(name, "site", a and a.kind, b and b.kind))
            continue
        found += [
            Difference(name, field, getattr(a, field), getattr(b, field))
            for field in fields
            if getattr(a, field) != getattr(b, field)
        ]
    if first.direction != right.direction:
        found.append(Difference("(graph)", "direction", first.direction, right.direction))
    if not found and [*lefts] != [*rights]:
        found.append(Difference("(graph)", "order", ", ".join(lefts), ", ".join(rights)))
    if first.rules() != right.rules():
        found.append(
            Difference("(graph)", "simplified", "; ".join(first.rules()), "; ".join(right.rules()))
        )
    if first.splits() != right.splits():
        found.append(
            Difference("(graph)", "split", "; ".join(first.splits()), "; ".join(right.splits()))
        )
    if first.starts() != right.starts():
        orders = [", ".join(plan.reordered) or "the program's" for plan in (first, right)]
        found.append(Difference("(graph)", "order of exchanges", *orders))
    if first.groups() != right.groups():
        found.append(
            Difference("(graph)", "grouped", "; ".join(first.groups()), "; ".join(right.groups()))
        )
    if bool(first.fallback) != bool(right.fallback):
        found.append(Difference("(graph)", "fallback", first.fallback, right.fallback))
    return found
