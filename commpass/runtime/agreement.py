"""All ranks decide alike, and prove it: plan digests are compared through the store before a compiled graph runs (law 5).

For every group that a graph uses, each rank publishes the digest of the part of its plan that the group shares; the first
rank of the group compares them and publishes the verdict, so that the store sees a few messages a rank, not their square.
A digest that a group has agreed on before is not compared again: a rank may recompile alone as long as it decides the same.
(If a pass then fails on that rank, which did not fail before, the others do not come to meet it: it raises after the time-out.)

What goes between two ranks is agreed on by those two: ``pairs``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch.distributed as dist

from commpass.errors import PlanMismatch
from commpass.groups import group_named
from commpass.plan import Plan, diff
from commpass.runtime.pairs import Pairs
from commpass.runtime.waiting import appear

GRACE_S = 5.0
"""How much longer than the time-out the others wait for the verdict of a group's first rank."""

SIZES = "ranks decided differently on an all_to_all whose splits look alike on some ranks and not on others"
"""Why nobody may carry out a plan, where the ranks cannot know that they hold different sizes."""


@dataclass(frozen=True)
class Verdict:
    """What the ranks of a group said: ranks by digest, ranks that could not carry out their plan, ranks that kept silent."""

    ranks: dict[str, list[int]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Word:
    """What a rank says of its plan. ``outline`` is its digest without what the rank may have decided by sizes of its own, and
    ``uneven`` says of each all-to-all with splits whether they look uneven from there."""

    digest: str
    outline: str
    uneven: tuple[bool, ...]
    failure: str


@dataclass
class _Meetings:
    """How often a group has met, and what it agreed on."""

    group: dist.ProcessGroup
    count: int = 0
    agreed: set[str] = field(default_factory=set)


_meetings: dict[str, _Meetings] = {}


def agree(plan: Plan, groups: Iterable[str], timeout_s: float) -> dict[int, str]:
    """Compares a plan with those of all other ranks of its groups.

    Returns the ranks that could not carry out their plan, with the reason: then nobody may. Raises PlanMismatch, within the
    time-out, if a rank planned something else or did not answer.
    """
    talking = [group for name in sorted(set(groups)) if (group := _talking(name)) is not None]
    meetings: list[_Meeting | Pairs] = [_Meeting(group, plan) for group in talking if _common(plan, str(group.group_name))]
    meetings += [Pairs(group, plan) for group in talking]
    open_meetings = [meeting for meeting in meetings if not meeting.settled]
    for meeting in open_meetings:  # everybody speaks before anybody waits
        meeting.publish()
    failures: dict[int, str] = {}
    for meeting in open_meetings:
        failures |= meeting.verdict(timeout_s)
    return failures


def _talking(name: str) -> dist.ProcessGroup | None:
    """A group whose ranks can talk: it exists here, has more than one rank, and is no fake one."""
    group = group_named(name)
    return group if group is not None and group.size() > 1 and "fake" not in dist.get_backend(group) else None


def _common(plan: Plan, group: str) -> bool:
    """Whether all ranks of a group have a part in a plan, and not two by two alone."""
    part = plan.of_group(group)
    return not part.sites or bool(part.common().sites or part.simplified)


class _Meeting:
    """One comparison of one group's part of a plan."""

    def __init__(self, group: dist.ProcessGroup, plan: Plan):
        self.name = name = str(group.group_name)
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self.store: Any = dist.distributed_c10d._get_process_group_store(group)
        self.plan = plan.of_group(name).common()
        self.digest = self.plan.digest()
        past = _meetings.get(name)
        if past is None or past.group is not group:
            past = _meetings[name] = _Meetings(group)
        self.past = past
        self.settled = not plan.fallback and self.digest in past.agreed

    def publish(self) -> None:
        self.past.count += 1
        self.prefix = f"commpass/{self.past.count}"
        uneven = tuple(site.uneven for site in self.plan if site.splits is not None)
        word = _Word(self.digest, self.plan.digest(whatever_sizes=True), uneven, self.plan.fallback)
        self.store.set(f"{self.prefix}/word/{self.rank}", msgspec.json.encode(word))

    def verdict(self, timeout_s: float) -> dict[int, str]:
        """Waits for the verdict. Returns failures; raises PlanMismatch."""
        if self.rank == self.ranks[0]:
            verdict = self._judge(timeout_s)
            self.store.set(f"{self.prefix}/verdict", msgspec.json.encode(verdict))
        elif appear(self.store, [f"{self.prefix}/verdict"], timeout_s + GRACE_S):
            verdict = msgspec.json.decode(self.store.get(f"{self.prefix}/verdict"), type=Verdict)
        else:
            verdict = Verdict(missing=[self.ranks[0]])
        if verdict.missing:
            raise PlanMismatch(self._silence(verdict.missing, timeout_s))
        if verdict.failures:
            return verdict.failures
        if len(verdict.ranks) > 1:
            raise PlanMismatch(self._difference(verdict, timeout_s))
        self.past.agreed.add(self.digest)
        return {}

    def _judge(self, timeout_s: float) -> Verdict:
        keys = {rank: f"{self.prefix}/word/{rank}" for rank in self.ranks}
        if not appear(self.store, list(keys.values()), timeout_s):
            return Verdict(missing=[rank for rank, key in keys.items() if not self.store.check([key])])
        verdict, outlines, seen = Verdict(), set(), set()
        for rank, raw in zip(self.ranks, self.store.multi_get(list(keys.values())), strict=True):
            word = msgspec.json.decode(raw, type=_Word)
            verdict.ranks.setdefault(word.digest, []).append(rank)
            outlines.add(word.outline)
            seen.add(word.uneven)
            if word.failure:
                verdict.failures[rank] = word.failure
        if len(verdict.ranks) > 1 and len(outlines) == 1 and len(seen) > 1 and not verdict.failures:
            verdict.failures.update({ranks[0]: SIZES for ranks in verdict.ranks.values()})
        return verdict

    def _silence(self, missing: list[int], timeout_s: float) -> str:
        return (
            f"rank {', '.join(map(str, missing))} of group {self.name!r} (ranks {_spans(self.ranks)}) published no plan for "
            f"this {self.plan.direction} graph within {timeout_s:g} s, but rank {self.rank} did. It compiled another graph, "
            "stopped, or needs longer: raise the time-out with commpass.backend(..., timeout=seconds). "
            f"Here the plan is:\n{_outline(self.plan)}"
        )

    def _difference(self, verdict: Verdict, timeout_s: float) -> str:
        """Each side shows its plan to the other; the message tells what differs."""
        mine = next(ranks for ranks in verdict.ranks.values() if self.rank in ranks)
        others = next(ranks for ranks in verdict.ranks.values() if self.rank not in ranks)
        if self.rank == mine[0]:
            self.store.set(f"{self.prefix}/plan/{self.rank}", self.plan.to_json())
        key = f"{self.prefix}/plan/{others[0]}"
        sides = "; ".join(f"rank {_spans(ranks)}: plan {digest}" for digest, ranks in sorted(verdict.ranks.items()))
        head = f"the ranks of group {self.name!r} planned differently for this {self.plan.direction} graph ({sides}).\n"
        if not appear(self.store, [key], timeout_s):
            return f"{head}Rank {others[0]} did not show its plan."
        theirs = Plan.from_json(self.store.get(key))
        rows = [str(d).replace("the first", f"rank {self.rank}").replace("the second", f"rank {others[0]}")
                for d in diff(self.plan, theirs)]  # fmt: skip
        policies = f"policy {self.plan.policy!r} on rank {self.rank}, {theirs.policy!r} on rank {others[0]}"
        more = [f"... and {len(rows) - 10} more"] if len(rows) > 10 else []
        return head + "\n".join([*(f"  {row}" for row in rows[:10]), *more, f"  ({policies}; profile {self.plan.profile!r} and "
                                 f"{theirs.profile!r})", "Give every rank the same policy, profile and model."])  # fmt: skip


def _spans(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in spans)


def _outline(plan: Plan, most: int = 5) -> str:
    rows = [f"  {s.name}: {s.kind} {s.dtype}{list(s.shape)} {s.codec} by {s.algorithm}" for s in plan.sites[:most]]
    return "\n".join(rows + ([f"  ... and {len(plan.sites) - most} more"] if len(plan.sites) > most else []))
