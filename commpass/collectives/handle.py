"""A collective in the air."""

from __future__ import annotations

import warnings
from typing import Any

from commpass.collectives.steps import Steps, finish
from commpass.utils.ambient import without_ambient_state


class Handle:
    """What ``async_op=True`` returns: the first exchange has started. ``wait`` gives the result,
    and again when asked again.

    Every rank must wait for its handles in the same order, since later exchanges of an algorithm
    start in ``wait``. One that nobody waits for leaves the other ranks waiting: a warning says that
    it was dropped.
    """

    def __init__(self, steps: Steps):
        self._steps: Steps | None = None
        self._result: Any = None
        self._failure = ""
        try:
            with without_ambient_state():
                self._started = next(steps)
            self._steps = steps
        except StopIteration as end:  # a ring of one rank exchanges nothing
            self._result = end.value

    def wait(self) -> Any:
        """The result, once everything has arrived. Raises what the process group raises, where a
        rank is gone, say; and RuntimeError when asked again after that."""
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
