"""Build the page: a template, styles and scripts become one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from commpass.errors import CommpassError
from commpass.report.colours import colour_of
from commpass.report.html.compare import compare
from commpass.report.html.data import part
from commpass.report.html.sparklines import KINDS, missing
from commpass.report.html.verdict import is_slower, verdict
from commpass.report.numbers import micros, ms, percent, ratio, size
from commpass.report.run import Run
from commpass.utils.tables import write_whole
from commpass.utils.version import own_version

SCRIPTS = ("format.js", "table.js", "bars.js", "sites.js", "timeline.js", "page.js")
"""The parts of one script, in this order: later ones use what earlier ones define."""


def write(runs: Sequence[Run], path: Path, measured: Sequence[str] = ()) -> None:
    """Write the page of some runs, completely or not at all. ``measured`` are sentences on the
    measured times of many steps, which its verdict then has.

    Raise CommpassError if the file cannot be written.
    """
    check(path)
    write_whole(path.resolve(), page(runs, measured).encode("utf-8", "replace"), CommpassError)


def check(path: Path) -> None:
    """Raise CommpassError for a path that cannot become the page."""
    if path.is_dir():
        raise CommpassError(f"{path}: is a folder; name a file in it: {path / 'report.html'}")
    if path.suffix.lower() != ".html":
        raise CommpassError(f"{path}: a report is an .html file: {path.with_suffix('.html')}")
    if not path.resolve().parent.is_dir():
        raise CommpassError(f"{path}: there is no folder {path.parent}; make it first")
    if not os.access(path.resolve().parent, os.W_OK | os.X_OK):
        raise CommpassError(
            f"{path}: {path.resolve().parent} is not writable; name a file in another folder: -o"
            " /tmp/report.html"
        )


def page(runs: Sequence[Run], measured: Sequence[str] = ()) -> str:
    """Return the page as text. The first two of several runs are compared."""
    found = [part(key(at), each) for at, each in enumerate(runs)]
    comparison = compare(*runs[:2]) if len(runs) > 1 else None
    script = _text(SCRIPTS)
    data = {
        "runs": {each.key: each.tables for each in found},
        "kinds": KINDS,
        "changes": comparison.changes if comparison else (),
    }
    return (
        _environment()
        .get_template("page.html")
        .render(
            parts=found,
            comparison=comparison,
            verdict=verdict(runs, comparison, measured),
            style=_text(["page.css"]),
            script=script,
            hash=_hash(script),
            data=_embedded(data),
            version=own_version(),
        )
    )


def key(at: int) -> str:
    """Return the letter of a run: A, B, ..., Z, and numbers after that."""
    return ascii_uppercase[at] if at < len(ascii_uppercase) else f"R{at + 1}"


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("commpass.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"size": size, "micros": micros, "ms": ms, "percent": percent, "rest": rest}
    made.filters |= {"thousands": "{:,}".format}
    made.globals |= {"arrow": arrow, "change": change, "missing": missing, "ratio": ratio}
    made.globals |= {"colour_of": colour_of, "is_slower": is_slower}
    return made


def change(before: float, after: float) -> str:
    """Format by how much a number grew or shrank."""
    if before <= 0:
        return "-"
    return "the same" if after == before else f"{after / before - 1:+.0%}"


def arrow(before: str, after: str) -> str:
    """Format before and after, or one of them if they are equal. Lines break only at the arrow."""
    was, now = (text.replace(" ", "\u00a0") for text in (before, after))
    return now if was == now else f"{was} → {now}"


def rest(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy or a profile without empty fields."""
    return {key: value for key, value in table.items() if value not in (None, "", [], {})}


def _text(names: Iterable[str]) -> str:
    folder = resources.files("commpass.report.html") / "templates"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _hash(script: str) -> str:
    """Return the hash for the page's content policy, which allows this script only."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded(data: Any) -> str:
    """Return JSON that cannot end the element that contains it."""
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
