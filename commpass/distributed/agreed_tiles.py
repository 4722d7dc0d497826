"""Tile sizes of kernels: one rank of a group times them, and all ranks of the group use its result.

The result is written to the store by compare-and-set, under a key of the rank that times. A rank
that waits in vain writes that nothing was timed. Whichever is written first counts for all ranks.
So no rank waits for one that failed, and a late result does not differ from what others use.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from commpass.distributed import compile_progress
from commpass.distributed.plan_store import PlanStore, Round
from commpass.lowering.timed import Timed

LONGEST_PAUSE_S = 0.25


@dataclass(frozen=True)
class TileSizes:
    """The results of one rank, by the identity of a kernel call. ``failure`` is why there are none,
    if so."""

    found: dict[str, Timed] = field(default_factory=dict)
    failure: str = ""


def publish(store: PlanStore, round: Round, sizes: TileSizes) -> TileSizes:
    """Publish what this rank has timed for the graph of a round. Return what all ranks use."""
    return _first(store, round, store.rank, sizes)


def receive(
    store: PlanStore, round: Round, owner: int, patience_s: float, start: float
) -> TileSizes:
    """Return what rank ``owner`` has timed for the graph of a round.

    If it has published nothing ``patience_s`` seconds after ``start`` (``time.monotonic``), nothing
    is timed for any rank.
    """
    pause = 0.001
    compile_progress.stage(f"waits for rank {owner}, which times tile sizes of kernels")
    while not (read := store.read_published(_key(round), [owner])):
        if time.monotonic() - start > patience_s:
            why = f"rank {owner} published no tile sizes within {patience_s:g} s"
            return _first(store, round, owner, TileSizes(failure=why))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return msgspec.json.decode(read[owner], type=TileSizes)


def _first(store: PlanStore, round: Round, owner: int, sizes: TileSizes) -> TileSizes:
    text = msgspec.json.encode(sizes).decode()
    return msgspec.json.decode(store.agree_on_first(_key(round), text, owner), type=TileSizes)


def _key(round: Round) -> str:
    return f"tile-sizes/{round.name}"
