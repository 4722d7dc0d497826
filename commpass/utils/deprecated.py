"""Old public names, which work for one version with a DeprecationWarning."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def warn_renamed(old: str, new: str) -> None:
    """Warn at the caller of the deprecated name."""
    warnings.warn(
        f"{old} is deprecated and goes in the next version: use {new}",
        DeprecationWarning,
        stacklevel=3,
    )


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take a keyword argument under its old name. Raises TypeError if it is given
    under both names."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                name = function.__name__
                if new in kwargs:
                    raise TypeError(f"{name}() got both {new!r} and its old name {old!r}")
                warn_renamed(f"{name}({old}=...)", f"{name}({new}=...)")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorated


def old_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that gives what has a new name, by old name."""

    def get(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{renamed[name]}")
        return getattr(sys.modules[module], renamed[name])

    return get
