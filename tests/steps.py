"""Count the work of a function instead of timing it: the result is the same on any machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps_of(function: Callable[[], Any]) -> int:
    """Return the number of Python lines that a call runs. C code within a line is not counted."""
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
    """Return how the steps for one more item grow when the number of items doubles, from ``size``
    on.

    The result is about 1 if each item takes as many steps, and 2 if each looks at all others.
    ``work(n)`` prepares a call with n items.
    """
    one, two, four = (steps_of(work(times * size)) for times in (1, 2, 4))
    return (four - two) / (2 * (two - one))
