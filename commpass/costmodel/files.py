"""Profile files: JSON written by ``commpass probe``, and TOML written by users."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from commpass.costmodel.cards import CARDS
from commpass.costmodel.fields import check_fields, check_kernels, check_link
from commpass.costmodel.kernels import OLD_NAMES as KERNELS_NAMES
from commpass.costmodel.kernels import KernelRate
from commpass.costmodel.links import OLD_NAMES as LINK_NAMES
from commpass.costmodel.links import Link
from commpass.costmodel.profile import OLD_NAMES as PROFILE_NAMES
from commpass.costmodel.profile import Profile, link_named, profile_named
from commpass.errors import PolicyError, ProfileError, nearest
from commpass.utils.deprecated import warn_renamed
from commpass.utils.tables import Format, line_at, line_of, read_json, read_toml, write_whole

T = TypeVar("T")
FORMAT = Format("profile", 2, "measure again with `commpass probe`", ProfileError)
SUFFIXES = (".json", ".toml")
POLICY_KEYS = {"preset", "rule", "codecs", "algorithms", "max_error", "skip", "lowering"}
"""Keys that a policy's file has, and no profile's."""
BASE = ("base",)
"""What a table of a TOML file may have besides its fields: a name whose numbers it overrides."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a measurement; its numbers only hold for an equal one."""

    device: str
    processor: str
    cores: int
    hosts: int
    world_size: int
    backend: str
    torch: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured size of one kind of exchange.

    Each rank of ``group`` passed ``nbytes``, of which ``sent`` bytes left it. Times are in
    microseconds: the median, the fastest and the slowest quarter; ``fit_us`` is the time by the
    profile.
    """

    group: str
    kind: str
    ranks: int
    nbytes: int
    sent: int
    us: float
    low_us: float
    high_us: float
    fit_us: float

    @property
    def off(self) -> float:
        """The error of the fit, as a share of the measured time."""
        return (self.fit_us - self.us) / self.us


@dataclass(frozen=True, kw_only=True)
class ProfileFile:
    """A measured profile with the data it was fitted to. ``written`` is a time as ISO 8601."""

    format: str = FORMAT.name
    version: int = FORMAT.version
    commpass: str
    written: str
    machine: Machine
    profile: Profile
    points: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        if datetime.fromisoformat(self.written).tzinfo is None:
            raise ProfileError(f"written={self.written!r} has no time zone")


def digest(profile: Profile) -> str:
    """Return a digest of a profile without its name and source, equal to that of the profile read
    from a file."""
    converted = msgspec.convert(msgspec.to_builtins(profile), Profile)  # converts 60 to 60.0
    fields = {**msgspec.to_builtins(converted), "name": ""}
    del fields["source"]
    return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()[:16]


def age(file: ProfileFile) -> str:
    """Return how long ago a profile was measured, in hours or days."""
    hours = (datetime.now(UTC) - datetime.fromisoformat(file.written)).total_seconds() / 3600
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"


def measured_profile(file: ProfileFile) -> Profile:
    """Return the profile of a file, with the date of its measurement as its source."""
    return dataclasses.replace(file.profile, source=f"measured on {file.written[:10]}")


def write(path: Path, file: ProfileFile) -> None:
    """Write a profile atomically."""
    raw = msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"
    write_whole(path, raw, ProfileError)


def read(path: Path) -> ProfileFile:
    """Read a file of ``write``. Raises ProfileError with the error and its location."""
    found = read_json(path, FORMAT, ProfileFile, lambda old: _of_version_1(old, path))
    fields = msgspec.json.decode(path.read_bytes())["profile"]
    try:
        current = with_current_names(fields, lambda old, new: warn_renamed(f"{path}: {old}", new))
        check_fields(current)
    except ProfileError as error:
        raise ProfileError(f"{path}: {str(error).rstrip('.')}; {FORMAT.again}") from error
    if current != fields and found.version == FORMAT.version:
        return dataclasses.replace(found, profile=msgspec.convert(current, Profile))
    return found


def _of_version_1(file: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return what a file of version 1 holds, under the names of version 2."""
    warn_renamed(f"{path}: profile version 1", f"version {FORMAT.version}, of `commpass probe`")
    found = dict(file)
    if isinstance(profile := file.get("profile"), Mapping):
        found["profile"] = with_current_names(profile)
    for point in file.get("points", ()):
        if isinstance(point, dict) and point.get("group") in PROFILE_NAMES:
            point["group"] = PROFILE_NAMES[point["group"]]
    return found


def with_current_names(
    fields: Mapping[str, Any], note: Callable[[str, str], None] = lambda old, new: None
) -> dict[str, Any]:
    """Return a profile as data, with the names of this version. ``note`` gets old and new names.

    Raises ProfileError if something is given under both names.
    """
    found = _renamed(fields, PROFILE_NAMES, note)
    for key in ("link", "intra_host_link"):
        if isinstance(found.get(key), Mapping):
            found[key] = _renamed(found[key], LINK_NAMES, note)
    if isinstance(found.get("kernels"), Mapping):
        found["kernels"] = _renamed(found["kernels"], KERNELS_NAMES, note)
    if isinstance(links := found.get("links"), Mapping):
        found["links"] = {
            name: _renamed(link, LINK_NAMES, note) if isinstance(link, Mapping) else link
            for name, link in links.items()
        }
    return found


def _renamed(
    fields: Mapping[str, Any], names: Mapping[str, str], note: Callable[[str, str], None]
) -> dict[str, Any]:
    for old in fields.keys() & names.keys():
        if names[old] in fields:
            raise ProfileError(f"{old!r} is the old name of {names[old]!r}: give only one")
        note(old, names[old])
    return {names.get(name, name): value for name, value in fields.items()}


def profile_of(fields: Mapping[str, Any]) -> Profile:
    """Return a profile from data, such as a dump's. Raises msgspec.ValidationError, or ProfileError
    for a field that no profile has."""
    found = with_current_names(fields)
    check_fields(found)
    return msgspec.convert(found, Profile)


# --- by name or path, and TOML --------------------------------------------------------------------


def profile_from(profile: str | Path | Profile | None) -> Profile | None:
    """Return a profile by name or by the path of a .json or .toml file, or the profile itself.
    Raises PolicyError, or ProfileError for an invalid file."""
    if isinstance(profile, str) and profile.endswith(SUFFIXES):
        profile = Path(profile)
    if not isinstance(profile, Path):
        return profile_named(profile)
    if profile.suffix not in SUFFIXES:
        raise ProfileError(f"{profile}: a profile is a .json or a .toml file")
    if profile.suffix == ".json":
        return measured_profile(read(profile))
    return _from_toml(profile)


class UnknownBase(ProfileError):
    """A table whose ``base`` names nothing."""

    keys = ("base",)


Fail = Callable[[Sequence[str], str], ProfileError]
"""Makes the error of a file, from the names of the tables and the field that is wrong."""


def _from_toml(path: Path) -> Profile:
    """Read a TOML file. Its fields override the profile ``base``; a link is a table or a name."""
    text, table = read_toml(path, ProfileError)

    def fail(keys: Sequence[str], why: str) -> ProfileError:
        return ProfileError(f"{path}:{line_at(text, keys)}: {why}")

    base: Profile | None = None
    if "base" in table:
        try:
            base = profile_named(table.pop("base"))
        except PolicyError as error:
            raise fail(["base"], str(error)) from error
    try:
        table = with_current_names(
            table, lambda old, new: warn_renamed(f"{path}:{line_of(text, old)}: {old}", new)
        )
    except ProfileError as error:
        raise fail([], str(error)) from error
    known = [f.name for f in dataclasses.fields(Profile)]
    for key in table:
        if key not in known:
            if of_policy := sorted(POLICY_KEYS & table.keys()):
                why = (
                    f"this is a policy, since it has {of_policy[0]!r}, and no profile: write"
                    f" commpass.backend({str(path)!r}), or --policy {path}"
                )
                raise fail([of_policy[0]], why)
            raise fail([key], f"a profile has no field {key!r}{nearest(key, [*known, 'base'])}")
    fields = msgspec.to_builtins(base) if base is not None else {}
    fields["name"] = path.stem
    for key, value in table.items():
        fields[key] = _merged(key, value, fields.get(key), fail)
    if "source" not in table:
        fields["source"] = f"stated in {path.name}"
    if "link" not in fields:
        raise fail([], "a profile needs a [link] with alpha_us and gbytes_per_s, or a base")
    for name, link in fields.get("links", {}).items():
        _converted(link, Link, ("links", name), fail)
    kernels = fields.get("kernels")
    rates = kernels.get("rates", {}) if isinstance(kernels, Mapping) else {}
    for name, rate in rates.items():
        _converted(rate, KernelRate, ("kernels", "rates", name), fail)
    return _converted(fields, Profile, (), fail)


_PLACE = re.compile(r" - at `\$\.?(.*)`$")
"""Where a value is, at the end of an error of msgspec."""
_FIELD = re.compile(r"\w+\((\w+)=|.* required field `(\w+)`")
"""The field that an error is about, at its beginning."""
_TYPES = re.compile(r"Expected `(.+)`, got `(.+)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_EXPECTED = {
    "float": "a number",
    "int": "a whole number",
    "str": "a string",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
}
_GOT = {**_EXPECTED, "float": "a float", "int": "an integer", "bool": "a boolean"}
"""Names of msgspec's types in TOML."""


def _converted(value: Any, kind: type[T], keys: Sequence[str], fail: Fail) -> T:
    """Return a value of a file as a type; ``keys`` name the tables that it is in."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, PolicyError) as error:
        text = str(error)
        place = _PLACE.search(text)
        inner = re.findall(r"\w+", place.group(1)) if place else []
        field = _FIELD.match(text)
        named = [name for name in (field.groups() if field else ()) if name]
        why = _toml_error(_PLACE.sub("", text), keys, inner)
        raise fail([*keys, *inner, *named], why) from error


def _toml_error(text: str, keys: Sequence[str], inner: Sequence[str]) -> str:
    """Return an error of msgspec in words of TOML, with the table or the field that it is about.

    ``keys`` name the converted table, and ``inner`` the place in it.
    """
    table = f"[{'.'.join(keys)}]: " if keys else ""
    if missing := _MISSING.fullmatch(text):
        where = ".".join([*keys, *inner])
        return f"[{where}]: {missing[1]} is missing" if where else f"{missing[1]} is missing"
    if not (types := _TYPES.fullmatch(text)):
        return table + text
    expected = [_EXPECTED[name] for name in types[1].split(" | ") if name in _EXPECTED]
    field = f"{'.'.join(inner)} " if inner else ""
    got = _GOT.get(types[2], types[2])
    return f"{table}{field}must be {' or '.join(expected) or types[1]}, but is {got}"


def _merged(key: str, value: Any, below: Any, fail: Fail) -> Any:
    """Return a field of a file, merged with the value of the base."""
    if key == "links":
        if not isinstance(value, Mapping):
            raise fail([key], "links: must map names of groups to links")
        links = {name: _at([key, name], fail, _link, each, None) for name, each in value.items()}
        return {**(below or {}), **links}
    if key in ("link", "intra_host_link"):
        return _at([key], fail, _link, value, below)
    return _at([key], fail, _kernels, value, below) if key == "kernels" else value


def _at(keys: Sequence[str], fail: Fail, function: Callable[..., Any], *values: Any) -> Any:
    """Return what a function of values of a file gives; ``keys`` name where they are."""
    try:
        return function(*values)
    except PolicyError as error:
        raise fail([*keys, *getattr(error, "keys", ())], str(error)) from error


def _kernels(value: Any, below: Any) -> Any:
    """Return the rates of a file: the name of a GPU, or a table that may have a GPU as its base."""
    table: Any = {"base": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        return value
    rates = table.get("rates", {})
    if not isinstance(rates, Mapping):
        raise ProfileError(f"rates={rates!r}: must map names of codecs to encode_ns and decode_ns")
    check_kernels(table, BASE)
    if (named := table.get("base")) is not None:
        if not isinstance(named, str) or named not in CARDS:
            error = ProfileError if isinstance(value, str) else UnknownBase
            raise error(f"unknown card {named!r}{nearest(str(named), CARDS)}")
        below = msgspec.to_builtins(CARDS[named].kernels)
    if below is None:
        return value
    rest = {name: each for name, each in table.items() if name != "base"}
    return {**below, **rest, "rates": {**below.get("rates", {}), **rates}}


def _link(value: Any, below: Any) -> Any:
    check_link(value, BASE)
    if isinstance(value, str):
        return msgspec.to_builtins(link_named(value))
    if isinstance(value, Mapping) and "base" in value:
        rest = {name: each for name, each in value.items() if name != "base"}
        return {**msgspec.to_builtins(_base_link(str(value["base"]))), **rest}
    over = isinstance(below, Mapping) and isinstance(value, Mapping)
    return {**below, **value} if over else value


def _base_link(name: str) -> Link:
    try:
        return link_named(name)
    except PolicyError as error:
        raise UnknownBase(str(error)) from error
