"""Policies: which codecs, error budgets and rules a user allows. Also presets and TOML files.

For one site, the nearest source counts: an enclosing ``compress`` or ``keep`` in the model, else
the first matching rule, else the policy itself. Settings that this source leaves open come from the
policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from commpass import groups
from commpass.codecs import codec as codec_named
from commpass.codecs.registry import NAMES as CODECS
from commpass.collectives import DEFAULTS
from commpass.errors import PolicyError, nearest, type_reason
from commpass.plan import Site
from commpass.policy import presets
from commpass.policy.lowbit import MAX_ERROR, SHARE, lowbit_rules
from commpass.policy.presets import DIMENSIONS, THREE_D, rules_over
from commpass.policy.rules import TYPES, Allowed, Annotation, Named, Names, Rule, as_names
from commpass.utils.deprecated import renamed_fields, warn_renamed, with_new_names
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
    "streams",
    "move",
    "verify",
    "sample",
)
"""The passes that a policy may skip, in the order in which they run."""


OLD_NAMES = {"watch": "error_sample_rate", "leave_hidden": "skip_overlapped"}
"""Fields of a policy by their old names, which work for one version."""


@renamed_fields(OLD_NAMES)
@dataclass(frozen=True, kw_only=True)
class Policy(Named):
    """What a user allows.

    Args:
        name: the name in plans and reports.
        codecs: the choices for every site without a rule, by name. If empty, such sites stay
            uncompressed.
        algorithms: the algorithms for sites without a rule, for all kinds. A kind that has none of
            them may use all of its own.
        rules: rules for some sites. The first that matches a site applies to it.
        max_error: the largest allowed relative error of a compressed result, such as 0.02. None for
            no limit, and no check on real values.
        reassociate: if False, forbids even changes that only round a sum differently.
        sequence_parallel: whether row-wise operators after a sum over ranks may run on a part of
            the rows on each rank. The user states that what they add to the sum, or scale it by, is
            equal on all ranks, as in tensor parallelism.
        skip: names of passes to skip.
        off: leave everything as it is, annotations of the model included.
        lowering: as in a rule.
        chunks: as in a rule.
        rows: as in a rule.
        group_bytes: the largest site in bytes that is fused with others; 0 fuses none.
        group_delay: by how many matmuls, convolutions and attentions fusion may reduce the overlap
            of an exchange.
        selective: of fused gradients with a selecting codec, the smallest are sent whole, and the
            others are sparsified accordingly (SSFusion, section IV.B).
        more_memory: by what share the peak memory of a graph may rise if exchanges are moved to
            overlap matmuls.
        skip_overlapped: whether sites that overlap with compute stay uncompressed.
        error_sample_rate: the share of a graph's calls on which the real error of its compressed
            sites is measured (docs/verdict.md). 0 adds nothing to the graph.
        check_calls: the number of first calls of a graph on which real values of lossy sites are
            checked against ``max_error``; 0 for none.

    Raises PolicyError for an unknown name or an invalid value.
    """

    EXAMPLE: ClassVar[str] = "codecs='int8'"
    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "preset": "for a preset write Policy.from_preset('balanced')"
    }

    name: str = "custom"
    codecs: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = DEFAULTS
    rules: tuple[Rule, ...] = ()
    max_error: float | None = None
    reassociate: bool = True
    sequence_parallel: bool = False
    skip: tuple[str, ...] = ()
    off: bool = False
    lowering: str | None = None
    chunks: int | None = None
    rows: int | None = None
    group_bytes: int = 256 << 10
    group_delay: int = 2
    selective: bool = False
    more_memory: float = 0.1
    skip_overlapped: bool = True
    error_sample_rate: float = 0.0
    check_calls: int = 2

    def __post_init__(self) -> None:
        self._check_types()
        if not 0 <= self.more_memory <= 10:
            raise PolicyError(
                f"more_memory={self.more_memory!r}: must be a share of the peak memory, such as 0.1"
                " for ten percent, and at most 10"
            )
        if not 0 <= self.error_sample_rate <= 1:
            raise PolicyError(
                f"error_sample_rate={self.error_sample_rate!r}: must be the share of steps on which"
                " errors are measured, such as 0.01 for one in a hundred, and at most 1; 0 for none"
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
        Annotation(  # validates the fields
            codec=self.codecs,
            algorithm=self.algorithms,
            max_error=self.max_error,
            lowering=self.lowering,
            chunks=self.chunks,
            rows=self.rows,
        )

    def allowed(self, site: Site) -> tuple[Allowed, int | None]:
        """Return what is allowed at a site, and the index of the rule that decides it, if any."""
        if self.off:
            return Allowed(source="policy 'off'"), None
        if site.annotation is not None:
            annotation = Annotation.from_json(site.annotation)
            source = "keep" if annotation.keep else "compress(...) in the model"
            return _allowed(self, annotation, source, names_site=True), None
        for index, rule in enumerate(self.rules):
            if rule.matches(site):
                source = f"rule {index + 1} ({rule.about})"
                return _allowed(self, rule, source, rule.names_module), index
        return _allowed(self, Annotation(), self.label), None

    def mixes_values(self, annotation: str | None = None) -> bool:
        """Return whether a lossy codec, in which the code of a value depends on others, is allowed
        at some site: at those with the ``annotation``, as JSON, or else at any without one."""
        if self.off:
            return False
        terms = (Annotation(), *self.rules)
        if annotation is not None:
            terms = (Annotation.from_json(annotation),)
        named = {spec for each in terms if not each.keep for spec in each.codec or self.codecs}
        return any(
            not (each.lossless or (each.block == 1 and each.has_independent_blocks))
            for each in map(codec_named, named)
        )

    @property
    def label(self) -> str:
        """The name of the policy in reasons."""
        return f"policy {self.name!r}"

    @staticmethod
    def from_preset(preset: str, *, rules: Sequence[Rule] = (), **fields: Any) -> Policy:
        """Return a changed preset: ``Policy.from_preset("balanced", max_error=0.01)``.

        ``rules`` precede the preset's own. Raises PolicyError for an unknown name.
        """
        if preset not in PRESETS:
            raise PolicyError(f"unknown preset {preset!r}{nearest(str(preset), PRESETS)}")
        base = PRESETS[preset]
        own = {f.name: getattr(base, f.name) for f in dataclasses.fields(Policy)}
        own["name"] = f"{preset}, changed" if rules or fields else preset
        changed = with_new_names("Policy", fields, OLD_NAMES)
        return Policy(**own | changed | {"rules": (*rules, *base.rules)})

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
        """Return a policy of low-bit tensor-parallel inference by the paper's method, from a
        calibration.

        ``Policy.lowbit_tp(Calibration.read("model.json"))``

        Args:
            calibration: the calibration of the model.
            share: the share of channels with the widest ranges, in each all_reduce of forward, that
                are sent in bf16. A number, a mapping from module globs to numbers (1/64 for
                others), or ``"sensitivity"``. The latter keeps no more in total, and more where the
                model is sensitive to errors.
            bits: the bits of the static grid of all other channels.
            algorithm: ``two_shot`` and ``ring``, unlike ``one_shot``, encode sums as well.
            per_rank: if True, each rank has its own scales; if False, the ranks share them.
            max_error: the error budget of the rules.
            **fields: as in ``from_preset``.

        Raises PolicyError if nothing was calibrated.
        """
        rules = lowbit_rules(calibration.places, share, bits, algorithm, per_rank, max_error)
        return Policy(**{"name": "lowbit-tp, calibrated", **fields, "rules": rules})

    @staticmethod
    def for_mesh(
        preset: str, *, tp: Names = None, dp: Names = None, pp: Names = None, **fields: Any
    ) -> Policy:
        """Return a preset of three dimensions, ``taco-3d`` or ``balanced-3d``, for the meshes of
        this process.

        ``Policy.for_mesh("taco-3d", tp="x", dp=("a", "b"))`` names the dimensions of tensor, data
        and pipeline parallelism. ``world`` is the group of all ranks. A role without argument has
        the usual names (``DIMENSIONS``), after the given ones; the sites of a role ``()`` stay
        uncompressed. ``fields`` are as in ``from_preset``.

        Raises PolicyError for a preset without dimensions, for a dimension that no mesh has, and
        for one with two roles.
        """
        if preset not in THREE_D:
            raise PolicyError(f"preset {preset!r} has no dimensions{nearest(str(preset), THREE_D)}")
        roles = {"tp": as_names(tp), "dp": as_names(dp), "pp": as_names(pp)}
        arguments = {*roles, *OLD_NAMES, *(field.name for field in dataclasses.fields(Policy))}
        for argument in fields.keys() - arguments:
            raise PolicyError(
                f"for_mesh has no role or field {argument!r}{nearest(argument, arguments)}"
            )
        given = {role: names for role, names in roles.items() if names is not None}
        known = groups.dimensions()
        role_of: dict[str, str] = {}
        for role, names in given.items():
            for name in names:
                if name not in known:
                    why = "no mesh of this process has such a dimension; make the mesh first"
                    raise PolicyError(f"{role}={name!r}: {why}{nearest(name, known)}")
                if role_of.setdefault(name, role) != role:
                    raise PolicyError(f"{name!r} is both {role_of[name]} and {role}: give it one")
        over = given | {role: names for role, names in DIMENSIONS.items() if role not in given}
        return Policy.from_preset(preset, **{"rules": (), **fields})._over(preset, over)

    def _over(self, preset: str, over: Mapping[str, Sequence[str]]) -> Policy:
        """Return a policy whose last rules are those of a preset, for other dimensions."""
        own = self.rules[: len(self.rules) - len(PRESETS[preset].rules)]
        return dataclasses.replace(self, rules=(*own, *rules_over(THREE_D[preset], over)))

    @staticmethod
    def from_toml(path: str | Path) -> Policy:
        """Read a policy from a file. Raises PolicyError with file, line and what was expected
        there."""
        return _from_toml(Path(path))

    def to_toml(self) -> str:
        """Return the text of a file that ``from_toml`` reads back as an equal policy.

        Raises PolicyError for the policy ``off``, which a file can only name as a preset.
        """
        if self.off:
            raise PolicyError(f"policy {self.name!r} is off, which a file says by preset = 'off'")
        fields = {key: value for key, value in _set_fields(self).items() if key != "rules"}
        fields = {"name": self.name, **fields}
        return toml_of(fields, {"rule": [_set_fields(rule) for rule in self.rules]})


def _allowed(
    policy: Policy, annotation: Annotation, source: str, names_site: bool = False
) -> Allowed:
    """Return what is allowed at a site that an annotation or a rule covers. Open settings come from
    the policy.

    If ``names_site``, its codec (or ``force``) applies to any values of the site.
    """
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
    """Return the fields that differ from their defaults."""
    values = {f.name: (getattr(of, f.name), f.default) for f in dataclasses.fields(of)}
    return {name: value for name, (value, default) in values.items() if value != default}


PRESETS = {name: Policy(name=name, **fields) for name, fields in presets.PRESETS.items()}


def policy_named(policy: str | Path | Policy) -> Policy:
    """Return a preset by name, a TOML file by path, or the policy itself."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, (str, Path)) and str(policy).endswith(".json"):
        raise PolicyError(
            f"{policy}: a policy is a .toml file. A profile, as `commpass probe` writes it, is"
            f" given as profile={str(policy)!r}"
        )
    if isinstance(policy, Path):
        return Policy.from_toml(policy)
    if not isinstance(policy, str):
        names = isinstance(policy, (list, tuple)) and all(isinstance(each, str) for each in policy)
        if names and policy:
            raise PolicyError(_codecs_given(policy))
        raise PolicyError(
            f"{policy!r} is no policy: give one of {', '.join(PRESETS)}, a .toml file or a"
            " Policy(...)"
        )
    if policy in PRESETS:
        return PRESETS[policy]
    if policy.endswith(".toml"):
        return Policy.from_toml(policy)
    if policy.partition("(")[0] in CODECS:
        raise PolicyError(_codecs_given(policy))
    raise PolicyError(
        f"unknown policy {policy!r}{nearest(policy, PRESETS)} A path must end in .toml."
    )


def _codecs_given(names: Any) -> str:
    given = names if isinstance(names, str) else list(names)
    return f"{given!r} is no policy: write commpass.Policy(codecs={given!r}) for one with codecs"


# --- TOML -----------------------------------------------------------------------------------------

PROFILE_KEYS = {"base", "link", "links", "intra_host_link", "kernels", "margin", "ports"}
"""Keys that a profile's file has, and no policy's."""


def _from_toml(path: Path) -> Policy:
    text, table = read_toml(path, PolicyError)
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
        "rules": (*made, *base.rules),  # the file's own rules come first; the first match counts
    }
    return _build(path, text, None, table, Policy, fields)


def _build(
    path: Path,
    text: str,
    rule: int | None,
    table: Mapping[str, Any],
    kind: type[Policy] | type[Rule],
    base: dict[str, Any],
) -> Any:
    """Build a Rule or Policy from a table. Each field is checked separately, so that an error has
    its line."""
    hidden = {"rules", "off"} if kind is Policy else set()
    known = {f.name for f in dataclasses.fields(kind)} - hidden
    types = {f.name: TYPES[str(f.type)] for f in dataclasses.fields(kind) if f.name in known}
    where = "a rule" if rule is not None else "a policy"
    for given, value in table.items():
        place = f"{path}:{line_of(text, given, rule)}"
        key = kind.OLD_NAMES.get(given, given)
        if key != given:
            if key in table:
                raise PolicyError(f"{place}: {given!r} is the old name of {key!r}: give only one")
            warn_renamed(f"{place}: {given}", key)
        if key not in known:
            extra = {"preset", "rule"} if kind is Policy else set()
            if kind is Policy and (of_profile := sorted(PROFILE_KEYS & table.keys())):
                raise PolicyError(
                    f"{place}: this is a profile, since it has {of_profile[0]!r}, and no policy:"
                    f' write commpass.backend("balanced", profile={str(path)!r}), or'
                    f" --profile {path}"
                )
            raise PolicyError(f"{place}: {where} has no field {key!r}{nearest(key, known | extra)}")
        try:
            base[key] = msgspec.convert(value, types[key])
            kind(**{key: base[key]})
        except msgspec.ValidationError as error:
            raise PolicyError(f"{place}: {key}: {type_reason(error)}") from error
        except PolicyError as error:
            raise PolicyError(f"{place}: {error}") from error
    try:
        return kind(**base)
    except PolicyError as error:
        raise PolicyError(f"{path}:{line_of(text, None, rule)}: {error}") from error
