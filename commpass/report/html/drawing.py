"""The drawing of a graph, as the page holds it."""

from __future__ import annotations

from html import escape

from commpass.errors import CommpassError
from commpass.plan.dump import Dump
from commpass.report.graph import dot
from commpass.report.graph.view import of_sites

MOST = 400
"""Boxes of a drawing that can still be looked at, and takes seconds."""


def drawing(dump: Dump, prefix: str) -> str:
    """A graph as HTML: an SVG whose ids begin with ``prefix``, for a page has several, or a
    sentence that says why there is none; "" where nothing was recorded."""
    if not dump.after:
        return ""
    try:
        picture = of_sites(dump)
        if len(picture.boxes) > MOST:
            raise CommpassError(
                f"it would have {len(picture.boxes):,} boxes; 'commpass graph --module GLOB' draws"
                " a part of it"
            )
        text = dot.svg(picture)
    except CommpassError as error:
        return f"<p>There is no drawing: {escape(str(error))}.</p>"
    return text[text.index("<svg") :].replace(' id="', f' id="{prefix}')
