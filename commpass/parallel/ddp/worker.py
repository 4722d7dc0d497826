"""One thread that executes exchanges in order while other threads compute."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from torch.futures import Future

Job = tuple[Callable[[], None], Future[Any], Any]


class Worker:
    """Execute submitted jobs in one thread.

    ``submit`` returns at once. After an error no further job is executed, since the messages of
    ranks no longer match. ``on_failure`` is called once, in the thread, when that happens.
    """

    def __init__(self, name: str, on_failure: Callable[[], None]):
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._on_failure = on_failure
        # While it waits, the thread only refers to the queue, so that it ends with the worker.
        target = weakref.WeakMethod(self._execute)
        threading.Thread(target=_work, args=(self._jobs, target), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None], value: Any) -> Future[Any]:
        """Return a future of ``value``, set once the job is done or cannot be done: see
        ``check``."""
        future: Future[Any] = Future()
        self._jobs.put((job, future, value))
        return future

    def fail(self, error: BaseException) -> None:
        """Execute no further job, because of an error."""
        if self.error is None:
            self.error = error
            traceback.clear_frames(error.__traceback__)  # its frames may hold the group
            with contextlib.suppress(Exception):  # the user needs the first error
                self._on_failure()

    def check(self) -> None:
        """Raise the error of a job, at every call."""
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End the thread, after the jobs that were submitted."""
        self._jobs.put(None)

    def _execute(self, job: Callable[[], None], future: Future[Any], value: Any) -> None:
        try:
            if self.error is None:
                job()
        except BaseException as error:  # ``check`` raises it to the user
            self.fail(error)
        finally:
            future.set_result(value)


def _work(jobs: queue.SimpleQueue[Job | None], execute: weakref.WeakMethod[Any]) -> None:
    while (job := jobs.get()) is not None:
        method = execute()
        if method is None:
            job[1].set_result(job[2])
        else:
            method(*job)
        del job, method
