"""Files: TOML that people write, with the line of whatever is wrong in it, and JSON of our own."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from commpass.errors import CommpassError, PolicyError

T = TypeVar("T")


@dataclass(frozen=True)
class Format:
    """A kind of JSON files of our own: what it is called, the newest ``version`` that is read, how
    another file is made, and the error that tells what is wrong."""

    what: str
    version: int
    again: str
    error: type[CommpassError]

    @property
    def name(self) -> str:
        """The ``format`` that such a file says."""
        return f"commpass-{self.what}"


def read_json(path: Path, form: Format, struct: type[T]) -> T:
    """What a file of our own holds. Raises the format's error that says what is wrong with it and
    where."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise form.error(f"{path}: cannot be read: {error.strerror}") from error
    version = _field(head := _head(path, raw, form), "version")
    if not isinstance(version, int) or version > form.version:
        raise form.error(
            f"{path}: {form.what} version {version!r} was written by commpass"
            f" {_field(head, 'commpass') or '?'}; this one reads up to version {form.version}:"
            " install a newer commpass"
        )
    try:
        return msgspec.json.decode(raw, type=struct)
    except msgspec.ValidationError as error:
        raise form.error(f"{path}: damaged {form.what}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise form.error(f"{path}: it is not JSON ({error}); {form.again}") from error


def _head(path: Path, raw: bytes, form: Format) -> dict[str, msgspec.Raw]:
    """The fields of such a file, not yet decoded: nothing is made of a big file twice."""
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
    """Writes a file, whole or not at all. Raises ``error`` where that cannot be."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(raw)
        part.rename(path)
    except OSError as failed:
        raise error(f"{path}: cannot be written: {failed.strerror}") from failed
    finally:
        part.unlink(missing_ok=True)


def toml_of(table: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """TOML of plain values, then of arrays of tables: ``[[rule]]`` for ``{"rule": [...]}``. Values
    are numbers, texts, booleans and lists of those."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in table.items()]
    for name, rows in tables.items():
        for row in rows:
            lines += ["", f"[[{name}]]"]
            lines += [f"{key} = {_toml_value(value)}" for key, value in row.items()]
    return "\n".join(lines).strip() + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL, which JSON writes bare
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """A file's text and what it says. Raises PolicyError with the file and the line where it is no
    TOML."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"line (\d+)", str(error))
        line = where.group(1) if where else len(text.splitlines())
        raise PolicyError(f"{path}:{line}: not TOML: {error}") from error


def line_of(text: str, key: str | None, rule: int | None = None) -> int:
    """The line of a key: of the n-th [[rule]] if ``rule`` is given (or ``rule = [{...}]``), else
    above all tables; of the table if ``key`` is None."""
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
