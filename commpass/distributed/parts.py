"""Split a plan into parts: the changes that the ranks of a group, or a pair of ranks, compare."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch.distributed as dist

from commpass.distributed.pairs import channel_of, terms
from commpass.distributed.plan_store import ANY, Participant, spans
from commpass.groups import group_named
from commpass.plan import ALIKE, NONE, Plan, PlannedSite, Site

SEVERAL = "several"
"""The decision for sites that have equal keys and different decisions."""


SIDE = "/"
"""Separates the key of a site from the sizes that its plan is for."""


def may_match(key: str, second: str) -> bool:
    """Return whether two of ``keys_of`` or of ``sites`` may be one site, at a size that both plans
    cover."""
    (a, _, side), (b, _, second_side) = key.partition(SIDE), second.partition(SIDE)
    return a == b and (side == second_side or not side or not second_side)


@dataclass(frozen=True)
class Part:
    """One group's part of a graph's plan, or that of two ranks that exchange messages.

    ``where`` is the name that all its ranks share. ``key`` adds the policy, since only parts under
    the same policy are compared. ``ranks`` are global. ``first`` are the collectives before any
    change, ``plan`` what becomes of them.
    """

    where: str
    key: str
    group: Any
    ranks: tuple[int, ...]
    pair: bool
    first: tuple[Site, ...]
    plan: Plan

    @property
    def changed(self) -> bool:
        return self.plan.changed

    @property
    def hidden_sites(self) -> bool:
        """Whether anything is decided by what this rank computes.

        That is a site that is left uncompressed because compute overlaps it, or how much of a
        gradient is sent.
        """
        decided = bool(self.plan.timed) or any(site.hidden for site in self.plan.sites)
        return decided and not self.plan.fallback

    @property
    def failure(self) -> str:
        """Why nothing is changed, if the policy did not request that."""
        failed = dict.fromkeys(site.reason for site in self.plan.sites if site.failed)
        return self.plan.fallback or ("" if self.changed else "; ".join(failed))

    @property
    def uses_local_part(self) -> bool:
        """Whether anything is not sent because this rank uses only its own part."""
        return any(step.own for step in self.plan.simplified)

    @cached_property
    def digest(self) -> str:
        """The digest of the changes, equal on all ranks with the same changes; "" if there are
        none."""
        if not self.changed:
            return ""
        if not self.pair:
            return self.plan.digest()
        rank = self.group.rank()
        rows = [
            (channel, number, *map(str, terms(site).values()))
            for channel, number, site in _numbered(self.plan.sites, rank)
            if isinstance(site, PlannedSite) and site.compressed
        ]
        return _digest([self.plan.direction, rows])

    @property
    def reused_digest(self) -> str:
        """``digest``; NONE if nothing is changed because compute overlaps it."""
        return self.digest or NONE

    @cached_property
    def outline(self) -> str:
        """A digest of the collectives before any change: equal on ranks that compile the same
        graph."""
        if self.pair:
            rank = self.group.rank()
            rows: list[Any] = [row[:2] for row in _numbered(self.first, rank)]
        else:
            rows = [[getattr(site, name) for name in ALIKE] for site in self.first]
        return _digest([self.plan.direction, rows])

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """The identifier of each site, independent of rank and graph."""
        ids = {_digest(_facts(site))[:8] + self._side(site) for site in self.first}
        return tuple(sorted(ids)) or (ANY,)

    @cached_property
    def order(self) -> str:
        """A digest of the order in which exchanges start; "" if it is the program's."""
        starts = self.plan.starts()
        return _digest(starts) if starts and not self.plan.fallback else ""

    def decisions(self) -> dict[str, str]:
        """Return the decision for each original site, under each of its ``keys_of``."""
        planned = {site.name: site for site in self.plan.sites}
        merged = {step.site: ", ".join((step.rule, *step.moved)) for step in self.plan.simplified}
        merged |= {name: "grouped" for each in self.plan.grouped for name in each.sites}
        merged |= dict(
            zip((each.site for each in self.plan.split), self.plan.splits(), strict=True)
        )
        found: dict[str, str] = {}
        for site in self.first:
            decision = merged.get(site.name, NONE)
            if (chosen := planned.get(site.name)) is not None and chosen.compressed:
                decision = f"{chosen.codec} by {chosen.algorithm} in {chosen.chunks}"
            decision += f", starts {self.order}" if self.order else ""
            for key in self.keys_of(site):
                found[key] = decision if found.get(key, decision) == decision else SEVERAL
        return found

    def keys_of(self, site: Site) -> tuple[str, ...]:
        """Return the keys of a site, the most specific first.

        The first includes its module, if that is known. The last does not, since a graph break may
        hide it.
        """
        facts, side = _facts(site), self._side(site)
        full = [_digest([*facts, site.module]) + side] if site.module else []
        return (*full, _digest(facts) + side)

    def _side(self, site: Site) -> str:
        """Return the sizes of a site that the plan is for; "" for all sizes, and if no plan was
        made."""
        holds = self._holds.get(site.name)
        return f"{SIDE}{holds}" if holds else ""

    @cached_property
    def _holds(self) -> dict[str, str]:
        return {site.name: site.holds for site in self.plan.sites}


def parts(
    plan: Plan, first: Iterable[Site], ends: Iterable[tuple[str, int | None]], policy: str = ""
) -> list[Part]:
    """Return the parts of a plan whose ranks can compare, under a policy of this digest.

    ``ends`` are the (group, peer) of all collectives of the graph; peer is None if the whole group
    takes part. They are known even if a pass failed before sites were found.
    """
    sites = tuple(first)
    simplified = {step.site: step.group for step in plan.simplified}
    every = {(site.group, site.peer) for site in (*sites, *plan.sites)} | set(ends)
    every |= {(group, None) for group in simplified.values()}
    found = []
    for name, peer in sorted(every, key=lambda end: (end[0], -1 if end[1] is None else end[1])):
        group = _comparable_group(name)
        if group is None or peer == group.rank():
            continue
        ranks = tuple(dist.get_process_group_ranks(group))
        where = f"{name}@{spans(ranks)}"
        if peer is not None:
            low, high = sorted((group.rank(), peer))
            where, ranks = f"{where}/pair/{low}-{high}", tuple(sorted((ranks[low], ranks[high])))
        mine = tuple(site for site in sites if (site.group, site.peer) == (name, peer))
        steps = plan.simplified if peer is None else ()
        grouped = plan.grouped if peer is None else ()
        part = dataclasses.replace(
            plan,
            sites=tuple(site for site in plan.sites if (site.group, site.peer) == (name, peer)),
            simplified=tuple(step for step in steps if step.group == name),
            split=tuple(each for each in plan.split if peer is None and each.group == name),
            reordered=plan.reordered if peer is None else (),
            timed=tuple(each for each in plan.timed if peer is None and each == name),
            grouped=tuple(each for each in grouped if each.group == name),
        )
        found.append(Part(where, f"{where}~{policy}", group, ranks, peer is not None, mine, part))
    return found


def call_of(part: Part, participant: Participant) -> str:
    """Return the call for which a part is compiled.

    It is "" for messages between two ranks, since each of them may run other code.
    """
    return "" if part.pair else participant.call


def _comparable_group(name: str) -> Any:
    """Return the group if its ranks can compare: it exists here, has several ranks, and is not
    fake."""
    group = group_named(name)
    if group is None or group.size() < 2 or group.rank() < 0 or "fake" in dist.get_backend(group):
        return None
    return group


def can_compare(name: str) -> bool:
    """Return whether the ranks of a group can compare plans."""
    return _comparable_group(name) is not None


def _numbered(sites: Sequence[Site], rank: int) -> list[tuple[tuple[int, int, int], int, Site]]:
    """Return (channel, index on the channel, site) of the ends of messages, sorted by channel."""
    seen: dict[tuple[int, int, int], int] = {}
    rows = []
    for site in sites:
        channel = channel_of(site, rank)
        rows.append((channel, seen.get(channel, 0), site))
        seen[channel] = seen.get(channel, 0) + 1
    return sorted(rows, key=lambda row: row[:2])


def _facts(site: Site) -> list[Any]:
    """Return the facts that identify a site wherever it is compiled.

    The module is left out because a graph break hides it. For a message, only facts that both ends
    share count: its shape may differ at the other end.
    """
    other = ("module", "kind", "common_shape") if site.pairwise else ("module",)
    names = [name for name in ALIKE if name not in other]
    return [*(getattr(site, name) for name in names), site.tag]


def _digest(facts: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]
