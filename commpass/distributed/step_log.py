"""What the backends of this process have compiled, with what was measured of it since."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from commpass.distributed.samples import PLAIN, Sampled, Samples
from commpass.distributed.watch import Watched
from commpass.plan import Plan


@dataclass(frozen=True)
class Entry:
    """One graph: its plan, its samples, and its times where they are taken."""

    plan: Plan
    samples: Samples
    watched: Watched | None


@dataclass
class StepLog:
    """The graphs of one backend or door, in the order in which they were compiled. ``past`` are
    plans that others took the place of."""

    policy: str
    entries: list[Entry] = field(default_factory=list)
    past: list[Plan] = field(default_factory=list)
    _current: dict[tuple[str, str], Plan] = field(default_factory=dict)

    def add(self, plan: Plan, why: str, instead_of: Plan | None = None) -> None:
        """As ``put``, exchanges of which nothing is measured, and why."""
        sites = [Sampled(site, None, why if site.compressed else PLAIN) for site in plan.sites]
        self.put(Entry(plan, Samples(0.0, sites), None), instead_of)

    def put(self, entry: Entry, instead_of: Plan | None = None) -> None:
        """Adds a graph, or puts it in the place of the one that had this plan."""
        self._current[entry.plan.graph, entry.plan.direction] = entry.plan
        places = [n for n, each in enumerate(self.entries) if each.plan is instead_of]
        if places:
            self.past.append(self.entries[places[0]].plan)
            self.entries[places[0]] = entry
        else:
            self.entries.append(entry)

    def current(self, plan: Plan) -> Plan:
        """The plan that a graph has now, which had this one: another where it was compiled
        again."""
        return self._current.get((plan.graph, plan.direction), plan)

    def replace(self, plan: Plan, why: str) -> None:
        """As ``add``, in the place of all there was."""
        self.retire()
        self.add(plan, why)

    def retire(self) -> None:
        """From now on all graphs are past: none of them is called again."""
        self.past += [entry.plan for entry in self.entries]
        self.entries.clear()
        self._current.clear()

    @property
    def sampled(self) -> list[Sampled]:
        """All sites of which something was measured."""
        found = []
        for entry in self.entries:
            entry.samples.read_measured()
            found += [each for each in entry.samples.sites if each.count]
        return found

    def facts(self) -> str:
        """For a line of the log: bytes and errors."""
        sites = [(entry.plan, site) for entry in self.entries for site in entry.plan.sites]
        before = sum(max(site.bytes, 0) for _, site in sites)
        after = sum(max(s.bytes if plan.fallback else s.wire_bytes, 0) for plan, s in sites)
        said = f"; {before:,} bytes -> {after:,} handed to collectives" if sites else ""
        if worst := max(self.sampled, key=lambda each: each.worst, default=None):
            bound = f" (max_error={worst.bound:.3g})" if worst.bound is not None else ""
            said += f"; real error at most {worst.worst:.3g} of {worst.site.error:.3g}{bound}"
        return said


_ledgers: list[weakref.ref[StepLog]] = []


def opened(policy: str) -> StepLog:
    """The step_log of a new backend, which goes with it."""
    made = StepLog(policy)
    _ledgers[:] = [each for each in _ledgers if each() is not None]
    _ledgers.append(weakref.ref(made))
    return made


def step_logs() -> list[StepLog]:
    """Those of all backends that there are, oldest first."""
    return [found for each in _ledgers if (found := each()) is not None]
