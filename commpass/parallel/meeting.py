"""Wait until all ranks make the same call, before the exchanges of that call."""

from __future__ import annotations

import math
import weakref
from collections import Counter

import torch.distributed as dist

from commpass.distributed.plan_store import current_store
from commpass.distributed.waiting import listed, published_by_all
from commpass.errors import Unanswered
from commpass.groups import timeout_of
from commpass.utils.printable import plural

_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def wait_for_calls(group: dist.ProcessGroup, call: str) -> None:
    """Wait until all ranks of a group make a call, such as ``"compress_ddp"``.

    An exchange would wait for the time-out of the group if a rank is missing. Raise Unanswered with
    the error of another rank's call as soon as it is known, or with the missing ranks after the
    time-out.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or "fake" in dist.get_backend():
        return
    counts = _counts.setdefault(group, Counter())
    key = f"call/{call}/{group.group_name}/{counts[call]}"
    patience_s = timeout_of(group) or math.inf
    try:
        store = current_store()
        store.publish(key, b"")
        found = published_by_all(store, key, ranks, patience_s, f"call {call}")
    except dist.DistError as error:
        raise Unanswered(
            f"rank {dist.get_rank()} called {call}, but the store of torch.distributed does not"
            f" answer ({str(error).splitlines()[0]}). If the call failed on the rank that holds the"
            " store, usually rank 0, its error has the reason"
        ) from error
    if missing := [rank for rank in ranks if rank not in found]:
        raise Unanswered(
            f"{plural(len(missing), 'rank')} ({listed(missing)}) did not call {call} within"
            f" {patience_s:g} s. All ranks of {group.group_name!r} must make the same call. If it"
            " failed on one of them, its error has the reason"
        )
    counts[call] += 1  # only now, since a call that failed on another rank was not counted there
