"""Functions of a codec's part that are others for each type of part."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

_functions: list[Any] = []


def by_type(function: Callable[..., Any]) -> Any:
    """``functools.singledispatch`` for functions that Dynamo may trace: see ``warm_up``."""
    made = singledispatch(function)
    _functions.append(made)
    return made


def warm_up() -> None:
    """Looks every registered type up once. Dynamo guards on how many types have been looked up:
    it would compile again what it has compiled as soon as another one is."""
    for function in _functions:
        for kind in function.registry:
            function.dispatch(kind)
