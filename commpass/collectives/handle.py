"""A collective in the air."""

from __future__ import annotations

from typing import Any

from commpass.collectives.steps import Steps, finish


class Handle:
    """What ``async_op=True`` returns: the first exchange has started. ``wait`` gives the result, and again when asked again.

    Every rank must wait for its handles in the same order, since later exchanges of an algorithm start in ``wait``.
    """

    def __init__(self, steps: Steps):
        self._steps: Steps | None = steps
        self._result: Any = None
        try:
            self._started = next(steps)
        except StopIteration as end:  # a ring of one rank exchanges nothing
            self._steps, self._result = None, end.value

    def wait(self) -> Any:
        """The result, once everything has arrived."""
        if self._steps is not None:
            steps, self._steps = self._steps, None
            self._result = finish(steps, self._started)
        if self._result is None:
            raise RuntimeError("an earlier wait on this handle failed: its result is lost")
        return self._result
