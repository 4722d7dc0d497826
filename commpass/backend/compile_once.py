"""Let one rank of a host compile a graph, while the others wait for the result in Inductor's cache.

Ranks mostly compile equal graphs at the same time. Without this, each of them does all the work,
and they share the processors of the host.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from commpass.distributed import compile_progress

log = logging.getLogger("commpass")

PATIENCE_S = 300.0
"""Seconds after which a rank stops waiting and compiles by itself."""
STAGE = "another rank of this host compiles the same graph"
_failures: list[str] = []
"""Why this process no longer waits for others, if so."""


@contextmanager
def compiled_once(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Wait until no other process of this host compiles an equal graph. The body compiles it.

    A rank that waited, and then did not find the graph in the cache, no longer waits for others.
    """
    if _failures or not _cache_is_shared():
        yield
        return
    from filelock import FileLock, Timeout
    from torch._dynamo.utils import counters
    from torch._inductor.codecache import get_lock_dir

    lock, waited = None, False
    try:
        folder = Path(get_lock_dir())
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"commpass_{_digest(gm, inputs)}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waited = True
            compile_progress.stage(STAGE)
            lock.acquire(timeout=PATIENCE_S)
    except (Timeout, OSError, NotImplementedError) as error:
        _stop_waiting(f"{type(error).__name__}: {error}")
    hits = counters["inductor"]["fxgraph_cache_hit"]
    try:
        yield
    finally:
        if lock is not None:
            lock.release()  # does nothing if it was not acquired
    if waited and counters["inductor"]["fxgraph_cache_hit"] == hits:
        _stop_waiting("the graph of another rank was not found in Inductor's cache")


def _stop_waiting(why: str) -> None:
    _failures.append(why)
    log.info("each rank compiles its graphs by itself from now on: %s", why)


def _cache_is_shared() -> bool:
    """Whether Inductor keeps graphs on disk, and no part of its compile awaits other ranks."""
    config = torch._inductor.config
    talks = (
        getattr(config, "distributed_max_autotune_gemm", False),
        getattr(config.aten_distributed_optimizations, "enable_overlap_scheduling", False),
        getattr(getattr(config, "_collective", None), "auto_select", False),
    )
    return config.fx_graph_cache and not config.force_disable_caches and not any(talks)


def _digest(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return a digest of the code and of the forms of the inputs: it is equal for equal graphs, and
    need not differ for all others."""
    forms = [
        (str(each.dtype), each.device.type, str(tuple(each.shape)))
        for each in inputs
        if isinstance(each, Tensor)
    ]
    return hashlib.sha256(f"{gm.code}{forms}".encode()).hexdigest()[:20]
