"""Python's garbage collector of cyclic references."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Pauses:
    """The pauses of this process that have begun and not ended, and whether collection was on
    before the first of them."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.now: set[object] = set()
        self.was_on = False

    def begin(self, pause: object) -> None:
        """Begin a pause. It has an end, also if this is interrupted anywhere."""
        with self.lock:
            if not self.now:
                self.was_on = gc.isenabled()
            self.now.add(pause)
            if self.was_on:
                gc.disable()

    def end(self, pause: object) -> None:
        """End a pause, whether or not it has begun."""
        with self.lock:
            if pause in self.now:
                self.now.remove(pause)
                if not self.now and self.was_on:
                    gc.enable()

    def forked(self) -> None:
        """Turn collection on in a new process, whose other threads do not exist any more."""
        if self.now and self.was_on:
            gc.enable()
        self.now.clear()
        self.lock = Lock()


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.forked)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Let no garbage be collected in this process, if collection is on.

    The collector walks through all objects whenever their number has grown by a quarter. A graph
    that is rewritten grows by many objects that live on, so walks find nothing, and take a third of
    the time for 1,000 collectives. Several threads may pause at once: the last one to end turns
    collection on again. An interrupt at any moment ends the pause as well.
    """
    pause = object()
    try:
        _pauses.begin(pause)
        yield
    finally:
        _pauses.end(pause)
