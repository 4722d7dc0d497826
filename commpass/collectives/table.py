"""Algorithms by kind and name, with parameters: ``algorithm("all_reduce", "ring(stage=ag)")``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from commpass.collectives import moves, native, reductions, uneven
from commpass.collectives.algorithm import Algorithm
from commpass.errors import PolicyError, nearest
from commpass.utils.spec import changed_parameters, parameters_of, parse, spell

MODULES = (reductions, native, moves, uneven)
"""The modules of algorithms, each with ``ALGORITHMS``: kind, name, function that builds it."""

ALGORITHMS: dict[str, dict[str, Callable[..., Algorithm]]] = {
    kind: {
        name: build for module in MODULES for name, build in module.ALGORITHMS.get(kind, {}).items()
    }
    for kind in dict.fromkeys(kind for module in MODULES for kind in module.ALGORITHMS)
}
"""The algorithms of each kind of collective, the simplest first."""

ALGORITHM_NAMES = tuple(dict.fromkeys(name for names in ALGORITHMS.values() for name in names))
ONLY_NAMED = ("native",)
"""Algorithms that do not follow law 4 in sums, and so are used only if named explicitly."""
DEFAULTS = (
    *(name for name in ALGORITHM_NAMES if name not in ONLY_NAMED),
    "two_shot(stage=ag)",
    "two_shot(stage=rs)",
)
"""The algorithms that the cost model chooses from if none is named."""
REDUCE_OPS = ("sum", "avg")


def algorithms_of(kind: str) -> tuple[Algorithm, ...]:
    """Return the algorithms of this kind with their default parameters."""
    return tuple(algorithm(kind, name) for name in ALGORITHMS.get(kind, ()))


def algorithm(kind: str, spec: str, **parameters: Any) -> Algorithm:
    """Return the algorithm of this kind and name. ``spec`` may contain parameters,
    ``"ring(stage=ag)"``; keyword arguments take precedence.

    Raises PolicyError for an unknown name, parameter or value, with the nearest valid one.
    """
    name, given = parse(spec)
    have = ALGORITHMS.get(kind, {})
    if name not in have:
        raise PolicyError(f"{kind} has no algorithm {name!r}{nearest(name, have)}")
    return _changed(kind, name, given | parameters)


def with_parameters(algorithm: Algorithm, **parameters: Any) -> Algorithm:
    """Return an algorithm with other values of some parameters."""
    return _changed(algorithm.kind, algorithm.name, dict(algorithm.parameters) | parameters)


def without_chunks(algorithm: Algorithm) -> Algorithm:
    """Return an algorithm without its division into chunks."""
    kept = tuple(p for p in algorithm.parameters if p[0] not in ("chunks", "chunk_bytes"))
    return _build(algorithm.kind, algorithm.name, kept)


def has_parameter(algorithm: Algorithm, name: str) -> bool:
    """Whether an algorithm has a parameter of this name, such as ``chunks`` or ``shards``."""
    return name in parameters_of(ALGORITHMS[algorithm.kind][algorithm.name])


def find_algorithm(kind: str, spec: str) -> Algorithm | None:
    """Return the algorithm of this kind and name; None if this kind has no such algorithm."""
    try:
        return algorithm(kind, spec)
    except PolicyError:
        return None


def _changed(kind: str, name: str, parameters: dict[str, Any]) -> Algorithm:
    builder = ALGORITHMS[kind][name]
    return _build(
        kind, name, changed_parameters(f"algorithm {name!r} of {kind}", builder, parameters)
    )


@lru_cache(maxsize=1024)
def _build(kind: str, name: str, parameters: tuple[tuple[str, Any], ...]) -> Algorithm:
    built = ALGORITHMS[kind][name](kind, spell(name, parameters), **dict(parameters))
    return replace(built, parameters=parameters)


def check_name(spec: str) -> None:
    """Raise PolicyError if no kind has an algorithm of this name and parameters."""
    name, _ = parse(spec)
    kinds = [kind for kind, have in ALGORITHMS.items() if name in have]
    if not kinds:
        raise PolicyError(f"unknown algorithm {name!r}{nearest(name, ALGORITHM_NAMES)}")
    errors = []
    for kind in kinds:
        try:
            algorithm(kind, spec)
        except PolicyError as error:
            errors.append(error)
    if len(errors) == len(kinds):
        raise errors[0]
