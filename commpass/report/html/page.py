"""The page itself: a template, styles and scripts become one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from commpass.errors import CommpassError
from commpass.report.html.compare import compare
from commpass.report.html.data import run
from commpass.report.html.runs import Read
from commpass.report.html.sparklines import KINDS, missing
from commpass.report.tables import micros, ratio, size
from commpass.report.timeline import ms
from commpass.utils.tables import write_whole

SCRIPTS = ("format.js", "table.js", "bars.js", "sites.js", "timeline.js", "page.js")
"""Of one script, in this order: later ones use what earlier ones define."""


def write(runs: Sequence[Read], path: Path) -> None:
    """Writes the page of some runs, whole or not at all. Raises CommpassError where the file cannot
    be written."""
    check(path)
    write_whole(path.resolve(), page(runs).encode("utf-8", "replace"), CommpassError)


def check(path: Path) -> None:
    """Raises CommpassError for a path that cannot become the page."""
    if path.is_dir():
        raise CommpassError(f"{path}: is a folder; name a file in it: {path / 'report.html'}")
    if path.suffix.lower() != ".html":
        raise CommpassError(f"{path}: a report is an .html file: {path.with_suffix('.html')}")
    if not path.resolve().parent.is_dir():
        raise CommpassError(f"{path}: there is no folder {path.parent}; make it first")


def page(runs: Sequence[Read]) -> str:
    """The page as text. The first two of several runs are compared."""
    found = [run(key(at), each) for at, each in enumerate(runs)]
    comparison = compare(*found[:2]) if len(found) > 1 else None
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
            runs=found,
            comparison=comparison,
            style=_text(["page.css"]),
            script=script,
            hash=_hash(script),
            data=_embedded(data),
            version=metadata.version("commpass"),
        )
    )


def key(at: int) -> str:
    """The letter of a run: A, B, ..., Z, and numbers from then on."""
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
    return made


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def change(before: float, after: float) -> str:
    """By how much a number grew or shrank."""
    if before <= 0:
        return "-"
    return "the same" if after == before else f"{after / before - 1:+.0%}"


def arrow(before: str, after: str) -> str:
    """What was and what is, or one of them where they are the same. Lines break at the arrow
    alone."""
    was, now = (text.replace(" ", "\u00a0") for text in (before, after))
    return now if was == now else f"{was} → {now}"


def rest(table: Mapping[str, Any]) -> dict[str, Any]:
    """A policy or a profile without what it leaves open."""
    return {key: value for key, value in table.items() if value not in (None, "", [], {})}


def _text(names: Iterable[str]) -> str:
    folder = resources.files("commpass.report.html") / "templates"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _hash(script: str) -> str:
    """What the page's own policy lets run: this script, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded(data: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
