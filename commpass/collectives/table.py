"""Algorithms by kind and name, with parameters: ``algorithm("all_reduce", "ring(stage=ag)")``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from commpass.collectives import moves, native, reductions
from commpass.collectives.algorithm import Algorithm
from commpass.errors import PolicyError, nearest
from commpass.utils.spec import changed, parameters_of, parse, spelled

ALGORITHMS: dict[str, dict[str, Callable[..., Algorithm]]] = {
    "all_reduce": {
        "one_shot": reductions.one_shot,
        "two_shot": reductions.two_shot,
        "ring": reductions.ring,
        "semi_ring": reductions.semi_ring,
        "hierarchical": reductions.hierarchical,
        "sparse": reductions.sparse,
        "native": native.native,
    },
    "reduce_scatter": {
        "direct": reductions.two_shot,
        "ring": reductions.ring,
        "semi_ring": reductions.semi_ring,
        "hierarchical": reductions.hierarchical,
        "native": native.native,
    },
    "all_gather": {"direct": moves.direct},
    "all_to_all": {"direct": moves.direct},
    "broadcast": {"direct": moves.direct},
    "send": {"direct": moves.pairwise},
    "recv": {"direct": moves.pairwise},
}
"""Kind of a collective to the algorithms that carry it out, the simplest first."""

ALGORITHM_NAMES = tuple(dict.fromkeys(name for names in ALGORITHMS.values() for name in names))
ONLY_NAMED = ("native",)
"""Those that sum otherwise than all others do (law 4), and so are for who names them."""
DEFAULTS = (
    *(name for name in ALGORITHM_NAMES if name not in ONLY_NAMED),
    "two_shot(stage=ag)",
    "two_shot(stage=rs)",
)
"""What the cost model chooses from where nobody names an algorithm."""
REDUCE_OPS = ("sum", "avg")


def algorithms_of(kind: str) -> tuple[Algorithm, ...]:
    """The algorithms that carry out collectives of this kind with their usual parameters."""
    return tuple(algorithm(kind, name) for name in ALGORITHMS.get(kind, ()))


def algorithm(kind: str, spec: str, **parameters: Any) -> Algorithm:
    """The algorithm of this kind by name. ``spec`` may hold parameters, ``"ring(stage=ag)"``;
    keywords win over those.

    Raises PolicyError for an unknown name, parameter or value, with the nearest valid one.
    """
    name, given = parse(spec)
    have = ALGORITHMS.get(kind, {})
    if name not in have:
        raise PolicyError(f"{kind} has no algorithm {name!r}{nearest(name, have)}")
    return _build(
        kind, name, changed(f"algorithm {name!r} of {kind}", have[name], given | parameters)
    )


def without_chunks(spec: str) -> str:
    """The text of an algorithm that does not divide what it sends."""
    name, given = parse(spec)
    given.pop("chunks", None)
    given.pop("chunk_bytes", None)
    return spelled(name, tuple(sorted(given.items())))


def chunk_bytes_of(spec: str) -> int:
    """The bytes of the chunks that an algorithm is named with; 0 for none."""
    return int(parse(spec)[1].get("chunk_bytes", 0))


def divides(kind: str, name: str) -> bool:
    """Whether an algorithm can divide what it sends into chunks."""
    return "chunks" in parameters_of(ALGORITHMS[kind][name])


def has_shards(kind: str, name: str) -> bool:
    """Whether an algorithm can send what it sends in micro-shards."""
    return "shards" in parameters_of(ALGORITHMS[kind][name])


def find_algorithm(kind: str, spec: str) -> Algorithm | None:
    """The algorithm of this kind by name; None for what is one of another kind."""
    try:
        return algorithm(kind, spec)
    except PolicyError:
        return None


@lru_cache(maxsize=1024)
def _build(kind: str, name: str, parameters: tuple[tuple[str, Any], ...]) -> Algorithm:
    return ALGORITHMS[kind][name](kind, spelled(name, parameters), **dict(parameters))


def check_name(spec: str) -> None:
    """Raises PolicyError if no kind has an algorithm of this name and parameters."""
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
