"""What the user allows: rules by module, kind, direction and group; codecs; an error budget.
Presets and TOML.

For one site, the nearest word counts: a ``compress`` or ``keep`` around it in the model, else the
first rule that matches, else the policy itself. What the nearer word leaves open, the policy fills
in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from commpass import groups
from commpass.collectives import DEFAULTS
from commpass.errors import PolicyError, nearest
from commpass.plan import Site
from commpass.policy import presets
from commpass.policy.lowbit import MAX_ERROR, SHARE, lowbit_rules
from commpass.policy.presets import DIMENSIONS, THREE_D, rules_over
from commpass.policy.rules import TYPES, Allowed, Annotation, Named, Rule, Words, as_names
from commpass.utils.tables import line_of, read_toml, toml_of

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
    "sample",
)
"""In the order in which they run."""


@dataclass(frozen=True, kw_only=True)
class Policy(Named):
    """What is allowed. ``codecs`` are the choices for every site that no rule covers; none means:
    leave alone.

    ``max_error`` is the largest allowed relative error of a compressed result;
    ``reassociate=False`` forbids even changes that only round a sum differently; ``skip`` names
    passes to leave out; ``lowering``, ``chunks`` and ``rows`` as in a rule. ``group_bytes`` is the
    largest site in bytes that is fused with others, 0 for none, and ``group_delay`` how many
    matmuls, convolutions and attentions fewer an exchange may then be hidden behind.
    ``selective``: of gradients that are selected from and fused the smallest are sent whole, and
    the others thinned for that (SSFusion, section IV.B).
    ``more_memory`` is by what share the peak memory of a graph may rise where exchanges are moved
    so that they hide behind matmuls. ``watch`` is the share of calls of a graph on which the real
    error of its compressed sites is measured (docs/verdict.md): 0 for none, and then nothing is
    added to the graph.
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
    selective: bool = False
    more_memory: float = 0.1
    leave_hidden: bool = True
    watch: float = 0.0
    check_calls: int = 2

    def __post_init__(self) -> None:
        self._check_types()
        if not 0 <= self.more_memory <= 10:
            raise PolicyError(
                f"more_memory={self.more_memory!r}: must be a share of the peak memory, such as 0.1"
                " for ten percent, and at most 10"
            )
        if not 0 <= self.watch <= 1:
            raise PolicyError(
                f"watch={self.watch!r}: must be the share of steps on which errors are measured,"
                " such as 0.01 for one in a hundred, and at most 1; 0 for none"
            )
        if self.check_calls < 0:
            raise PolicyError(
                f"check_calls={self.check_calls}: must be the number of first calls on which error"
                " budgets are checked on real values, such as 2; 0 for none"
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
            object.__setattr__(self, field, as_names(getattr(self, field)) or ())
        object.__setattr__(self, "rules", tuple(self.rules))
        for name in self.skip:
            if name not in PASS_NAMES:
                raise PolicyError(f"skip: no pass {name!r}{nearest(name, PASS_NAMES)}")
        Annotation(  # checks them
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
            word = Annotation.from_json(site.word)
            source = "keep" if word.keep else "compress(...) in the model"
            return _allowed(self, word, source, names_site=True), None
        for index, rule in enumerate(self.rules):
            if rule.matches(site):
                source = f"rule {index + 1} ({rule.about})"
                return _allowed(self, rule, source, rule.names_module), index
        return _allowed(self, Annotation(), self.label), None

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
    def lowbit_tp(
        calibration: Any,
        share: float | str | Mapping[str, float] = SHARE,
        *,
        bits: int = 4,
        algorithm: str | Sequence[str] = "one_shot",
        per_rank: bool = True,
        max_error: float = MAX_ERROR,
        **fields: Any,
    ) -> Policy:
        """Low-bit tensor-parallel inference by the paper's own method, from a calibration:
        ``Policy.lowbit_tp(Calibration.read("model.json"))``.

        Of each all_reduce in forward, the ``share`` of channels with the widest ranges travel in
        bf16, the others on a static grid of ``bits`` bits. ``share`` is a number, one for each
        module by globs (1/64 for others), or ``"sensitivity"``: no more is kept in all, and more
        where the model minds errors. Scales are each rank's own, or with ``per_rank=False`` shared.
        ``algorithm`` may also be ``two_shot`` or ``ring``, by which sums are coded as well.
        ``fields`` as in ``from_preset``. Raises PolicyError where nothing was calibrated.
        """
        rules = lowbit_rules(calibration.places, share, bits, algorithm, per_rank, max_error)
        return Policy(**{"name": "lowbit-tp, calibrated", **fields, "rules": rules})

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
        roles = {"tp": as_names(tp), "dp": as_names(dp), "pp": as_names(pp)}
        words = {*roles, *(field.name for field in dataclasses.fields(Policy))}
        for word in fields.keys() - words:
            raise PolicyError(f"for_mesh has no role or field {word!r}{nearest(word, words)}")
        told = {role: names for role, names in roles.items() if names is not None}
        known = groups.dimensions()
        role_of: dict[str, str] = {}
        for role, names in told.items():
            for name in names:
                if name not in known:
                    why = "no mesh of this process has such a dimension; make the mesh first"
                    raise PolicyError(f"{role}={name!r}: {why}{nearest(name, known)}")
                if role_of.setdefault(name, role) != role:
                    raise PolicyError(f"{name!r} is both {role_of[name]} and {role}: give it one")
        over = told | {role: names for role, names in DIMENSIONS.items() if role not in told}
        return Policy.from_preset(preset, **{"rules": (), **fields})._over(preset, over)

    def _over(self, preset: str, over: Mapping[str, Sequence[str]]) -> Policy:
        """A policy whose last rules are those of a preset, with other dimensions."""
        own = self.rules[: len(self.rules) - len(PRESETS[preset].rules)]
        return dataclasses.replace(self, rules=(*own, *rules_over(THREE_D[preset], over)))

    @staticmethod
    def from_toml(path: str | Path) -> Policy:
        """A policy from a file. Raises PolicyError with file, line and what was expected there."""
        return _from_toml(Path(path))

    def to_toml(self) -> str:
        """A file that ``from_toml`` reads back as an equal policy. Raises PolicyError for that of
        ``off``, which no file can say but as a preset."""
        if self.off:
            raise PolicyError(f"policy {self.name!r} is off, which a file says by preset = 'off'")
        said = {key: value for key, value in _set_fields(self).items() if key != "rules"}
        said = {"name": self.name, **said}
        return toml_of(said, {"rule": [_set_fields(rule) for rule in self.rules]})


def _allowed(
    policy: Policy, annotation: Annotation, source: str, names_site: bool = False
) -> Allowed:
    """What is allowed to a site that a word covers; what it leaves open is the policy's. One that
    ``names_site`` and a codec, or forces one, means whatever the site carries."""
    if annotation.keep:
        return Allowed(source=source, split=source, rows=1)
    what = (annotation.codec, annotation.algorithm, annotation.max_error)
    how = (annotation.chunks, annotation.rows, annotation.lowering)
    only_how = what == (None, None, None) and not annotation.force and any(how)
    budget = f"max_error of {source}"
    if annotation.max_error is None and source != policy.label:
        budget = f"max_error of {policy.label}, since {source} says none"
    return Allowed(
        codecs=tuple(annotation.codec) if annotation.codec is not None else policy.codecs,
        algorithms=tuple(annotation.algorithm)
        if annotation.algorithm is not None
        else policy.algorithms,
        named=annotation.algorithm is not None,
        max_error=annotation.max_error if annotation.max_error is not None else policy.max_error,
        force=annotation.force,
        source=policy.label if only_how else source,
        budget=budget,
        split=source if annotation.rows else policy.label,
        lowering=annotation.lowering or policy.lowering,
        chunks=annotation.chunks or policy.chunks,
        rows=annotation.rows or policy.rows,
        names_site=names_site and (annotation.codec is not None or annotation.force),
    )


def _set_fields(of: Policy | Rule) -> dict[str, Any]:
    """The fields that are not what they are if nothing is said."""
    values = {f.name: (getattr(of, f.name), f.default) for f in dataclasses.fields(of)}
    return {name: value for name, (value, default) in values.items() if value != default}


PRESETS = {name: Policy(name=name, **fields) for name, fields in presets.PRESETS.items()}


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
    types = {f.name: TYPES[str(f.type)] for f in dataclasses.fields(kind) if f.name in known}
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
