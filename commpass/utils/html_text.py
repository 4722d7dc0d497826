"""A table with text above and below as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from commpass.utils.printable import clean

MOST_ROWS = 50
"""Further rows are only counted."""


def summary(
    lines: Iterable[str],
    header: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    notes: Iterable[str] = (),
) -> str:
    """Return lines of text, a table and notes as HTML without styles of its own. All text is
    escaped."""
    parts = [f"<p>{'<br>'.join(map(_text, lines))}</p>"]
    if rows:
        shown = [_row("td", row) for row in rows[:MOST_ROWS]]
        head = _row("th", header)
        parts.append(f"<table><thead>{head}</thead><tbody>{''.join(shown)}</tbody></table>")
    if len(rows) > MOST_ROWS:
        parts.append(f"<p>and {len(rows) - MOST_ROWS} more rows</p>")
    if below := list(map(_text, notes)):
        parts.append(f"<p>{'<br>'.join(below)}</p>")
    return "".join(parts)


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _text(text: str) -> str:
    return escape(clean(text))
