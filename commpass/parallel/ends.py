"""The two ends of an edge between stages compare their plans before the first message (law 5).

Each end publishes its decision in the plan store as soon as torch has prepared its stage, and does
not wait. It reads the other end's decision before the first message of that edge. By then the other
end has published it, or does so without waiting for this one. So no cycle of waits can form.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from commpass.distributed.agreement import LONGEST_PAUSE_S, PATIENCE_S
from commpass.distributed.pairs import End, mismatches
from commpass.distributed.plan_store import ROOT, board
from commpass.errors import PlanMismatch, Unanswered

log = logging.getLogger("commpass")


@dataclass(frozen=True)
class EndPlan:
    """The decisions of one end of an edge: its policy, and each of its messages."""

    policy: str
    ends: tuple[End, ...]


@dataclass(frozen=True)
class Edge:
    """The messages in one direction between two stages.

    ``key`` is the same at both ends, and changes each time that torch prepares the stages. ``rank``
    is the global number of the rank at the other end.
    """

    key: str
    source: int
    target: int
    direction: str
    rank: int

    def __str__(self) -> str:
        return f"what goes {self.direction} from stage {self.source} to stage {self.target}"


@dataclass(frozen=True)
class Found:
    """What the sending end found in a step.

    ``over`` has the reasons why messages are over their budget, by site name. ``more`` says whether
    it continues to measure.
    """

    over: dict[str, str]
    more: bool


def answers() -> bool:
    """Return whether there are other ranks. A fake group, which simulates many ranks in one, has
    none."""
    return "fake" not in dist.get_backend(dist.group.WORLD)


def publish(edge: Edge, plan: EndPlan) -> None:
    """Publish the decisions of this end."""
    try:
        here = board()
        here.store.set(f"{ROOT}/{here.nonce}/{edge.key}", msgspec.json.encode(plan))
    except RuntimeError as error:
        raise _unreachable(edge, error) from error


def compare(edge: Edge, own_plan: EndPlan, timeout_s: float) -> None:
    """Wait for the other end's decisions and compare them.

    Raise PlanMismatch if they differ, and Unanswered if they are not published in time.
    """
    try:
        other = _received(edge, timeout_s)
    except RuntimeError as error:
        if isinstance(error, PlanMismatch):
            raise
        raise _unreachable(edge, error) from error
    if found := mismatches((own_plan.ends, other.ends)):
        policies = f"policy {own_plan.policy!r} on this rank, {other.policy!r} on rank {edge.rank}"
        raise PlanMismatch(
            f"two ranks planned {edge} differently ({policies}; ranks below are those of the"
            " group):\n  " + "\n  ".join(found) + "\nGive compress_pipeline the same policy and"
            " profile on all ranks."
        )


def publish_errors(edge: Edge, step: int, found: Found) -> None:
    """Publish which messages of a step are over their budget."""
    try:
        here = board()
        here.store.set(_place(here.nonce, edge, step), msgspec.json.encode(found))
    except RuntimeError as error:
        raise _unreachable(edge, error) from error


def errors(edge: Edge, step: int, timeout_s: float) -> Found:
    """Wait for the findings of the sending end in a step.

    Raise Unanswered if it does not publish them in time.
    """
    try:
        raw = _read(edge, step, timeout_s)
    except RuntimeError as error:
        if isinstance(error, PlanMismatch):
            raise
        raise _unreachable(edge, error) from error
    return msgspec.json.decode(raw, type=Found)


def of_edge(edge: Edge, by_site: Mapping[str, str]) -> dict[str, str]:
    """Return the entries that belong to an edge, by the names of its sites."""
    name = f"stage_{edge.source}_to_{edge.target}"
    return {site: each for site, each in by_site.items() if site.partition(".")[0] == name}


def _place(nonce: str, edge: Edge, step: int) -> str:
    return f"{ROOT}/{nonce}/{edge.key}" + (f"/errors/{step}" if step else "")


def _received(edge: Edge, timeout_s: float) -> EndPlan:
    return msgspec.json.decode(_read(edge, 0, timeout_s), type=EndPlan)


def _read(edge: Edge, step: int, timeout_s: float) -> bytes:
    """Return what the other end has published: its plan (step 0), or its findings in a step."""
    here, start, told, pause = board(), time.monotonic(), False, 0.001
    what = f"the errors of step {step} of" if step else "how it has planned"
    while True:
        nonces = here.nonces([edge.rank])
        places = {rank: _place(nonce, edge, step) for rank, nonce in nonces.items()}
        if read := here.read(places):
            return read[edge.rank]
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise Unanswered(
                f"rank {edge.rank} did not publish within {timeout_s:.0f} s {what} {edge}."
                " Call commpass.parallel.compress_pipeline for all stages of a pipeline, on all of"
                " its ranks, before the first step"
            )
        if waited > PATIENCE_S and not told:
            told = True
            log.warning("waiting for rank %d to publish %s %s", edge.rank, what, edge)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _unreachable(edge: Edge, error: RuntimeError) -> Unanswered:
    return Unanswered(
        f"the ranks could not compare how they planned {edge}: the store of torch.distributed does"
        f" not answer ({str(error).splitlines()[0]})"
    )


def ends_of(every: Sequence[End], source: int, target: int) -> tuple[End, ...]:
    """Return the ends that belong to an edge, by the names of their sites."""
    name = f"stage_{source}_to_{target}"
    return tuple(end for end in every if end.name.partition(".")[0] == name)
