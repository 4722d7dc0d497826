"""A rank on which a call fails publishes the error, so that no other rank waits for it.

Its policy, its profile or its environment is wrong, so it takes part in no comparison of plans. The
refusal holds until the same process makes another call.
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

COUNT = "commpass/refusals"
"""The number of refusals and withdrawals of all ranks. Each is stored under its number."""
GRACE_S = 3.0
"""Seconds in which a rank may make another call, before the refusal is an error elsewhere."""
PAUSE_S = 0.05


@dataclass(frozen=True)
class Refusal:
    """Why the call of a rank failed; ``error`` is "" once it makes another one. ``name`` is
    unique."""

    rank: int
    name: str
    error: str = ""


_own: list[Refusal] = []
"""What this process has published and not withdrawn."""
_last_error: list[str] = []
"""The error of the last such call of this process, if it failed."""
_runs: dict[str, weakref.ref[Any]] = {}
"""The process group in which this process first read a refusal, by its name: the store of a launch
outlives process groups."""


def publishing_refusal(function: Callable[P, T]) -> Callable[P, T]:
    """Publish a PolicyError of a function that all ranks call. Withdraw an earlier one when the
    function is called, since it may take longer than the others wait."""

    @functools.wraps(function)
    def publishing(*args: P.args, **kwargs: P.kwargs) -> T:
        if _own:
            _publish("")
        try:
            made = function(*args, **kwargs)
        except PolicyError as error:
            _publish(str(error))
            _last_error[:] = [str(error)]
            raise
        _last_error.clear()
        return made

    return publishing


def check_refusals() -> None:
    """Raise Unanswered if the call of another rank failed, after it had time for another one.

    If the last one of this rank failed too, both go on with something else, such as
    ``compress_ddp``.
    """
    if _last_error:
        return
    start = time.monotonic()
    while found := _read():
        if time.monotonic() - start > GRACE_S:
            first, *others = found
            raise Unanswered(
                f"rank {first.rank} takes no part, since its call failed:"
                f" {first.error.removesuffix('.')}. Correct this on rank {first.rank}"
                + "".join(f"; rank {each.rank} failed too: {each.error}" for each in others[:3])
            )
        time.sleep(PAUSE_S)


def _read() -> list[Refusal]:
    """Return the refusals of other ranks of this run that stand, by rank."""
    latest = {each.rank: each for each in _stored()}
    latest.pop(dist.get_rank(), None)
    world = dist.group.WORLD
    assert world is not None
    return [
        each
        for _, each in sorted(latest.items())
        if each.error and _runs.setdefault(each.name, weakref.ref(world))() is world
    ]


def _stored() -> list[Refusal]:
    """Return what all ranks have published, in order."""
    try:
        store = dist.distributed_c10d._get_default_store()
        if not store.check([COUNT]):
            return []
        keys = [f"{COUNT}/{number + 1}" for number in range(store.add(COUNT, 0))]
        texts = [store.get(key) for key in keys if store.check([key])]  # the last may be under way
    except RuntimeError as error:  # the store is gone: a rank that has to compare plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return []
    return [msgspec.json.decode(text, type=Refusal) for text in texts]


def _publish(error: str) -> None:
    """Publish why a call of this rank failed, or withdraw (``""``) what it has published."""
    if _own and _own[-1].error == error:
        return  # a call within that call has published it
    _own.clear()
    if not ready() or "fake" in dist.get_backend():
        return
    refusal = Refusal(dist.get_rank(), uuid.uuid4().hex[:12], error)
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{COUNT}/{store.add(COUNT, 1)}", msgspec.json.encode(refusal).decode())
    except RuntimeError as failed:  # the store is gone: no rank can read it
        log.debug("commpass could not reach the store: %s", failed)
    if error:
        _own.append(refusal)
