"""The two ends of an edge between stages compare their plans before the first message (law 5).

Each end publishes its decision in the plan store as soon as torch has prepared its stage, and does
not wait. It reads the other end's decision before the first message of that edge. By then the other
end has published it, or does so without waiting for this one. So no cycle of waits can form.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from commpass.distributed.agreement import LONGEST_PAUSE_S, PATIENCE_S
from commpass.distributed.pairs import End, mismatches
from commpass.distributed.plan_store import ROOT, current_store
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

    def carries(self, site: str) -> bool:
        """Return whether a site, by its name, is one of its messages."""
        return site.partition(".")[0] == f"stage_{self.source}_to_{self.target}"

    def __str__(self) -> str:
        return f"what goes {self.direction} from stage {self.source} to stage {self.target}"


@dataclass(frozen=True)
class EdgeErrors:
    """What the sending end found in a step.

    ``over`` has the reasons why messages are over their budget, by site name. ``more`` says whether
    it continues to measure.
    """

    over: dict[str, str]
    more: bool


def has_other_ranks() -> bool:
    """Return whether there are other ranks. A fake group, which simulates many ranks in one, has
    none."""
    return "fake" not in dist.get_backend(dist.group.WORLD)


def publish(edge: Edge, plan: EndPlan) -> None:
    """Publish the decisions of this end."""
    _write(edge, 0, plan)


def compare(edge: Edge, own_plan: EndPlan, timeout_s: float) -> None:
    """Wait for the other end's decisions and compare them.

    Raise PlanMismatch if they differ, and Unanswered if they are not published in time.
    """
    other = msgspec.json.decode(_read(edge, 0, timeout_s), type=EndPlan)
    if found := mismatches((own_plan.ends, other.ends)):
        policies = f"policy {own_plan.policy!r} on this rank, {other.policy!r} on rank {edge.rank}"
        raise PlanMismatch(
            f"two ranks planned {edge} differently ({policies}; ranks below are those of the"
            " group):\n  " + "\n  ".join(found) + "\nGive compress_pipeline the same policy and"
            " profile on all ranks."
        )


def publish_errors(edge: Edge, step: int, found: EdgeErrors) -> None:
    """Publish which messages of a step are over their budget."""
    _write(edge, step, found)


def errors(edge: Edge, step: int, timeout_s: float) -> EdgeErrors:
    """Wait for the findings of the sending end in a step.

    Raise Unanswered if it does not publish them in time.
    """
    return msgspec.json.decode(_read(edge, step, timeout_s), type=EdgeErrors)


def _store_key(nonce: str, edge: Edge, step: int) -> str:
    return f"{ROOT}/{nonce}/{edge.key}" + (f"/errors/{step}" if step else "")


def _write(edge: Edge, step: int, value: EndPlan | EdgeErrors) -> None:
    with _raising_unanswered(edge):
        store = current_store()
        store.torch_store.set(_store_key(store.nonce, edge, step), msgspec.json.encode(value))


def _read(edge: Edge, step: int, timeout_s: float) -> bytes:
    """Return what the other end has published: its plan (step 0), or its findings in a step."""
    with _raising_unanswered(edge):
        store = current_store()
    start, warned, pause = time.monotonic(), False, 0.001
    what = f"the errors of step {step} of" if step else "how it has planned"
    while True:
        with _raising_unanswered(edge):
            nonces = store.nonces([edge.rank])
            keys = {rank: _store_key(nonce, edge, step) for rank, nonce in nonces.items()}
            if read := store.read(keys):
                return read[edge.rank]
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise Unanswered(
                f"rank {edge.rank} did not publish within {timeout_s:.0f} s {what} {edge}."
                " Call commpass.parallel.compress_pipeline for all stages of a pipeline, on all of"
                " its ranks, before the first step"
            )
        if waited > PATIENCE_S and not warned:
            warned = True
            log.warning("waiting for rank %d to publish %s %s", edge.rank, what, edge)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


@contextmanager
def _raising_unanswered(edge: Edge) -> Iterator[None]:
    """Raise Unanswered instead of an error of the store."""
    try:
        yield
    except PlanMismatch:
        raise
    except RuntimeError as error:
        raise Unanswered(
            f"the ranks could not compare how they planned {edge}: the store of torch.distributed"
            f" does not answer ({str(error).splitlines()[0]})"
        ) from error
