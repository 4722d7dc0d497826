"""README.md and docs/ agree with the repository: links, anchors, commands, and the break-even
table."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from importlib import import_module
from math import inf
from pathlib import Path

import pytest

import commpass.parallel
from commpass.policy import policy_named
from commpass.report.breakeven import LEAST, even, profile_of
from commpass.report.numbers import size

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
ROW = re.compile(r"^\| `([\w.-]+)` \| (CPUs|`[\w-]+`) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    names = [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", name).strip().lower().replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("room", [commpass, commpass.parallel], ids=lambda room: room.__name__)
def test_reference_has_every_public_name(room):
    headings = set(re.findall(r"heading: ([\w.]+)", (ROOT / "docs" / "api.md").read_text()))
    names = {f"{room.__name__}.{name}" for name in room.__all__}
    assert names - {"commpass.parallel"} <= headings


def test_reference_shows_what_the_names_stand_for():
    text = (ROOT / "docs" / "api.md").read_text()
    for full, shown in re.findall(r"^::: ([\w.]+)\n    options: {heading: ([\w.]+)}$", text, re.M):
        module, _, name = full.rpartition(".")
        assert name in _names_of(module), full
        assert name == shown.rpartition(".")[2], shown


def _names_of(module: str) -> Collection[str]:
    """Return the names of a module, or what its source defines if it needs another library."""
    try:
        return dir(import_module(module))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("commpass"):
            raise
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    return [each.name for each in tree.body if isinstance(each, (ast.ClassDef, ast.FunctionDef))]


def said(name: str, card: str | None, dtype: str) -> str:
    row = even(profile_of(name, card), 8, dtype, "all_reduce", policy_named("balanced"), 1 << 24)
    if row.from_bytes == inf:
        return "never"
    least = "any size" if row.from_bytes == LEAST else f"from {size(row.from_bytes)}"
    least = least.replace(".0 ", " ")
    if row.codec == "none":
        return least
    return f"{least}; {row.uncompressed_us / row.predicted_us:.1f} times as fast"


@pytest.mark.every
def test_break_even_table_of_the_readme_is_what_the_cost_model_says():
    rows = ROW.findall((ROOT / "README.md").read_text())
    assert len(rows) == 9
    for name, where, *cells in rows:
        for dtype, cell in zip(("float32", "bfloat16"), cells, strict=True):
            assert cell == said(name, None if where == "CPUs" else where.strip("`"), dtype), (
                name,
                where,
                dtype,
            )
