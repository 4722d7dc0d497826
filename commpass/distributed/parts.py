"""The parts of a plan: for each group, and each pair of ranks, what its ranks must do alike."""

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
"""What is decided of sites that are alike and not treated alike."""


SIDE = "/"
"""Between what a site is known by and the sizes that its plan is for."""


def may_match(one: str, second: str) -> bool:
    """Whether two of ``keys_of`` or of ``sites`` may be those of one site, at a size that both
    plans are for."""
    (a, _, here), (b, _, there) = one.partition(SIDE), second.partition(SIDE)
    return a == b and (here == there or not here or not there)


@dataclass(frozen=True)
class Part:
    """One group's part of a graph's plan, or that of two ranks between which something goes.

    ``where`` is what all its ranks call it; ``key`` that and the policy, as each is compared with
    its like alone. ``ranks`` are global ones. ``first`` are the collectives as they came, ``plan``
    what becomes of them.
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
        """Whether anything is decided by what this rank computes: what hides behind it and is left
        alone, or how much of a gradient is sent."""
        decided = bool(self.plan.timed) or any(site.hidden for site in self.plan.sites)
        return decided and not self.plan.fallback

    @property
    def failure(self) -> str:
        """Why nothing is changed, where that was not the policy's wish."""
        failed = dict.fromkeys(site.reason for site in self.plan.sites if site.failed)
        return self.plan.fallback or ("" if self.changed else "; ".join(failed))

    @property
    def uses_local_part(self) -> bool:
        """Whether anything is not sent because this rank uses its own part alone."""
        return any(step.own for step in self.plan.simplified)

    @cached_property
    def digest(self) -> str:
        """Of what is changed, alike on all ranks that change the same; "" where nothing is."""
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
        """``digest``; NONE where nothing is changed, since it is hidden."""
        return self.digest or NONE

    @cached_property
    def outline(self) -> str:
        """Of the collectives as they came: ranks that compile the same graph have the same."""
        if self.pair:
            rank = self.group.rank()
            rows: list[Any] = [row[:2] for row in _numbered(self.first, rank)]
        else:
            rows = [[getattr(site, name) for name in ALIKE] for site in self.first]
        return _digest([self.plan.direction, rows])

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """What each site is told by, on whichever rank and in whichever graph it is."""
        ids = {_digest(_facts(site))[:8] + self._side(site) for site in self.first}
        return tuple(sorted(ids)) or (ANY,)

    @cached_property
    def order(self) -> str:
        """A digest of the order in which exchanges start; "" where that is the program's."""
        starts = self.plan.starts()
        return _digest(starts) if starts and not self.plan.fallback else ""

    def decisions(self) -> dict[str, str]:
        """What is done with each site as it came, by each of its ``keys_of``."""
        planned = {site.name: site for site in self.plan.sites}
        merged = {step.site: ", ".join((step.rule, *step.moved)) for step in self.plan.simplified}
        merged |= {name: "grouped" for each in self.plan.grouped for name in each.sites}
        merged |= dict(
            zip((each.site for each in self.plan.split), self.plan.splits(), strict=True)
        )
        found: dict[str, str] = {}
        for site in self.first:
            said = merged.get(site.name, NONE)
            if (chosen := planned.get(site.name)) is not None and chosen.compressed:
                said = f"{chosen.codec} by {chosen.algorithm} in {chosen.chunks}"
            said += f", starts {self.order}" if self.order else ""
            for key in self.keys_of(site):
                found[key] = said if found.get(key, said) == said else SEVERAL
        return found

    def keys_of(self, site: Site) -> tuple[str, ...]:
        """What a site is known by, the surest first: with its module, where that is known, and
        without, since a graph break may hide it."""
        facts, side = _facts(site), self._side(site)
        full = [_digest([*facts, site.module]) + side] if site.module else []
        return (*full, _digest(facts) + side)

    def _side(self, site: Site) -> str:
        """For which of a site's sizes the plan is; "" for all, and where no plan was made."""
        holds = self._holds.get(site.name)
        return f"{SIDE}{holds}" if holds else ""

    @cached_property
    def _holds(self) -> dict[str, str]:
        return {site.name: site.holds for site in self.plan.sites}


def parts(
    plan: Plan, first: Iterable[Site], ends: Iterable[tuple[str, int | None]], policy: str = ""
) -> list[Part]:
    """The parts of a plan whose ranks can talk, under a policy of this digest.

    ``ends`` are the (group, peer) of all collectives of the graph, peer None where all of the group
    take part: known also where a pass failed before there were sites.
    """
    sites = tuple(first)
    simplified = {step.site: step.group for step in plan.simplified}
    every = {(site.group, site.peer) for site in (*sites, *plan.sites)} | set(ends)
    every |= {(group, None) for group in simplified.values()}
    found = []
    for name, peer in sorted(every, key=lambda end: (end[0], -1 if end[1] is None else end[1])):
        group = _talking(name)
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
    """The call for which a part is compiled; "" for what goes between two ranks, since each of them
    may run other code."""
    return "" if part.pair else participant.call


def _talking(name: str) -> Any:
    """A group whose ranks can talk: it exists here, has more than one rank, and is no fake one."""
    group = group_named(name)
    if group is None or group.size() < 2 or group.rank() < 0 or "fake" in dist.get_backend(group):
        return None
    return group


def can_compare(name: str) -> bool:
    """Whether the ranks of a group can compare plans."""
    return _talking(name) is not None


def _numbered(sites: Sequence[Site], rank: int) -> list[tuple[tuple[int, int, int], int, Site]]:
    """(channel, the how many-th on it, site) of the ends of messages, channel by channel."""
    seen: dict[tuple[int, int, int], int] = {}
    rows = []
    for site in sites:
        channel = channel_of(site, rank)
        rows.append((channel, seen.get(channel, 0), site))
        seen[channel] = seen.get(channel, 0) + 1
    return sorted(rows, key=lambda row: row[:2])


def _facts(site: Site) -> list[Any]:
    """What tells a site, wherever it is compiled: not by its module, which a graph break hides. Of
    a message what both ends say alike: its shape may be another one at the other."""
    other = ("module", "kind", "common_shape") if site.pairwise else ("module",)
    names = [name for name in ALIKE if name not in other]
    return [*(getattr(site, name) for name in names), site.tag]


def _digest(facts: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]
