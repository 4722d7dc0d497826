"""Code blocks of the pages in docs/, for tests that run them as printed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^#+ (.*)$")


def blocks_of(page: str, language: str) -> list[tuple[str, str]]:
    """Return (heading above it, text) of each code block of a language, in order.

    ``page`` is a path from the root of the repository. Blocks without a language have ``""``.
    """
    heading, found = "", []
    opened: str | None = None
    lines: list[str] = []
    for line in (ROOT / page).read_text().splitlines():
        if opened is None and line.startswith("```"):
            opened, lines = line[3:], []
        elif opened is not None and line == "```":
            if opened == language:
                found.append((heading, "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            lines.append(line)
        elif title := HEADING.match(line):
            heading = title[1]
    return found


def block_under(page: str, heading: str, language: str = "python") -> str:
    """Return the only block of a language under a heading; AssertionError if it is not one."""
    found = [text for title, text in blocks_of(page, language) if title == heading]
    assert len(found) == 1, f"{page}: {len(found)} {language} blocks under {heading!r}"
    return found[0]
