"""What may be said about sites: words that an annotation or a rule gives, what a rule covers, and
what then is allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from commpass.codecs import codec as codec_named
from commpass.collectives import DEFAULTS, MOST_CHUNKS, algorithm, check_name, find_algorithm
from commpass.errors import PolicyError, nearest
from commpass.plan import Site
from commpass.plan.kinds import KINDS
from commpass.policy.paths import star
from commpass.utils.globs import covers

DIRECTIONS = ("forward", "backward")
LOWERINGS = ("inline", "kernel")
Words = str | Sequence[str] | None


def as_names(names: Words) -> tuple[str, ...] | None:
    return None if names is None else (names,) if isinstance(names, str) else tuple(names)


TYPES: dict[str, Any] = {
    "Words": str | list[str] | None,
    "str | None": str | None,
    "float | None": float | None,
    "int | None": int | None,
    "tuple[str, ...]": str | list[str],
    "str": str,
    "float": float,
    "int": int,
    "bool": bool,
}
"""Annotation of a field to what may be given for it, in Python and in a file."""


class Named:
    """Keyword arguments that no field has are refused with the nearest field that exists."""

    def __new__(cls, **fields: Any) -> Any:
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in fields:
            if name not in known:
                raise PolicyError(f"{cls.__name__} has no field {name!r}{nearest(name, known)}")
        return super().__new__(cls)

    def _check_types(self) -> None:
        """Raises PolicyError for a value of a type that its field cannot have."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if (expected := TYPES.get(str(field.type))) is None:
                continue
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, expected)
            except msgspec.ValidationError as error:
                reason = str(error)[0].lower() + str(error)[1:]
                raise PolicyError(
                    f"{type(self).__name__}({field.name}={value!r}): {reason}"
                ) from None


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What may be done to a site. No codecs means: leave it alone. ``named`` says that the nearest
    word named the algorithms, and not the policy for all sites alike; ``source`` says who said
    what codes it, ``budget`` the largest error, and ``split`` the ``rows``. ``names_site`` says
    that a rule that names its module, or an annotation, gave the codecs: they are for whatever it
    carries. ``lossless_only`` says why codecs that lose bits are not among them.
    """

    codecs: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = DEFAULTS
    named: bool = False
    max_error: float | None = None
    force: bool = False
    source: str = "policy"
    budget: str = "max_error of the policy"
    split: str = "policy"
    lowering: str | None = None
    chunks: int | None = None
    rows: int | None = None
    names_site: bool = False
    lossless_only: str = ""

    @property
    def terms(self) -> Allowed:
        """What is allowed, without who says so, and why."""
        if not self.codecs:
            return Allowed()
        return dataclasses.replace(
            self, source="", budget="", split="", names_site=False, lossless_only=""
        )

    @property
    def lossy(self) -> bool:
        """Whether a codec that loses bits is allowed."""
        return not all(codec_named(spec).lossless for spec in self.codecs)

    def without_lossy(self, why: str) -> Allowed:
        """The same without codecs that lose bits, because of ``why``."""
        codecs = tuple(spec for spec in self.codecs if codec_named(spec).lossless)
        return dataclasses.replace(self, codecs=codecs, lossless_only=why)

    def allow_like(self, site: Allowed) -> bool:
        """Whether both allow the same, whoever says so."""
        return self.terms == site.terms


NOTHING = Allowed()


@dataclass(frozen=True, kw_only=True)
class Annotation(Named):
    """What a rule or an annotation says about the sites it covers. None leaves the question to the
    policy.

    ``codec`` and ``algorithm`` are one name or several, of which the cost model takes the fastest.
    ``max_error`` is the allowed relative error. ``force`` compresses even where the cost model sees
    no gain. ``keep`` never compresses. ``lowering`` says what encode and decode become: ``inline``,
    operators that Inductor fuses with their neighbours, or ``kernel``, functions that all sites
    share. ``chunks`` is into how many a tensor is divided, of which one travels while another is
    coded; 1 means not at all, and None lets the cost model choose. ``rows``, likewise, is into how
    many chunks of rows the matmul before a collective is split, and what comes after it.
    """

    codec: Words = None
    algorithm: Words = None
    max_error: float | None = None
    force: bool = False
    keep: bool = False
    lowering: str | None = None
    chunks: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "codec", as_names(self.codec))
        object.__setattr__(self, "algorithm", as_names(self.algorithm))
        for spec in self.codec or ():
            codec_named(spec)
        for name in self.algorithm or ():
            check_name(name)
        if self.max_error is not None and not 0 <= self.max_error <= 1:
            raise PolicyError(
                f"max_error={self.max_error!r}: must be a share such as 0.01 for one percent, and"
                " at most 1"
            )
        for name, number in (("chunks", self.chunks), ("rows", self.rows)):
            if number is not None and not 1 <= number <= MOST_CHUNKS:
                raise PolicyError(f"{name}={number}: must be from 1 to {MOST_CHUNKS}")
        said = (self.codec, self.algorithm, self.force, self.lowering, self.chunks, self.rows)
        if self.keep and any(said):
            raise PolicyError(
                "keep=True says never to compress: leave codec, algorithm, chunks, rows, lowering"
                " and force out"
            )
        if self.lowering is not None and self.lowering not in LOWERINGS:
            raise PolicyError(f"lowering={self.lowering!r}{nearest(self.lowering, LOWERINGS)}")

    def to_json(self) -> str:
        said = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(Annotation)
            if getattr(self, f.name) != f.default
        }
        return msgspec.json.encode(said, order="deterministic").decode()

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> Annotation:
        return Annotation(**msgspec.json.decode(text))


@dataclass(frozen=True, kw_only=True)
class Rule(Annotation):
    """A word for the sites that match: ``module`` is a glob over module paths (``layers.*.mlp``
    covers all that is inside; ``**`` crosses dots), ``kind`` one kind or several, ``group`` one or
    several globs over group labels or names, ``min_bytes`` the least size of a site in bytes."""

    module: str = "**"
    kind: Words = None
    direction: str | None = None
    group: Words = None
    min_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("kind", "group"):
            words = getattr(self, field)
            if words is not None and not isinstance(words, str):
                object.__setattr__(self, field, tuple(words))
        if self.kinds == ():
            raise PolicyError(f"kind=[]: must name a kind{nearest('', KINDS)}")
        if self.groups == ():
            raise PolicyError("group=[]: must name a dimension of a mesh, such as 'tp'")
        for kind in self.kinds or ():
            if kind not in KINDS:
                raise PolicyError(f"unknown kind {kind!r}{nearest(kind, KINDS)}")
        if self.direction is not None and self.direction not in DIRECTIONS:
            raise PolicyError(
                f"unknown direction {self.direction!r}{nearest(self.direction, DIRECTIONS)}"
            )
        if self.min_bytes < 0:
            raise PolicyError(f"Rule(min_bytes={self.min_bytes}): must be at least 0")
        for kind in self.kinds or ():
            if self.algorithm and not any(find_algorithm(kind, spec) for spec in self.algorithm):
                algorithm(kind, self.algorithm[0])  # raises, with the nearest that this kind has

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """The kinds that it is about, None for all."""
        return as_names(self.kind)

    def matches(self, site: Site) -> bool:
        return (
            self._is_about(site.module)
            and (self.kinds is None or site.kind in self.kinds)
            and self.direction in (None, site.direction)
            and (self.groups is None or self.is_over(site))
            and site.common_bytes >= self.min_bytes
        )

    @property
    def names_module(self) -> bool:
        """Whether it is about some modules, and not about all of them."""
        return self.module.strip("*.") != ""

    @property
    def groups(self) -> tuple[str, ...] | None:
        """The globs over group labels, None for all."""
        return as_names(self.group)

    def is_over(self, site: Site) -> bool:
        """Whether the group of a site is one that it names."""
        return any(covers(glob, text) for glob in self.groups or () for text in site.labels)

    def _is_about(self, path: str) -> bool:
        """Whether the module glob covers a path. In a graph that serves several blocks
        (``layers.*``), what is kept for one of them is kept for all."""
        return covers(self.module, path) or (
            self.keep and "*" in path and covers(star(self.module), path)
        )

    @property
    def about(self) -> str:
        """What it covers, as it was written, and ``keep``: ``group='tp', keep=True``."""
        fields = ("module", "kind", "direction", "group", "min_bytes")
        said = [(name, getattr(self, name)) for name in fields]
        shown = [f"{name}={value!r}" for name, value in said if value != getattr(Rule, name)]
        return ", ".join([*(shown or ["module='**'"]), *(["keep=True"] if self.keep else [])])

    def __str__(self) -> str:
        said = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"Rule({', '.join(said)})"
