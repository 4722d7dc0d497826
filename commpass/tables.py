"""Files that people write: TOML, with the line of whatever is wrong in them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from commpass.errors import PolicyError


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
