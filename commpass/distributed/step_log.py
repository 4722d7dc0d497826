"""The graphs that the backends of this process have compiled, with what was measured of them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from commpass.distributed.samples import PLAIN, Sampled, Samples
from commpass.distributed.step_timer import TimedGraph
from commpass.plan import Plan
from commpass.plan.totals import totals


@dataclass(frozen=True)
class Entry:
    """One graph: its plan, its samples, its times if it is timed, and the profile in words."""

    plan: Plan
    samples: Samples
    timed: TimedGraph | None
    profile: str = ""


@dataclass
class StepLog:
    """The graphs of one backend or integration, in the order of compilation.

    ``past`` are plans that were replaced.
    """

    policy: str
    entries: list[Entry] = field(default_factory=list)
    past: list[Plan] = field(default_factory=list)
    _current: dict[tuple[str, str], Plan] = field(default_factory=dict)

    def add(self, plan: Plan, why: str, instead_of: Plan | None = None) -> None:
        """Add exchanges of which nothing is measured, and the reason ``why``. See ``put``."""
        sites = [Sampled(site, None, why if site.compressed else PLAIN) for site in plan.sites]
        self.put(Entry(plan, Samples(0.0, sites), None), instead_of)

    def put(self, entry: Entry, instead_of: Plan | None = None) -> None:
        """Add a graph, or replace the one that had the plan ``instead_of``."""
        self._current[entry.plan.graph, entry.plan.direction] = entry.plan
        places = [n for n, each in enumerate(self.entries) if each.plan is instead_of]
        if places:
            self.past.append(self.entries[places[0]].plan)
            self.entries[places[0]] = entry
        else:
            self.entries.append(entry)

    def current(self, plan: Plan) -> Plan:
        """Return the current plan of the graph that had this plan: another if it was compiled
        again."""
        return self._current.get((plan.graph, plan.direction), plan)

    def replace(self, plan: Plan, why: str) -> None:
        """Add a plan as ``add`` does, in place of all current ones."""
        self.retire()
        self.add(plan, why)

    def retire(self) -> None:
        """Move all graphs to ``past``: none of them is called again."""
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
        """Return bytes and errors as text for a log line."""
        sums = totals(entry.plan for entry in self.entries)
        sizes = f"; {sums.bytes:,} bytes -> {sums.wire_bytes:,} handed to collectives"
        text = sizes if sums.sites else ""
        if worst := max(self.sampled, key=lambda each: each.worst, default=None):
            bound = f" (max_error={worst.bound:.3g})" if worst.bound is not None else ""
            text += f"; real error at most {worst.worst:.3g} of {worst.site.error:.3g}{bound}"
        return text


_step_logs: list[weakref.ref[StepLog]] = []


def open_log(policy: str) -> StepLog:
    """Return the step log of a new backend. It lives as long as that backend."""
    step_log = StepLog(policy)
    _step_logs[:] = [each for each in _step_logs if each() is not None]
    _step_logs.append(weakref.ref(step_log))
    return step_log


def step_logs() -> list[StepLog]:
    """Return the step logs of all living backends, oldest first."""
    return [found for each in _step_logs if (found := each()) is not None]
