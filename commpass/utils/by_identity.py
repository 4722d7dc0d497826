"""A cache for functions of torch's operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

R = TypeVar("R")
OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)
"""The targets that are kept. A Python function may hold a model, which the cache must not."""

MOST = 4096
"""The maximum number of results of each function that are kept."""


def cached_by_identity(function: Callable[[Any], R]) -> Callable[[Any], R]:
    """Cache a function of the target of a node.

    The hash of torch's operators is a Python function. A cache that uses it takes twice as long as
    this one.
    """
    known: dict[int, tuple[Any, R]] = {}  # with the target, so that its id stays its own

    @functools.wraps(function)
    def run(target: Any) -> R:
        held = known.get(id(target))
        if held is None:
            if not isinstance(target, OPERATORS):
                return function(target)
            if len(known) >= MOST:
                known.clear()
            held = known[id(target)] = target, function(target)
        return held[1]

    return run
