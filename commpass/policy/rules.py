"""Annotations and rules: what they say about sites, which sites they cover, and what is then
allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import msgspec

from commpass.codecs import codec as codec_named
from commpass.collectives import DEFAULTS, MOST_CHUNKS, algorithm, check_name, find_algorithm
from commpass.errors import PolicyError, nearest, type_reason
from commpass.plan import SINGLE_KERNEL, Site
from commpass.plan.kinds import IN_GRAPHS
from commpass.policy.paths import star
from commpass.utils.globs import covers

DIRECTIONS = ("forward", "backward")
SHORT_DIRECTIONS = {
    **dict.fromkeys(("f", "fw", "fwd"), "forward"),
    **dict.fromkeys(("b", "bw", "bwd"), "backward"),
}
"""The directions that short names are likely to mean."""
LOWERINGS = ("inline", "kernel", SINGLE_KERNEL)
Names = str | Sequence[str] | None


def as_names(names: Names) -> tuple[str, ...] | None:
    return None if names is None else (names,) if isinstance(names, str) else tuple(names)


TYPES: dict[str, Any] = {
    "Names": str | list[str] | None,
    "str | None": str | None,
    "float | None": float | None,
    "int | None": int | None,
    "tuple[str, ...]": str | list[str],
    "str": str,
    "float": float,
    "int": int,
    "bool": bool,
}
"""The accepted types of a field's value, in Python and in a file, by the field's annotation."""


class Named:
    """Base class that rejects unknown keyword arguments and names the nearest field."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {}
    EXAMPLE: ClassVar[str] = "codec='int8'"
    """An argument, for the message to someone who gave one without its name."""
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    """What to write instead of an argument that is no field."""

    def __new__(cls, *values: Any, **fields: Any) -> Any:
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if values:
            what = cls.__name__
            instead = "".join(f"; {each}" for each in cls.ELSEWHERE.values())
            raise PolicyError(
                f"{what}({values[0]!r}): name the field, as in {what}({cls.EXAMPLE}){instead}"
            )
        for name in fields:
            if name in cls.ELSEWHERE:
                raise PolicyError(f"{cls.__name__} has no field {name!r}; {cls.ELSEWHERE[name]}")
            if name not in known and name not in cls.OLD_NAMES:
                raise PolicyError(f"{cls.__name__} has no field {name!r}{nearest(name, known)}")
        return super().__new__(cls)

    def _check_types(self) -> None:
        """Raise PolicyError for a value whose type its field does not accept."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if (expected := TYPES.get(str(field.type))) is None:
                continue
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, expected)
            except msgspec.ValidationError as error:
                raise PolicyError(
                    f"{type(self).__name__}({field.name}={value!r}): {type_reason(error)}"
                ) from None


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What may be done to a site. Without codecs it stays uncompressed.

    ``named`` says that an annotation or rule named the algorithms, not the policy for all sites.
    ``source`` says what decided the codecs, ``budget`` the largest error, and ``split`` the
    ``rows``. ``names_site`` says that an annotation, or a rule that names the site's module, gave
    the codecs; they then apply to any values. ``lossless_only`` is the reason why lossy codecs were
    removed.
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
        """Return what is allowed, without sources and reasons."""
        if not self.codecs:
            return Allowed()
        return dataclasses.replace(
            self, source="", budget="", split="", names_site=False, lossless_only=""
        )

    @property
    def lossy(self) -> bool:
        """Whether a lossy codec is allowed."""
        return not all(codec_named(spec).lossless for spec in self.codecs)

    def without_lossy(self, why: str) -> Allowed:
        """Return the same without lossy codecs. ``why`` is the reason."""
        codecs = tuple(spec for spec in self.codecs if codec_named(spec).lossless)
        return dataclasses.replace(self, codecs=codecs, lossless_only=why)

    def allow_like(self, site: Allowed) -> bool:
        """Whether both allow the same, regardless of the source."""
        return self.terms == site.terms


NOTHING = Allowed()


@dataclass(frozen=True, kw_only=True)
class Annotation(Named):
    """What a rule or an annotation says about the sites that it covers. None leaves a setting to
    the policy.

    - ``codec`` and ``algorithm``: one name or several; the cost model takes the fastest.
    - ``max_error``: the allowed relative error.
    - ``force``: compress even if the cost model predicts no gain.
    - ``keep``: never compress.
    - ``lowering``: what encode and decode become. ``inline``: operators that Inductor fuses with
      their neighbours; ``kernel``: functions that all sites share; ``single_kernel``: one kernel
      with the exchanges, where that is possible.
    - ``chunks``: the number of chunks that a tensor is divided into, so that one is sent while
      another is encoded. 1 divides nothing; None lets the cost model choose.
    - ``rows``: the number of chunks of rows that the matmul before a collective, and what comes
      after it, is split into. 1 and None as for ``chunks``.
    """

    codec: Names = None
    algorithm: Names = None
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
        settings = (self.codec, self.algorithm, self.force, self.lowering, self.chunks, self.rows)
        if self.keep and any(settings):
            raise PolicyError(
                "keep=True says never to compress: leave codec, algorithm, chunks, rows, lowering"
                " and force out"
            )
        if self.lowering is not None and self.lowering not in LOWERINGS:
            raise PolicyError(f"lowering={self.lowering!r}{nearest(self.lowering, LOWERINGS)}")

    def to_json(self) -> str:
        fields = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(Annotation)
            if getattr(self, f.name) != f.default
        }
        return msgspec.json.encode(fields, order="deterministic").decode()

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> Annotation:
        return Annotation(**msgspec.json.decode(text))


@dataclass(frozen=True, kw_only=True)
class Rule(Annotation):
    """An annotation for the sites that match it.

    Args:
        codec: one name or several; the cost model takes the fastest.
        algorithm: one name or several; the cost model takes the fastest.
        max_error: the allowed relative error, such as 0.02; None for that of the policy.
        force: compress even if the cost model predicts no gain.
        keep: never compress.
        lowering: what encode and decode become. ``inline``: operators that Inductor fuses with
            their neighbours; ``kernel``: functions that all sites share; ``single_kernel``: one
            kernel with the exchanges, where that is possible. None for the default of the device.
        chunks: the number of chunks that a tensor is divided into, so that one is sent while
            another is encoded. 1 divides nothing; None lets the cost model choose.
        rows: the number of chunks of rows that the matmul before a collective, and what comes after
            it, is split into. 1 and None as for ``chunks``.
        module: a glob over module paths: ``layers.*.mlp`` covers everything inside; ``**`` crosses
            dots.
        kind: one kind or several, such as ``all_reduce``; None for all.
        direction: ``forward`` or ``backward``; None for both.
        group: one or several globs over names of mesh dimensions or groups, such as ``tp``; None
            for all.
        min_bytes: the least size of a site in bytes.

    Raises PolicyError for an unknown name or an invalid value.
    """

    module: str = "**"
    kind: Names = None
    direction: str | None = None
    group: Names = None
    min_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("kind", "group"):
            names = getattr(self, field)
            if names is not None and not isinstance(names, str):
                object.__setattr__(self, field, tuple(names))
        if self.kinds == ():
            raise PolicyError(f"kind=[]: must name a kind{nearest('', IN_GRAPHS)}")
        if self.groups == ():
            raise PolicyError("group=[]: must name a dimension of a mesh, such as 'tp'")
        for kind in self.kinds or ():
            if kind not in IN_GRAPHS:
                raise PolicyError(f"unknown kind {kind!r}{nearest(kind, IN_GRAPHS)}")
        if self.direction is not None and self.direction not in DIRECTIONS:
            meant = SHORT_DIRECTIONS.get(self.direction.lower(), self.direction)
            raise PolicyError(f"unknown direction {self.direction!r}{nearest(meant, DIRECTIONS)}")
        if self.min_bytes < 0:
            raise PolicyError(f"Rule(min_bytes={self.min_bytes}): must be at least 0")
        for kind in self.kinds or ():
            if self.algorithm and not any(find_algorithm(kind, spec) for spec in self.algorithm):
                algorithm(kind, self.algorithm[0])  # raises, with the nearest known name

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """The kinds that the rule covers, or None for all."""
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
        """Whether the rule is restricted to some modules."""
        return self.module.strip("*.") != ""

    @property
    def groups(self) -> tuple[str, ...] | None:
        """The globs over group labels, or None for all."""
        return as_names(self.group)

    def is_over(self, site: Site) -> bool:
        """Whether the rule names the group of a site."""
        return any(covers(glob, text) for glob in self.groups or () for text in site.labels)

    def _is_about(self, path: str) -> bool:
        """Whether the module glob covers a path.

        In a graph that serves several blocks (``layers.*``), a ``keep`` for one of them applies to
        all.
        """
        return covers(self.module, path) or (
            self.keep and "*" in path and covers(star(self.module), path)
        )

    @property
    def about(self) -> str:
        """The rule's conditions as written, and ``keep``: ``group='tp', keep=True``."""
        fields = ("module", "kind", "direction", "group", "min_bytes")
        values = [(name, getattr(self, name)) for name in fields]
        shown = [f"{name}={value!r}" for name, value in values if value != getattr(Rule, name)]
        return ", ".join([*(shown or ["module='**'"]), *(["keep=True"] if self.keep else [])])

    def __str__(self) -> str:
        fields = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"Rule({', '.join(fields)})"
