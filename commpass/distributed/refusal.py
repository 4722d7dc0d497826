"""A rank on which no backend can be made publishes the error, so that no other rank waits for it.

Its policy, its profile or its environment is wrong, so it takes part in no comparison of plans. The
refusal holds until a later call makes a backend in the same process.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch.distributed as dist

from commpass.errors import PolicyError, Unanswered
from commpass.groups import ready

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("commpass")

KEY = "commpass/refusal"
GRACE_S = 3.0
"""Seconds in which a rank may make another backend, before the refusal is an error elsewhere."""
PAUSE_S = 0.05


@dataclass(frozen=True)
class Refusal:
    """Why a rank has no backend; ``error`` is "" once it has one. ``name`` is unique."""

    rank: int
    name: str
    error: str = ""


_own: list[Refusal] = []
"""What this process has published and not withdrawn."""
_runs: dict[str, weakref.ref[Any]] = {}
"""The process group in which this process first read a refusal, by its name: the store of a launch
outlives process groups."""


def publishing_refusal(function: Callable[P, T]) -> Callable[P, T]:
    """Publish a PolicyError of a function that makes a backend, and withdraw an earlier one."""

    @functools.wraps(function)
    def publishing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            made = function(*args, **kwargs)
        except PolicyError as error:
            _publish(str(error))
            raise
        if _own:
            _publish("")
        return made

    return publishing


def check_refusals() -> None:
    """Raise Unanswered if another rank has no backend, after it had time to make another one.

    If this rank has none either, both go on with something else, such as ``compress_ddp``.
    """
    if _own:
        return
    start = time.monotonic()
    while (found := _read()) is not None:
        if time.monotonic() - start > GRACE_S:
            raise Unanswered(
                f"rank {found.rank} could not make a backend, so it compares no plans:"
                f" {found.error.removesuffix('.')}. Correct this on rank {found.rank}"
            )
        time.sleep(PAUSE_S)


def _read() -> Refusal | None:
    """Return the refusal of another rank of this run that stands."""
    found = _stored()
    if found is None or not found.error or found.rank == dist.get_rank():
        return None
    world = dist.group.WORLD
    assert world is not None
    is_now = _runs.setdefault(found.name, weakref.ref(world))() is world
    return found if is_now else None


def _stored() -> Refusal | None:
    """Return the latest refusal of any rank."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return msgspec.json.decode(store.get(KEY), type=Refusal) if store.check([KEY]) else None
    except RuntimeError as error:  # the store is gone: a rank that has to compare plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return None


def _publish(error: str) -> None:
    """Publish why this rank has no backend, or withdraw (``""``) what it has published last."""
    withdrawn = [*_own] if not error else []
    _own.clear()
    if not ready() or "fake" in dist.get_backend():
        return
    if withdrawn and _stored() not in withdrawn:
        return  # another rank has published since
    refusal = Refusal(dist.get_rank(), uuid.uuid4().hex[:12], error)
    try:
        dist.distributed_c10d._get_default_store().set(KEY, msgspec.json.encode(refusal).decode())
    except RuntimeError as failed:  # the store is gone: no rank can read it
        log.debug("commpass could not reach the store: %s", failed)
    if error:
        _own.append(refusal)
