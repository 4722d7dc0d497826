"""What a test found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one test: whether ``what`` works, its ``state`` in words, and what that means
    for commpass."""

    what: str
    state: str
    works: bool
    meaning: str = ""
