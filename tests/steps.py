"""How much work a function does, counted and not timed: the same on any machine, under any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps_of(function: Callable[[], Any]) -> int:
    """The lines of Python that a call runs. What C does in one line counts once."""
    found = 0

    def see(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal found
        found += 1
        return see

    before = sys.gettrace()
    sys.settrace(see)
    try:
        function()
    finally:
        sys.settrace(before)
    return found


def growth(work: Callable[[int], Callable[[], Any]], size: int) -> float:
    """How the steps for one more thing grow as things get twice as many, from ``size`` on: about 1
    where each takes as many, and 2 where each looks at all others. ``work(n)`` prepares a call with
    n things."""
    one, two, four = (steps_of(work(times * size)) for times in (1, 2, 4))
    return (four - two) / (2 * (two - one))
