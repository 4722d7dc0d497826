"""Module globs, as used by rules, annotations and the command line. Does not import torch."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*|\?)", glob)
    body = "".join(
        {"**": ".*", "*": "[^.]*", "?": "[^.]"}.get(part, re.escape(part)) for part in parts
    )
    return re.compile(body + r"(\..*)?", re.DOTALL)  # a name may contain a line break


def covers(glob: str, path: str) -> bool:
    """Whether a module glob matches a path or one of the modules around it: ``layers.*`` covers
    ``layers.3.mlp``."""
    return glob == "" or _pattern(glob).fullmatch(path) is not None
