"""Name the nearest argument where Python says only that one is unexpected."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from commpass.errors import nearest

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let the TypeError for an unknown keyword argument of a function name the nearest known one.

    The function must not take ``**kwargs``.
    """
    known = _keywords(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(_unexpected(function.__qualname__, name, known))
        return function(*args, **kwargs)

    return call


def named_fields(hints: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """As ``named_arguments``, for the fields of a dataclass.

    ``hints`` say by wrong name what to write, where the nearest name would mislead.
    """

    def decorated(of: type[T]) -> type[T]:
        init: Callable[..., None] = of.__init__
        known = _keywords(init)

        @functools.wraps(init)
        def call(self: T, *args: Any, **fields: Any) -> None:
            if not known.issuperset(fields):
                name = next(each for each in fields if each not in known)
                hint = (hints or {}).get(name, "")
                raise TypeError(_unexpected(of.__name__, name, known, hint))
            init(self, *args, **fields)

        new_class: Any = of
        new_class.__init__ = call
        return of

    return decorated


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return frozenset(each.name for each in parameters if each.kind in by_name) - {"self"}


def _unexpected(owner: str, name: str, known: frozenset[str], hint: str = "") -> str:
    text = f"{owner}() got an unexpected keyword argument {name!r}"
    return f"{text}: {hint}" if hint else f"{text}{nearest(name, known)}"
