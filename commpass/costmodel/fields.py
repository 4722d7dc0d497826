"""Refuse fields of a profile file that do not exist: they would change nothing, unnoticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commpass.costmodel.kernels import KernelRate, Kernels
from commpass.costmodel.links import Link, Region
from commpass.costmodel.profile import Profile
from commpass.costmodel.protocols import Protocol
from commpass.errors import ProfileError, nearest

PROTOCOLS = "; give protocols, each with name, start_us, step_us, share and tree_step_us"
REMOVED = {"start_us": PROTOCOLS, "trees": PROTOCOLS}
"""Fields of a link in earlier files, and what replaces them."""


class UnknownField(ProfileError):
    """An unknown field ``key`` of a table. ``keys`` name the tables inside the checked one that it
    is in, and the field."""

    def __init__(self, key: str, name: str, known: Sequence[str], tables: Sequence[str] = ()):
        hint = REMOVED.get(key, "") if name == "a link" else ""
        super().__init__(f"{name} has no field {key!r}{hint or nearest(key, known)}")
        self.keys = (*tables, key)


def check_fields(profile: Mapping[str, Any], more: Sequence[str] = ()) -> None:
    """Raise UnknownField if a profile as data, or a table in it, has a field that its type lacks.

    ``more`` are fields that every table may have besides. What is no table is not checked.
    """
    _check(profile, Profile, "a profile", more)
    for link in (profile.get("link"), profile.get("intra_host_link"), *_values(profile, "links")):
        check_link(link, more)
    check_kernels(profile.get("kernels"), more)


def check_link(link: Any, more: Sequence[str] = ()) -> None:
    """As ``check_fields``, for a link."""
    _check(link, Link, "a link", more)
    for each in _rows(link.get("protocols") if isinstance(link, Mapping) else None):
        _check(each, Protocol, "a protocol", (), ("protocols",))
    measured = link.get("measured") if isinstance(link, Mapping) else None
    for kind, rows in measured.items() if isinstance(measured, Mapping) else ():
        for each in _rows(rows):
            _check(each, Region, "a region", (), ("measured", kind))


def check_kernels(kernels: Any, more: Sequence[str] = ()) -> None:
    """As ``check_fields``, for rates of kernels."""
    _check(kernels, Kernels, "[kernels]", more)
    if not isinstance(kernels, Mapping):
        return
    rates = kernels.get("rates")
    named = dict(rates) if isinstance(rates, Mapping) else {}
    for name, rate in {"other": kernels.get("other"), **named}.items():
        tables = ("rates", name) if name in named else (name,)
        _check(rate, KernelRate, f"the rate of {name}", more, tables)


def _check(
    table: Any, kind: type, name: str, more: Sequence[str], tables: Sequence[str] = ()
) -> None:
    known = [*(field.name for field in dataclasses.fields(kind)), *more]
    for key in table if isinstance(table, Mapping) else ():
        if key not in known:
            raise UnknownField(str(key), name, known, tables)


def _values(table: Any, key: str) -> Iterator[Any]:
    inner = table.get(key) if isinstance(table, Mapping) else None
    yield from inner.values() if isinstance(inner, Mapping) else ()


def _rows(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()
