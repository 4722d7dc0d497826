"""What the user allows: rules by module, kind, direction and group; codecs; an error budget.
Presets and TOML.

For one site, the nearest word counts: a ``compress`` or ``keep`` around it in the model, else the
first rule that matches, else the policy itself. What the nearer word leaves open, the policy fills
in.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from commpass import groups
from commpass.codecs import codec as codec_named
from commpass.collectives import DEFAULTS, MOST_CHUNKS, algorithm, check_name, own
from commpass.errors import PolicyError, nearest
from commpass.kinds import KINDS
from commpass.paths import star
from commpass.plan import Site
from commpass.tables import line_of, read_toml, toml_of

DIRECTIONS = ("forward", "backward")
PASS_NAMES = (
    "discover",
    "simplify",
    "group",
    "chunk",
    "candidates",
    "choose",
    "rewrite",
    "fuse",
    "lower",
    "move",
    "verify",
)
"""In the order in which they run."""
LOWERINGS = ("inline", "kernel")
Words = str | Sequence[str] | None


def _names(words: Words) -> tuple[str, ...] | None:
    return None if words is None else (words,) if isinstance(words, str) else tuple(words)


_TYPES: dict[str, Any] = {
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


class _Named:
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
            if (expected := _TYPES.get(str(field.type))) is None:
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
    what codes it, ``budget`` the largest error, and ``split`` the ``rows``."""

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

    @property
    def terms(self) -> Allowed:
        """What is allowed, without who says so."""
        return (
            dataclasses.replace(self, source="", budget="", split="") if self.codecs else Allowed()
        )

    def allow_like(self, other: Allowed) -> bool:
        """Whether both allow the same, whoever says so."""
        return self.terms == other.terms


NOTHING = Allowed()


@dataclass(frozen=True, kw_only=True)
class Word(_Named):
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
        object.__setattr__(self, "codec", _names(self.codec))
        object.__setattr__(self, "algorithm", _names(self.algorithm))
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

    def allowed(self, policy: Policy, source: str) -> Allowed:
        """What is allowed to a site that this word covers; what it leaves open is the policy's."""
        if self.keep:
            return Allowed(source=source, split=source, rows=1)
        what = (self.codec, self.algorithm, self.max_error)
        how = (self.chunks, self.rows, self.lowering)
        only_how = what == (None, None, None) and not self.force and any(how)
        budget = f"max_error of {source}"
        if self.max_error is None and source != policy.label:
            budget = f"max_error of {policy.label}, since {source} says none"
        return Allowed(
            codecs=tuple(self.codec) if self.codec is not None else policy.codecs,
            algorithms=tuple(self.algorithm) if self.algorithm is not None else policy.algorithms,
            named=self.algorithm is not None,
            max_error=self.max_error if self.max_error is not None else policy.max_error,
            force=self.force,
            source=policy.label if only_how else source,
            budget=budget,
            split=source if self.rows else policy.label,
            lowering=self.lowering or policy.lowering,
            chunks=self.chunks or policy.chunks,
            rows=self.rows or policy.rows,
        )

    def to_json(self) -> str:
        said = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(Word)
            if getattr(self, f.name) != f.default
        }
        return msgspec.json.encode(said, order="deterministic").decode()

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> Word:
        return Word(**msgspec.json.decode(text))


@dataclass(frozen=True, kw_only=True)
class Rule(Word):
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
            if self.algorithm and not any(own(kind, spec) for spec in self.algorithm):
                algorithm(kind, self.algorithm[0])  # raises, with the nearest that this kind has

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """The kinds that it is about, None for all."""
        return _names(self.kind)

    def matches(self, site: Site) -> bool:
        return (
            self._is_about(site.module)
            and (self.kinds is None or site.kind in self.kinds)
            and self.direction in (None, site.direction)
            and (self.groups is None or self.is_over(site))
            and site.common_bytes >= self.min_bytes
        )

    @property
    def groups(self) -> tuple[str, ...] | None:
        """The globs over group labels, None for all."""
        return _names(self.group)

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


@dataclass(frozen=True, kw_only=True)
class Policy(_Named):
    """What is allowed. ``codecs`` are the choices for every site that no rule covers; none means:
    leave alone.

    ``max_error`` is the largest allowed relative error of a compressed result;
    ``reassociate=False`` forbids even changes that only round a sum differently; ``skip`` names
    passes to leave out; ``lowering``, ``chunks`` and ``rows`` as in a rule. ``group_bytes`` is the
    largest site in bytes that is fused with others, 0 for none, and ``group_delay`` how many
    matmuls, convolutions and attentions fewer an exchange may then be hidden behind.
    ``more_memory`` is by what share the peak memory of a graph may rise where exchanges are moved
    so that they hide behind matmuls.
    """

    name: str = "custom"
    codecs: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = DEFAULTS
    rules: tuple[Rule, ...] = ()
    max_error: float | None = None
    reassociate: bool = True
    skip: tuple[str, ...] = ()
    off: bool = False
    lowering: str | None = None
    chunks: int | None = None
    rows: int | None = None
    group_bytes: int = 256 << 10
    group_delay: int = 2
    more_memory: float = 0.1
    leave_hidden: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        if not 0 <= self.more_memory <= 10:
            raise PolicyError(
                f"more_memory={self.more_memory!r}: must be a share of the peak memory, such as 0.1"
                " for ten percent, and at most 10"
            )
        if self.group_bytes < 0:
            raise PolicyError(
                f"group_bytes={self.group_bytes}: must be the bytes of the largest site that is"
                " fused with others, or 0 to fuse none"
            )
        if self.group_delay < 0:
            raise PolicyError(
                f"group_delay={self.group_delay}: must be a number of matmuls, convolutions and"
                " attentions, at least 0"
            )
        if not isinstance(self.rules, (list, tuple)) or not all(
            isinstance(rule, Rule) for rule in self.rules
        ):
            raise PolicyError(
                f"Policy(rules={self.rules!r}): expected a list of commpass.Rule(...)"
            )
        for field in ("codecs", "algorithms", "skip"):
            object.__setattr__(self, field, _names(getattr(self, field)) or ())
        object.__setattr__(self, "rules", tuple(self.rules))
        for name in self.skip:
            if name not in PASS_NAMES:
                raise PolicyError(f"skip: no pass {name!r}{nearest(name, PASS_NAMES)}")
        Word(  # checks them
            codec=self.codecs,
            algorithm=self.algorithms,
            max_error=self.max_error,
            lowering=self.lowering,
            chunks=self.chunks,
            rows=self.rows,
        )

    def allowed(self, site: Site) -> tuple[Allowed, int | None]:
        """What may be done to a site, and the index of the rule that says so, if it was a rule."""
        if self.off:
            return Allowed(source="policy 'off'"), None
        if site.word is not None:
            word = Word.from_json(site.word)
            return word.allowed(self, "keep" if word.keep else "compress(...) in the model"), None
        for index, rule in enumerate(self.rules):
            if rule.matches(site):
                return rule.allowed(self, f"rule {index + 1} ({rule.about})"), index
        return Word().allowed(self, self.label), None

    @property
    def label(self) -> str:
        """What reasons call it."""
        return f"policy {self.name!r}"

    @staticmethod
    def from_preset(preset: str, *, rules: Sequence[Rule] = (), **fields: Any) -> Policy:
        """A preset with something changed: ``Policy.from_preset("balanced", max_error=0.01)``.
        ``rules`` come before the preset's own. Raises PolicyError for a name that is not known."""
        if preset not in PRESETS:
            raise PolicyError(f"unknown preset {preset!r}{nearest(str(preset), PRESETS)}")
        base = PRESETS[preset]
        own = {f.name: getattr(base, f.name) for f in dataclasses.fields(Policy)}
        own["name"] = f"{preset}, changed" if rules or fields else preset
        return Policy(**own | fields | {"rules": (*rules, *base.rules)})

    @staticmethod
    def for_mesh(
        preset: str, *, tp: Words = None, dp: Words = None, pp: Words = None, **fields: Any
    ) -> Policy:
        """A preset of three dimensions, ``taco-3d`` or ``balanced-3d``, told which dimensions of
        this process's meshes are tensor, data and pipeline parallelism:
        ``Policy.for_mesh("taco-3d", tp="x", dp=("a", "b"))``.

        ``world`` is the group of all ranks. A role that is not told has the usual names
        (``DIMENSIONS``), after those that are; one that is ``()`` is left alone. ``fields`` as in
        ``from_preset``. Raises PolicyError for a preset without dimensions, for one that no mesh
        has, and for one with two roles.
        """
        if preset not in THREE_D:
            raise PolicyError(f"preset {preset!r} has no dimensions{nearest(str(preset), THREE_D)}")
        roles = {"tp": _names(tp), "dp": _names(dp), "pp": _names(pp)}
        told = {role: names for role, names in roles.items() if names is not None}
        known = groups.dimensions()
        role_of: dict[str, str] = {}
        for role, names in told.items():
            for name in names:
                if name not in known:
                    why = "no mesh of this process has such a dimension"
                    raise PolicyError(f"{role}={name!r}: {why}{nearest(name, known)}")
                if role_of.setdefault(name, role) != role:
                    raise PolicyError(f"{name!r} is both {role_of[name]} and {role}: give it one")
        over = told | {role: names for role, names in DIMENSIONS.items() if role not in told}
        return Policy.from_preset(preset, **{"rules": (), **fields})._over(preset, over)

    def _over(self, preset: str, over: Mapping[str, Sequence[str]]) -> Policy:
        """A policy whose last rules are those of a preset, with other dimensions."""
        own = self.rules[: len(self.rules) - len(PRESETS[preset].rules)]
        return dataclasses.replace(self, rules=(*own, *_rules_over(THREE_D[preset], over)))

    @staticmethod
    def from_toml(path: str | Path) -> Policy:
        """A policy from a file. Raises PolicyError with file, line and what was expected there."""
        return _from_toml(Path(path))

    def to_toml(self) -> str:
        """A file that ``from_toml`` reads back as an equal policy. Raises PolicyError for that of
        ``off``, which no file can say but as a preset."""
        if self.off:
            raise PolicyError(f"policy {self.name!r} is off, which a file says by preset = 'off'")
        said = {key: value for key, value in _said(self).items() if key != "rules"}
        said = {"name": self.name, **said}
        return toml_of(said, {"rule": [_said(rule) for rule in self.rules]})


def _said(of: Policy | Rule) -> dict[str, Any]:
    """The fields that are not what they are if nothing is said."""
    values = {f.name: (getattr(of, f.name), f.default) for f in dataclasses.fields(of)}
    return {name: value for name, (value, default) in values.items() if value != default}


DIMENSIONS = {
    "tp": ("tp", "tensor*", "model", "model_parallel", "mp"),
    "dp": ("dp", "dp_*", "*fsdp", "hsdp", "ddp", "data*", "shard", "replicate"),
    "pp": ("pp", "pipe*", "stage*"),
}
"""What the dimensions of meshes are usually called (torch's tutorials, torchtitan, Accelerate,
Lightning, Megatron): globs by role."""
SDP4BIT = (
    Rule(
        kind="all_gather",
        direction="forward",
        codec="difference(inner=sdp4bit(part=weight))",
        max_error=0.2,  # of the difference, not of the weight
    ),
    Rule(
        kind=("reduce_scatter", "all_reduce"),
        direction="backward",
        codec="sdp4bit(bits=8)",
        algorithm=("direct", "two_shot", "hierarchical(between=sdp4bit)"),
        max_error=0.2,  # of an all_reduce between hosts, whose 4 bits are twice in it
    ),
)
# Gradients go back as the published scripts have it, as plain 6-bit integers in tiles of 32.
TAHQUANT = (
    Rule(kind=("send", "recv"), direction="forward", codec="tahquant", max_error=0.15),
    Rule(
        kind=("send", "recv"),
        direction="backward",
        codec="int6(block=32, stored=bf16)",
        max_error=0.15,
    ),
)
SUMS_OF_LAYERS = ("all_reduce", "all_gather", "reduce_scatter")
"""What tensor parallelism sends, with sequence parallelism or without."""
THREE_D: dict[str, dict[str, tuple[Rule, ...]]] = {
    # TACO, section 5: tensor parallelism by TACO, data parallelism by SDP4Bit, pipeline
    # parallelism by TahQuant.
    "taco-3d": {
        "tp": (
            Rule(
                kind=SUMS_OF_LAYERS,
                codec="taco",
                algorithm=("two_shot", "direct"),
                max_error=0.04,
            ),
        ),
        "dp": SDP4BIT,
        "pp": TAHQUANT,
    },
    # Our own: at each of these sites no more bytes, and less error (benchmarks/three_d.py).
    "balanced-3d": {
        "tp": (
            Rule(
                kind=SUMS_OF_LAYERS,
                codec="rotated",
                algorithm=("two_shot", "direct"),
                max_error=0.04,
            ),
        ),
        "dp": (
            Rule(
                kind="all_gather",
                direction="forward",
                codec="difference(inner=table(bits=4, block=2048))",
                max_error=0.2,
            ),
            Rule(
                kind=("reduce_scatter", "all_reduce"),
                direction="backward",
                codec="rotated",
                algorithm=("direct", "two_shot", "hierarchical(between=rotated(bits=4))"),
                max_error=0.2,
            ),
        ),
        "pp": (
            Rule(
                kind=("send", "recv"),
                direction="forward",
                codec="tahquant(form=companded)",
                max_error=0.15,
            ),
            Rule(
                kind=("send", "recv"),
                direction="backward",
                codec="rotated(bits=6, block=32, scale=lsq)",
                max_error=0.15,
            ),
        ),
    },
}
"""Presets of three dimensions: the rules of each role, tensor, data and pipeline parallelism."""


def _rules_over(
    roles: Mapping[str, Sequence[Rule]], over: Mapping[str, Sequence[str]]
) -> Iterator[Rule]:
    """The rules of all roles over their dimensions, in the order of ``over``."""
    for role, names in over.items():
        for rule in roles[role] if names else ():
            yield dataclasses.replace(rule, group=tuple(names))


PRESETS: dict[str, Policy] = {
    "off": Policy(name="off", off=True),
    "lossless": Policy(name="lossless"),
    # bf16 is what every user has for nothing: it wins where coding takes longer than it saves.
    "balanced": Policy(name="balanced", codecs=("rotated", "int8", "bf16"), max_error=0.02),
    "aggressive": Policy(
        name="aggressive", codecs=("rotated(bits=4)", "rotated", "int8", "bf16"), max_error=0.25
    ),
    # TACO, sections 4.2 to 4.4: the all_reduces of tensor parallelism, forward and backward.
    # Better at the same bits: "balanced", a quarter of the error at 8.06 bits instead of 8.25.
    "taco": Policy(
        name="taco",
        rules=(Rule(kind="all_reduce", codec="taco", algorithm="two_shot"),),
        max_error=0.04,
    ),
    # EQuARX, section III: all_reduces of inference by one of its two rings, both stages coded.
    # Better at the same bits: "balanced".
    "equarx": Policy(
        name="equarx",
        rules=(
            Rule(
                kind="all_reduce",
                direction="forward",
                codec="equarx",
                algorithm=("ring", "semi_ring"),
            ),
        ),
        max_error=0.04,
    ),
    # ZipCCL, sections 3 and 4: nothing is lost; an all_reduce is a reduce_scatter, then an
    # all_gather. Better at the same error: Policy(codecs="exponent"), half a bit less.
    "zipccl": Policy(
        name="zipccl",
        rules=(
            Rule(
                kind=("all_gather", "all_to_all", "reduce_scatter", "all_reduce"),
                codec="exponent(planes=3)",
                algorithm=("direct", "two_shot"),
            ),
        ),
    ),
    # Low-bit tensor-parallel inference, section 3, without its calibrated channels: those are data
    # of a model, which a rule can name. Better at the same bits: "aggressive".
    "lowbit-tp": Policy(
        name="lowbit-tp",
        rules=(Rule(kind="all_reduce", direction="forward", codec="int4", algorithm="one_shot"),),
        max_error=0.15,
    ),
    # SSFusion, gradients of data parallelism: one entry in a hundred, the rest made up for later.
    # Whole, with its fusion buffers, by commpass.parallel.ssfusion.
    "ssfusion": Policy(
        name="ssfusion",
        rules=(
            Rule(
                kind="all_reduce",
                direction="backward",
                codec="dgc(density=0.01)",
                algorithm="sparse",
            ),
        ),
        max_error=1.0,
    ),
    # SDP4Bit, sharded data parallelism: weights as 4 bits of their difference to what receivers
    # hold; gradients in 8 bits inside a host, in 4 between hosts that the profile knows.
    # Better at the same bits: what "balanced-3d" has for data parallelism.
    "sdp4bit": Policy(name="sdp4bit", rules=SDP4BIT, max_error=0.2),
    # TahQuant: activations from one pipeline stage to the next, and their gradients back.
    # Better at the same bits: what "balanced-3d" has for pipeline parallelism.
    "tahquant": Policy(name="tahquant", rules=TAHQUANT, max_error=0.15),
    **{
        name: Policy(name=name, rules=tuple(_rules_over(roles, DIMENSIONS)))
        for name, roles in THREE_D.items()
    },
}
"""Policies by name. ``lossless`` is the default and loses no bit of what travels; the lossy ones
are opted into. Those with the names of papers are as published, as far as rules can say it, and
touch what the paper touches; docs/policies.md says what is left out, and compares them to ours."""


def policy_named(policy: str | Path | Policy) -> Policy:
    """A preset by name, a TOML file by path, or the policy itself."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Path):
        return Policy.from_toml(policy)
    if not isinstance(policy, str):
        raise PolicyError(
            f"{policy!r} is no policy: give one of {', '.join(PRESETS)}, a .toml file or a"
            " Policy(...)"
        )
    if policy in PRESETS:
        return PRESETS[policy]
    if policy.endswith(".toml"):
        return Policy.from_toml(policy)
    raise PolicyError(
        f"unknown policy {policy!r}{nearest(policy, PRESETS)} A path must end in .toml."
    )


@lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*|\?)", glob)
    body = "".join(
        {"**": ".*", "*": "[^.]*", "?": "[^.]"}.get(part, re.escape(part)) for part in parts
    )
    return re.compile(body + r"(\..*)?")


def covers(glob: str, path: str) -> bool:
    """Whether a module glob matches a path or one of the modules around it: ``layers.*`` covers
    ``layers.3.mlp``."""
    return glob == "" or _pattern(glob).fullmatch(path) is not None


# --- TOML -----------------------------------------------------------------------------------------


def _from_toml(path: Path) -> Policy:
    text, table = read_toml(path)
    rules = table.pop("rule", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise PolicyError(
            f"{path}:{line_of(text, 'rule')}: rules are written as [[rule]], each with its"
            " fields below"
        )
    preset = table.pop("preset", None)
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        line = line_of(text, "preset")
        raise PolicyError(
            f"{path}:{line}: unknown preset {preset!r}{nearest(str(preset), PRESETS)}"
        )
    base = PRESETS[preset] if preset else Policy(name=path.stem)
    made = tuple(_build(path, text, number, rule, Rule, {}) for number, rule in enumerate(rules))
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(Policy)} | {
        "name": path.stem,
        "rules": (*made, *base.rules),  # the first that matches counts: the file's own
    }
    return _build(path, text, None, table, Policy, fields)


def _build(
    path: Path,
    text: str,
    rule: int | None,
    table: Mapping[str, Any],
    kind: type,
    base: dict[str, Any],
) -> Any:
    """A Rule or Policy from a table; each field on its own, so that an error knows its line."""
    hidden = {"rules", "off"} if kind is Policy else set()
    known = {f.name for f in dataclasses.fields(kind)} - hidden
    types = {f.name: _TYPES[str(f.type)] for f in dataclasses.fields(kind) if f.name in known}
    where = "a rule" if rule is not None else "a policy"
    for key, value in table.items():
        place = f"{path}:{line_of(text, key, rule)}"
        if key not in known:
            extra = {"preset", "rule"} if kind is Policy else set()
            raise PolicyError(f"{place}: {where} has no field {key!r}{nearest(key, known | extra)}")
        try:
            base[key] = msgspec.convert(value, types[key])
            kind(**{key: base[key]})
        except msgspec.ValidationError as error:
            raise PolicyError(f"{place}: {key}: {str(error)[0].lower()}{str(error)[1:]}") from error
        except PolicyError as error:
            raise PolicyError(f"{place}: {error}") from error
    try:
        return kind(**base)
    except PolicyError as error:
        raise PolicyError(f"{path}:{line_of(text, None, rule)}: {error}") from error
