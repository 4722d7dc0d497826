"""What was decided about a graph: its sites with their candidates, and the other changes.

A plan is plain data. It can be written as JSON and read back unchanged, and it has a digest that is
equal on all ranks of a group.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from commpass.plan.older import plan_from_older
from commpass.plan.site import AGREED_FIELDS, PlannedSite, Site, uncompressed
from commpass.utils.html_text import summary
from commpass.utils.keywords import named_fields
from commpass.utils.printable import amount, plural

HTML_HEADER = ("collective", "module", "group", "bytes", "codec", "predicted", "reason")


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


@named_fields()
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
