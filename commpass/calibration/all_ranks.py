"""Exchange measurements and failures between ranks through torch's store.

The collectives of the model belong to the user, and a rank that fails takes part in no more of
them. So commpass sends nothing through them: each rank writes its numbers to the store and reads
the others'. A rank that fails writes its reason there. A rank that waits for it in a collective of
the model is released by the time-out of its process group, which is as short as ``timeout``
meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from commpass.errors import CalibrationError, CommpassError

T = TypeVar("T")


class Ranks:
    """All ranks of a running group, which call ``exchange`` in the same order."""

    def __init__(self, timeout: float):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout = timedelta(seconds=timeout)
        self.step = 0
        name = [uuid.uuid4().hex[:12]]
        dist.broadcast_object_list(name)
        self.root = f"commpass/calibrate/{name[0]}"

    def exchange(self, value: T, kind: type[T]) -> list[T]:
        """Return the values of all ranks, by rank.

        Raise CalibrationError if a rank has failed, or publishes nothing in time.
        """
        self.step += 1
        self._store.set(self._key(self.rank), msgspec.msgpack.encode(value))
        try:
            self._store.wait([self._key(rank) for rank in range(self.size)], self.timeout)
        except Exception as error:
            self.raise_others(error)
            seconds = self.timeout.total_seconds()
            raise CalibrationError(
                f"a rank did not say what it measured within {seconds:.0f} s: was it stopped?"
                " A step that takes longer needs a longer timeout="
            ) from error
        self.raise_others(None)
        raw = [self._store.get(self._key(rank)) for rank in range(self.size)]
        return [msgspec.msgpack.decode(each, type=kind) for each in raw]

    def all_sums(self, numbers: list[float]) -> list[float]:
        """Return sums over all ranks, added in rank order: the same bits on every rank."""
        rows = self.exchange(numbers, list[float])
        return [sum(column) for column in zip(*rows, strict=True)]

    def fail(self, error: BaseException) -> None:
        """Publish the failure's reason, and release the ranks that wait for this rank's numbers."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._store.set(f"{self.root}/failed/{self.rank}", reason)
        for step in (self.step, self.step + 1):
            if not self._store.check([f"{self.root}/{step}/{self.rank}"]):
                self._store.set(f"{self.root}/{step}/{self.rank}", "")

    def raise_others(self, because: BaseException | None) -> None:
        """Raise CalibrationError if another rank has failed."""
        for rank in range(self.size):
            key = f"{self.root}/failed/{rank}"
            if rank != self.rank and self._store.check([key]):
                reason = self._store.get(key).decode()
                raise CalibrationError(f"rank {rank} failed: {reason}") from because

    def _key(self, rank: int) -> str:
        return f"{self.root}/{self.step}/{rank}"

    @property
    def _store(self) -> Any:
        """Looked up each time: holding torch's store would keep its server alive."""
        return dist.distributed_c10d._get_default_store()


@contextmanager
def all_ranks(timeout: float) -> Iterator[Ranks]:
    """Make ``Ranks`` for the time of a measurement. A rank that raises publishes its error."""
    with _patience(timeout):
        ranks = Ranks(timeout)
        try:
            yield ranks
        except BaseException as error:
            if not isinstance(error, CommpassError):  # it may have waited for one that failed
                ranks.raise_others(error)
            ranks.fail(error)
            raise


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Limit the time-out of all process groups to ``seconds``."""
    before = []
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            carrier = group._get_backend(device)
            known = getattr(getattr(carrier, "options", None), "_timeout", None)
            if known is not None and hasattr(carrier, "_set_default_timeout"):
                before.append((carrier, known))
                carrier._set_default_timeout(min(known, timedelta(seconds=seconds)))
    try:
        yield
    finally:
        for carrier, known in reversed(before):  # one that serves several devices is listed twice
            carrier._set_default_timeout(known)
