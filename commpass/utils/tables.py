"""Reads and writes files: TOML by users, with the line of each error, and JSON by commpass."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from commpass.errors import CommpassError, unwritable

T = TypeVar("T")


@dataclass(frozen=True)
class Format:
    """A kind of commpass JSON file.

    ``what`` is its name, ``version`` the newest version that can be read, ``again`` how to make
    another file, and ``error`` the exception for invalid files.
    """

    what: str
    version: int
    again: str
    error: type[CommpassError]

    @property
    def name(self) -> str:
        """The value of the ``format`` field in such a file."""
        return f"commpass-{self.what}"


def read_json(
    path: Path,
    form: Format,
    struct: type[T],
    from_older: Callable[[dict[str, Any]], dict[str, Any]] = lambda fields: fields,
) -> T:
    """Read a JSON file of commpass. Raises the format's error with the position and cause of any
    defect.

    ``from_older`` converts the content of a file of an older version.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise form.error(f"{path}: cannot be read: {error.strerror}") from error
    version = _field(head := _head(path, raw, form), "version")
    if type(version) is not int or version < 1:
        raise form.error(
            f"{path}: {form.what} version {version!r}: versions are 1 to {form.version};"
            f" {form.again}"
        )
    if version > form.version:
        raise form.error(
            f"{path}: {form.what} version {version!r} was written by commpass"
            f" {_field(head, 'commpass') or '?'}; this one reads up to version {form.version}:"
            " install a newer commpass"
        )
    try:
        if version < form.version:
            return msgspec.convert(from_older(msgspec.json.decode(raw)), struct)
        return msgspec.json.decode(raw, type=struct)
    except msgspec.ValidationError as error:
        raise form.error(f"{path}: damaged {form.what}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise form.error(f"{path}: it is not JSON ({error}); {form.again}") from error


def _head(path: Path, raw: bytes, form: Format) -> dict[str, msgspec.Raw]:
    """Return the fields of such a file, not yet decoded, so that a large file is decoded only
    once."""
    try:
        head = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:  # some other JSON
        head = {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        cut = "it is cut short" if "truncated" in str(error) else f"it is not JSON ({error})"
        raise form.error(f"{path}: {cut}; {form.again}") from error
    if _field(head, "format") != form.name:
        raise form.error(
            f'{path}: this is not a commpass {form.what} (no "format": "{form.name}" in it)'
        )
    return head


def _field(head: Mapping[str, msgspec.Raw], name: str) -> Any:
    return msgspec.json.decode(head[name]) if name in head else None


def write_whole(path: Path, raw: bytes, error: type[CommpassError]) -> None:
    """Write a file atomically. Raises ``error`` on failure."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(raw)
        part.rename(path)
    except OSError as failed:
        raise error(unwritable(path, failed)) from failed
    finally:
        part.unlink(missing_ok=True)


def toml_of(table: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return TOML of plain values, then of arrays of tables: ``[[rule]]`` for ``{"rule": [...]}``.

    Values are numbers, texts, booleans and lists of these.
    """
    lines = [f"{key} = {_toml_value(value)}" for key, value in table.items()]
    for name, rows in tables.items():
        for row in rows:
            lines += ["", f"[[{name}]]"]
            lines += [f"{key} = {_toml_value(value)}" for key, value in row.items()]
    return "\n".join(lines).strip() + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):  # JSON escapes are valid TOML, except that JSON writes DEL unescaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def read_toml(path: Path, error: type[CommpassError]) -> tuple[str, dict[str, Any]]:
    """Return a file's text and its parsed table. Raises ``error`` with file and line if it is not
    valid TOML."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError as failed:
        raise error(f"{path}: cannot be read: {failed.strerror}") from failed
    except UnicodeDecodeError as failed:
        raise error(f"{path}: not UTF-8 text") from failed
    except tomllib.TOMLDecodeError as failed:
        where = re.search(r"line (\d+)", str(failed))
        line = where.group(1) if where else len(text.splitlines())
        raise error(f"{path}:{line}: not TOML: {failed}{_unquoted(text, failed)}") from failed


def _unquoted(text: str, failed: tomllib.TOMLDecodeError) -> str:
    """Return what to write, if there is a word without quotes at the place of an error; else ""."""
    place = re.match(r"Invalid value \(at line (\d+), column (\d+)\)", str(failed))
    if place is None:
        return ""
    rest = text.splitlines()[int(place[1]) - 1][int(place[2]) - 1 :]
    if (word := re.match(r"[A-Za-z*][\w.*-]*(?:\([^)]*\))?", rest)) is None:
        return ""
    if word[0].lower() in ("true", "false"):
        return f": write {word[0].lower()}"
    return f": write it in quotes, {json.dumps(word[0])}"


def line_of(text: str, key: str | None, rule: int | None = None) -> int:
    """Return the line of a key, or of its table if ``key`` is None.

    The key is searched in the n-th [[rule]] if ``rule`` is given (or ``rule = [{...}]``), else
    above all tables.
    """
    if rule is not None and (inline := re.search(r"^\s*rule\s*=", text, re.M)):
        table = [
            brace.start() for brace in re.finditer(r"\{", text) if brace.start() > inline.end()
        ][rule]
        place = (
            re.compile(rf"[{{,\s][\"']?{re.escape(key)}[\"']?\s*=").search(text, table)
            if key
            else None
        )
        return text.count("\n", 0, place.end() if place else table) + 1
    seen, start = -1, 1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            parts = [part.strip(" \"'") for part in header.group(1).split(".")]
            if (parts == [key] and rule is None) or (
                rule is not None and seen == rule and parts[1:] == [key]
            ):
                return number
            seen += parts == ["rule"]
            start = number if seen == rule and parts == ["rule"] else start
        if (
            seen == (-1 if rule is None else rule)
            and key
            and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line)
        ):
            return number
        if key == "rule" and rule is None and re.match(r"\s*\[?\s*rule\b", line):
            return number
    return start


def line_at(text: str, path: Sequence[str]) -> int:
    """Return the line of a key of a TOML text, given as the names of its tables and its own.

    If the text has no such line, it is that of the innermost of its tables that has one, or else 1.
    A key of an inline table is on the line of that table.
    """
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+([^\]]+)\]", line):
            keys = table = _parts(header.group(1))
        elif entry := re.match(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=", line):
            keys = (*table, *_parts(entry.group(1)))
        else:
            continue
        for length in range(1, len(keys) + 1):
            found.setdefault(keys[:length], number)
    prefixes = (tuple(path[:length]) for length in range(len(path), 0, -1))
    return next((found[each] for each in prefixes if each in found), 1)


_KEY = r"(?:\"[^\"]*\"|'[^']*'|[\w-]+)"
"""A key of TOML, bare or in quotes."""


def _parts(keys: str) -> tuple[str, ...]:
    """Return the names of a dotted key."""
    return tuple(each.strip("\"'") for each in re.findall(_KEY, keys))
