"""Functions that dispatch on the type of a codec's part."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

_functions: list[Any] = []


def by_type(function: Callable[..., Any]) -> Any:
    """``functools.singledispatch`` for functions that Dynamo may trace: see ``warm_up``."""
    dispatcher = singledispatch(function)
    _functions.append(dispatcher)
    return dispatcher


def warm_up() -> None:
    """Look up every registered type once. Dynamo guards on the size of the dispatch cache, and
    would recompile whenever another type is looked up."""
    for function in _functions:
        for kind in function.registry:
            function.dispatch(kind)
