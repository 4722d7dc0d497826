"""The records of one graph: its plan for reports, its traces and its dump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commpass.backend.shared import Job, Shared
from commpass.distributed import record
from commpass.distributed.owners import INFERENCE
from commpass.distributed.uncompressed import uncompressed_sites
from commpass.groups import is_first_rank
from commpass.passes import PASSES, PassContext
from commpass.passes.timeline import timeline
from commpass.plan import Plan
from commpass.policy import Policy

NAMES = [step.name for step in PASSES]
TEXTS = {NAMES[0], *(step.name for step in PASSES if step.mutates)}
"""The passes after which a dump has the graph as text: the first, which changes nothing, and those
that may change it."""


def record_plan(
    shared: Shared,
    outcome: PassContext,
    job: Job,
    instead_of: Plan | None,
    *,
    summed: bool = True,
) -> None:
    """Record a plan for reports. It replaces ``instead_of`` if there is one. Unless it is
    ``summed``, the summary leaves it out."""
    record.record(outcome, instead_of)
    if not summed:
        return
    shared.summary.add(
        outcome.plan,
        trained=job.stateless != INFERENCE,
        profile=job.profile.description,
        instead_of=instead_of,
        sites=uncompressed_sites(outcome, shared.policy, job.profile) if is_first_rank() else (),
    )


class GraphDump:
    """Collects what the dump of one graph holds, on the rank that writes it."""

    def __init__(self, folder: Path | None, run: str, policy: Policy):
        self.run, self.policy = run, policy
        self.folder = folder if is_first_rank() else None
        self.nodes: dict[str, Any] = {}
        self.passes: dict[str, str] = {}
        self.latest = ""

    def on_pass_end(self, step: str, context: PassContext) -> None:
        """Keep the graph of codec operators, and the text of each graph that a pass has changed.

        The single exchange of a hook has no texts, because there may be hundreds of them.
        """
        if self.folder is None:
            return
        if step == "rewrite":
            self.nodes["after"] = record.nodes_now(context.gm, context.plan.sites)
        if context.input.hook or step not in TEXTS:
            return
        if step == NAMES[0]:  # of another round
            self.passes, self.latest = {}, ""
        text = context.gm.print_readable(print_output=False)
        if text != self.latest:
            ms = context.times_ms[step]
            self.passes[f"{NAMES.index(step):02d}-{step}"] = f"# {step} took {ms:.1f} ms\n{text}\n"
            self.latest = text

    def write(self, outcome: PassContext) -> None:
        """Write the dump of a graph that is about to be compiled."""
        if self.folder is None:
            return
        gm, profile, nodes = outcome.gm, outcome.input.profile, self.nodes
        nodes["before"] = record.nodes_before(outcome)
        nodes["lowered"] = record.nodes_now(gm, outcome.plan.sites)
        if outcome.plan.fallback:
            nodes["after"] = nodes["lowered"]
        times = timeline(gm, outcome, profile)
        record.write_dump(
            self.folder, self.run, outcome, times, self.policy, profile, nodes, self.passes
        )
