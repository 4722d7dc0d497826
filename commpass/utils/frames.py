"""Memory for Python's call frames."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

SLOTS = 1 << 16
"""The slots of 8 bytes that the frame of a roomy function has. Python then maps 1 MiB for it and
the frames of all functions that it calls."""


def roomy(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that what it calls seldom needs new memory for frames.

    CPython keeps the frames of a thread in chunks of 16 KiB. A call that does not fit into the last
    chunk maps a new one, and its return unmaps it. A loop that calls functions at such a depth
    spends most of its time there. The large frame of a roomy function gets a larger chunk, and
    the frames of later calls fit into its rest. Memory that no frame uses is only reserved.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_stacksize=SLOTS)
    return functools.wraps(function)(run)
