"""Wait until all ranks have published a value."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from commpass.distributed.plan_store import PlanStore
from commpass.distributed.refusal import check_refusals
from commpass.utils.printable import plural

log = logging.getLogger("commpass")
QUIET_S = 15.0
"""Seconds after which a rank reports that it waits."""


def published_by_all(
    store: PlanStore, key: str, ranks: Sequence[int], patience_s: float, purpose: str
) -> dict[int, bytes]:
    """Return what ranks have published under a key: of all, or of those that have after
    ``patience_s`` seconds. ``purpose`` is what they are awaited for.

    Raise Unanswered if the call of another rank failed.
    """
    found: dict[int, bytes] = {}
    start, pause, is_quiet = time.monotonic(), 0.001, True
    while True:
        missing = [rank for rank in ranks if rank not in found]
        found |= store.read_published(key, missing)
        waited = time.monotonic() - start
        if len(found) == len(ranks) or waited > patience_s:
            return found
        check_refusals()
        if is_quiet and waited > QUIET_S:
            is_quiet = False
            log.info("commpass waits for %s, to %s", plural(len(missing), "rank"), purpose)
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def listed(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text, of many the first eight."""
    return ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
