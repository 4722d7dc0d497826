"""Old public names, which work for one version with a DeprecationWarning."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def warn_renamed(old: str, new: str) -> None:
    """Warn at the nearest caller outside commpass."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame):
        frame = frame.f_back
    warnings.warn_explicit(
        f"{old} is deprecated and goes in the next version: use {new}",
        DeprecationWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_internal(frame: FrameType) -> bool:
    """Whether a frame is of commpass, or of Python's import of one of its modules."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package == "commpass" or "importlib" in package


def with_new_names(owner: str, fields: Mapping[str, T], renamed: Mapping[str, str]) -> dict[str, T]:
    """Return the arguments of ``owner`` under their new names, with a warning for each old name.

    Raises TypeError if one is given under both names.
    """
    found = dict(fields)
    for old in fields.keys() & renamed.keys():
        if (new := renamed[old]) in fields:
            raise TypeError(f"{owner}() got both {new!r} and its old name {old!r}")
        warn_renamed(f"{owner}({old}=...)", f"{owner}({new}=...)")
        found[new] = found.pop(old)
    return found


def renamed_fields(renamed: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Let a dataclass take fields under their old names, and give them as attributes.

    The names are in ``OLD_NAMES`` of the class.
    """

    def decorated(of: type[T]) -> type[T]:
        init: Callable[..., None] = of.__init__

        @functools.wraps(init)
        def call(self: T, *args: Any, **fields: Any) -> None:
            init(self, *args, **with_new_names(of.__name__, fields, renamed))

        def restore(self: T, state: Mapping[str, Any]) -> None:
            """Read the state of a pickle, also of one that an older version wrote."""
            vars(self).update({renamed.get(name, name): value for name, value in state.items()})

        new_class: Any = of
        new_class.__init__, new_class.OLD_NAMES = call, renamed
        new_class.__setstate__ = restore
        for old, new in renamed.items():
            setattr(of, old, _old_attribute(of.__name__, old, new))
        return of

    return decorated


def _old_attribute(owner: str, old: str, new: str) -> property:
    def get(self: Any) -> Any:
        warn_renamed(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(get)


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take a keyword argument under its old name. Raises TypeError if it is given
    under both names."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            current: Any = with_new_names(function.__name__, kwargs, {old: new})
            return function(*args, **current)

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
