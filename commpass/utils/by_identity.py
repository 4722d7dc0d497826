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

    The hash of torch's operators is a Python function, and ``id`` calls the audit hooks of the
    process (filelock, which Inductor imports, has one). ``object.__hash__`` is three times as fast
    as ``id`` then, and also unique among the objects that exist.
    """
    known: dict[int, tuple[Any, R]] = {}  # with the target, so that no other has its key

    @functools.wraps(function)
    def run(target: Any) -> R:
        held = known.get(identity := object.__hash__(target))
        if held is None:
            if not isinstance(target, OPERATORS):
                return function(target)
            if len(known) >= MOST:
                known.clear()
            held = known[identity] = target, function(target)
        return held[1]

    return run
