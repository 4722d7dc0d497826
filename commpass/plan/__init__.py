"""Sites, plans and their JSON: what was found in a graph and what was decided about it.

A plan is data. It goes out as JSON, comes back as the same plan, and has a digest that all ranks of
a group share.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from commpass.plan.kinds import KINDS
from commpass.plan.stage import Stage

NONE = "none"
"""Codec (and algorithm) name of a site that is left alone."""


ROWS = 1024
"""Entries of the first dimension that each rank is taken to send to each where ranks may hold
different numbers: what all ranks know, so that they decide alike."""


NOBODY = "nobody keeps it here: use commpass.backend"
"""Why no state is kept for a site, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One collective of a graph with all that matters about it.

    ``group_labels`` are what users may call its group (mesh dimensions, ``world``), of which
    ``group_label`` is the first, and ``members`` the global numbers of its ranks (0, 1, ... if that
    is not known). ``shape`` is the input of one rank; a symbolic size stands there as text ("s0")
    and ``bytes`` is then what the size hints say (-1 where there is no hint); ``width`` are the
    values of one entry of the first dimension. ``stateless`` says why no state can be kept for it
    between calls, if none can, and ``fixed`` why its graph can hold no sizes that depend on
    values, if it cannot. ``splits`` are what an all-to-all sends to and receives from each
    rank, in entries of the first dimension. ``peer`` is the number of the rank at the other end of
    a send or recv, and ``tag`` tells apart what goes between the two. ``by_messages``: exchanges of
    its group go as messages between pairs of ranks. ``word`` is the nearest
    enclosing ``compress``/``keep``, as JSON text.
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
    producer: str | None = None
    consumers: tuple[str, ...] = ()
    word: str | None = None
    obstacle: str | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Everything by which a rule or a profile may mean its group."""
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
        """Whether it is one end of what goes between two ranks, which the others of the group know
        nothing of."""
        return self.kind in KINDS and KINDS[self.kind].pairwise

    @property
    def uneven(self) -> bool:
        """Whether ranks may hold tensors of different sizes. A rank without any entries knows
        nothing of the others."""
        lengths = {length for some in self.splits or () for length in some}
        return len(lengths) > 1 or lengths == {0} or any(isinstance(n, str) for n in lengths)

    @property
    def common_bytes(self) -> int:
        """``bytes``, or where ranks may hold different sizes those that all ranks take for
        theirs."""
        itemsize = {"float64": 8, "float32": 4}.get(self.dtype, 2)
        return ROWS * self.group_size * self.width * itemsize if self.uneven else self.bytes

    @property
    def common_shape(self) -> tuple[int | str, ...]:
        """The part of the shape that all ranks share."""
        return self.shape[1:] if self.splits is not None else self.shape


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One thing that may be done to a site; codec ``none`` is *leave it alone*. ``wire_bytes`` is
    what one rank hands to the collectives then (-1 where it is not known); of those, the number of
    ``dynamic_bytes`` depends on the values, and is what was measured of such, or what a Gaussian
    needs. ``domain`` is where sums
    are made, "" for the values themselves: they leave it once, at the end. ``lowering`` is what
    encode and decode become, inline or kernel, and "" where nothing is coded: it is chosen last,
    for all sites of a graph. ``error`` is the expected relative error of the result; ``stages`` are
    those of one rank, for the size that was scored. ``refused`` says why it cannot be chosen: then
    it has no score. ``note`` is what a word asked for that this one cannot have."""

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
    """A site and its chosen candidate, the reason in words, and the time of leaving it alone.
    ``exposed_us`` is how long a rank is predicted to stand still for it in the order of the graph
    that runs, ``unmoved_us`` how long in the graph's own, and ``missed`` why it still does.
    ``hidden``: it is left alone because it hides behind what is computed. ``holds`` says for which
    of its sizes that was decided, where it is another plan for others."""

    plain_us: float = 0.0
    reason: str = ""
    hidden: bool = False
    holds: str = ""
    exposed_us: float = 0.0
    unmoved_us: float = 0.0
    missed: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is left alone because a pass could not carry it out."""
        return self.reason.startswith(f"{LEFT}pass ")


LEFT = "left alone: "
"""How the reason of a site begins that was planned otherwise at first."""


def planned(site: Site, candidate: Candidate, reason: str, plain_us: float) -> PlannedSite:
    """A site with its chosen candidate."""
    of_site = {field.name: getattr(site, field.name) for field in dataclasses.fields(Site)}
    chosen = {field.name: getattr(candidate, field.name) for field in dataclasses.fields(Candidate)}
    return PlannedSite(**of_site, **chosen, reason=reason, plain_us=plain_us)


def uncompressed(site: Site, reason: str, plain_us: float = 0.0) -> PlannedSite:
    """A site with the candidate that every site has: *leave it alone*."""
    alone = Candidate(wire_bytes=site.bytes, predicted_us=plain_us)
    return planned(site, alone, reason, plain_us)


ALIKE = ("kind", "reduce_op", "group_size", "dtype", "common_shape", "module", "direction")
"""What makes two sites of two ranks, or of two compilations, the same one."""


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
"""The fields that every rank of a group must hold alike. Times may differ: links and clocks do."""


@dataclass(frozen=True, kw_only=True)
class Simplification:
    """A collective that algebra made smaller or needless: by which rule, into what, and the bytes
    one rank need not send.

    ``moved`` holds the numbers by which a result was scaled and now an input is: they must be alike
    on all ranks. ``own``: the rule found that this rank uses its own part alone; others may not.
    ``numbers`` are the places, from 0, of the site and of those that it was merged with among the
    collectives of their process groups, as the graph came.
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
    """Small sites that were fused into one: their names and modules, the name of the one, and why.

    ``numbers`` are the members' places, from 0, among the sites of their process group as they were
    before, ``bytes`` theirs, in the same order. ``gain_us`` is the predicted gain of one exchange
    instead of several, all uncompressed.
    """

    sites: tuple[str, ...]
    modules: tuple[str, ...]
    into: str
    group: str
    numbers: tuple[int, ...]
    bytes: tuple[int, ...]
    gain_us: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """A collective that is done in chunks of rows: the sites that it is split ``into``, the numbers
    of rows of the matmul before it, the nodes that are done chunk by chunk (``through``), and the
    reason."""

    site: str
    into: tuple[str, ...]
    rows: tuple[int, ...]
    through: tuple[str, ...] = ()
    group: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen candidate of every site of one graph, in graph order; the sites are those that are
    left once it is simplified, small ones are grouped, and some ``split`` into chunks of rows.

    ``fallback`` is empty when the plan was carried out, and otherwise says why the untouched graph
    was compiled. ``reordered`` are the names of the exchanges' sites in the order in which they
    start, where that is not the program's, and ``order`` says why nothing was moved, where nothing
    was. ``matched`` are the numbers of the policy's rules, from 0, that match a site as it
    was found. ``timed`` are the names of the process groups in which how much of a gradient is sent
    depends on what this rank computes.
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
        return True  # a plan without sites is a plan

    def __repr__(self) -> str:
        counts = {
            "compressed": len(self.compressed),
            "simplified": len(self.simplified),
            "grouped": len(self.grouped),
            "split": len(self.split),
        }
        said = [
            f"graph {self.graph!r}",
            self.direction,
            f"policy {self.policy!r}",
            f"profile {self.profile!r}",
            f"{len(self)} site{'s' * (len(self) != 1)}",
            *(f"{count} {what}" for what, count in counts.items() if count),
            *([f"fallback {self.fallback!r}"] if self.fallback else []),
        ]
        return f"<Plan: {', '.join(said)}>"

    @property
    def compressed(self) -> tuple[PlannedSite, ...]:
        return () if self.fallback else tuple(site for site in self.sites if site.compressed)

    def untouched(self, sites: Iterable[PlannedSite], why: str) -> Plan:
        """The plan of the same graph if nothing of it is changed, because of ``why``."""
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
        """Whether what is compiled is another graph than the one that came."""
        return not self.fallback and (self._differs or bool(self.reordered))

    @property
    def bound_groups(self) -> tuple[str, ...]:
        """The groups whose number of ranks is in what was changed: all but those of which only the
        order of collectives is another."""
        names = dict.fromkeys(site.group for site in self.sites) if self.changed else ()
        return tuple(name for name in names if self.of_group(name)._differs)

    @property
    def _differs(self) -> bool:
        return any((self.compressed, self.simplified, self.grouped, self.split))

    def of_group(self, group: str) -> Plan:
        """The part of the plan that the ranks of one group share."""
        sites = tuple(site for site in self.sites if site.group == group)
        return dataclasses.replace(
            self,
            sites=sites,
            simplified=tuple(step for step in self.simplified if step.group == group),
            grouped=tuple(each for each in self.grouped if each.group == group),
            split=tuple(each for each in self.split if each.group == group),
        )

    def common(self) -> Plan:
        """The part of the plan that all ranks hold alike: without what goes between two of them."""
        return dataclasses.replace(
            self, sites=tuple(site for site in self.sites if not site.pairwise)
        )

    def digest(self) -> str:
        """A digest of every common decision; equal on two ranks if and only if they will do the
        same."""
        rows = [[getattr(site, field) for field in AGREED_FIELDS] for site in self.common()]
        did = (self.rules(), self.groups(), self.splits(), self.starts())
        facts = [self.direction, rows, *did, bool(self.fallback)]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]

    def starts(self) -> list[int]:
        """The numbers of the sites, as they stand here, in the order in which their exchanges
        start; none where that is the program's."""
        numbers: dict[str, int] = {}
        for number, site in enumerate(self.sites):
            numbers.setdefault(site.name, number)
            numbers.setdefault(site.name.rpartition(".")[0], number)  # of a coalesced collective
        return [numbers[name] for name in self.reordered if name in numbers]

    def rules(self) -> list[str]:
        """What was simplified, as far as the ranks must do it alike."""
        return [
            ", ".join((f"{step.rule} at {' and '.join(map(str, step.numbers))}", *step.moved))
            for step in self.simplified
        ]

    def groups(self) -> list[str]:
        """Which sites were fused, by their places in their process group: as the ranks must do it
        alike."""
        return [f"sites {', '.join(map(str, each.numbers))}" for each in self.grouped]

    def splits(self) -> list[str]:
        """What was split, as far as the ranks must do it alike."""
        return [f"rows {' + '.join(map(str, each.rows))}" for each in self.split]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """The plan that ``to_json`` wrote. Raises ``msgspec.ValidationError`` or ``DecodeError``
        for anything else."""
        return msgspec.json.decode(text, type=Plan)


@dataclass(frozen=True)
class Difference:
    """One thing that two plans say differently about a site (or a site that only one of them
    has)."""

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
    """What two plans of the same graph decide differently, site by site."""
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
