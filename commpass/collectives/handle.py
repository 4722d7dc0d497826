"""Handles of running collectives."""

from __future__ import annotations

import warnings
from typing import Any

from commpass.collectives.steps import Steps, finish
from commpass.utils.ambient import without_ambient_state


class Handle:
    """The result of ``async_op=True``: the first exchange has started. ``wait`` returns the result,
    also if called again.

    Every rank must wait for its handles in the same order, since later exchanges of an algorithm
    start in ``wait``. A handle that is never waited for blocks the other ranks: a warning is issued
    if it is dropped.
    """

    def __init__(self, steps: Steps):
        self._steps: Steps | None = None
        self._result: Any = None
        self._failure = ""
        try:
            with without_ambient_state():
                self._started = next(steps)
            self._steps = steps
        except StopIteration as end:  # a ring of one rank has no exchanges
            self._result = end.value

    def wait(self) -> Any:
        """Return the result once everything has arrived. Raises the error of the process group, for
        example if a rank has exited, and RuntimeError if called again after that."""
        if self._failure:
            raise RuntimeError(f"an earlier wait on this handle failed: {self._failure}")
        if self._steps is not None:
            steps, self._steps = self._steps, None
            self._failure = "it was interrupted"
            try:
                with without_ambient_state():
                    self._result = finish(steps, self._started)
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"
                raise
            self._failure = ""
        return self._result

    def __del__(self) -> None:
        if self._steps is not None:
            lost = "a handle was dropped without wait(): its result is lost"
            warnings.warn(f"{lost}, and ranks that wait for theirs may wait in vain", stacklevel=2)
