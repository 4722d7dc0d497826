"""One thread that carries out exchanges in the order in which they are given to it, while others go
on computing."""

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
    """``submit`` returns at once. After an error nothing more is carried out: what ranks have sent
    no longer belongs together. ``failed`` is called once, in the thread, when that happens."""

    def __init__(self, name: str, failed: Callable[[], None]):
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._failed = failed
        # The thread knows the queue alone while it waits, so that it ends when the worker goes.
        target = weakref.WeakMethod(self._carry_out)
        threading.Thread(target=_work, args=(self._jobs, target), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None], value: Any) -> Future[Any]:
        """The future is ``value`` once the job is done, or cannot be done: see ``check``."""
        future: Future[Any] = Future()
        self._jobs.put((job, future, value))
        return future

    def fail(self, error: BaseException) -> None:
        """Lets nothing more be carried out, because of an error."""
        if self.error is None:
            self.error = error
            traceback.clear_frames(error.__traceback__)  # they may hold the group
            with contextlib.suppress(Exception):  # what failed first is what the user needs to know
                self._failed()

    def check(self) -> None:
        """Raises the error of a job, every time."""
        if self.error is not None:
            raise self.error

    def _carry_out(self, job: Callable[[], None], future: Future[Any], value: Any) -> None:
        try:
            if self.error is None:
                job()
        except BaseException as error:  # it reaches the user where ``check`` is called
            self.fail(error)
        finally:
            future.set_result(value)


def _work(jobs: queue.SimpleQueue[Job | None], carry_out: weakref.WeakMethod[Any]) -> None:
    while (job := jobs.get()) is not None:
        method = carry_out()
        if method is None:
            job[1].set_result(job[2])
        else:
            method(*job)
        del job, method
