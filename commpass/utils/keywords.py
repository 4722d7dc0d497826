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
    """As ``named_arguments``, for the fields of a dataclass and of its subclasses.

    ``hints`` say by wrong name what to write, where the nearest name would mislead.
    """

    def check(owner: str, known: frozenset[str], fields: Mapping[str, Any]) -> None:
        if not known.issuperset(fields):
            name = next(each for each in fields if each not in known)
            raise TypeError(_unexpected(owner, name, known, (hints or {}).get(name, "")))

    def decorated(of: type[T]) -> type[T]:
        init: Callable[..., None] = of.__init__
        known = _keywords(init)

        @functools.wraps(init)
        def call(self: T, *args: Any, **fields: Any) -> None:
            check(of.__name__, known, fields)
            init(self, *args, **fields)

        def new(cls: type[T], *args: Any, **fields: Any) -> T:
            """Check the fields of a subclass that has an ``__init__`` of its own."""
            own: Callable[..., None] = cls.__init__
            if fields and own is not of.__init__ and not _takes_any(own):
                check(cls.__name__, _keywords(own), fields)
            return super(of, cls).__new__(cls)  # type: ignore[misc]

        new_class: Any = of
        new_class.__init__, new_class.__new__ = call, staticmethod(new)
        new_class.__signature__ = _SignatureOfInit()
        return of

    return decorated


class _SignatureOfInit:
    """The signature of a class and of its subclasses: that of ``__init__``, not of ``__new__``."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        init: Callable[..., None] = owner.__init__  # type: ignore[misc]
        signature = inspect.signature(init)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@functools.lru_cache
def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return frozenset(each.name for each in parameters if each.kind in by_name) - {"self"}


@functools.lru_cache
def _takes_any(function: Callable[..., Any]) -> bool:
    """Return whether a function takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def _unexpected(owner: str, name: str, known: frozenset[str], hint: str = "") -> str:
    text = f"{owner}() got an unexpected keyword argument {name!r}"
    return f"{text}: {hint}" if hint else f"{text}{nearest(name, known)}"
