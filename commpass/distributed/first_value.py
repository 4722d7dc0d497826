"""Determine one value from what every rank has published, equally on all ranks.

The first result counts for all ranks, even one after a time-out: it is written to the store by
compare-and-set, under a key of rank 0. A rank that waits in vain for rank 0 itself has no such key.
It then publishes that it uses the value for missing ranks. Whoever writes the result later reads
that first, and writes the same value.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from commpass.distributed.plan_store import PlanStore
from commpass.distributed.refusal import check_refusals

T = TypeVar("T")
log = logging.getLogger("commpass")
LONGEST_PAUSE_S = 0.25


def first_value(
    store: PlanStore,
    key: str,
    published: Callable[[Sequence[int]], Mapping[int, T]],
    value: Callable[[Mapping[int, T]], str],
    *,
    without_rank_0: str,
    patience_s: float,
    silent: str,
) -> str:
    """Return the value that the first rank has computed.

    ``published`` returns what ranks have published so far, and ``value`` computes the value from
    that. ``without_rank_0`` is the value if rank 0 publishes nothing within ``patience_s`` seconds.
    ``silent`` is the warning if any rank does not: a format for the number of ranks and seconds.
    Raise Unanswered if a rank that is awaited could not make a backend.
    """
    ranks = range(dist.get_world_size())
    start, pause, found = time.monotonic(), 0.001, dict[int, T]()
    while True:
        found.update(published([rank for rank in ranks if rank not in found]))
        if len(found) == len(ranks):
            break
        if decided := store.read_published(key, [0]):
            return decided[0].decode()
        if time.monotonic() - start > patience_s:
            log.warning(silent, len(ranks) - len(found), patience_s)
            break
        check_refusals()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S * (1 + len(ranks) / 256))
    if 0 not in found:
        store.publish(f"{key}/alone", without_rank_0.encode())
        if 0 not in published([0]):
            return without_rank_0
    alone = store.read_published(f"{key}/alone", ranks)
    return store.agree_on_first(key, without_rank_0 if alone else value(found))
