"""The drawing of a graph, as the page holds it."""

from __future__ import annotations

from html import escape

from commpass.dump import Dump
from commpass.errors import CommpassError
from commpass.report.graph import dot
from commpass.report.graph.view import of_sites


def drawing(dump: Dump, prefix: str) -> str:
    """A graph as HTML: an SVG whose ids begin with ``prefix``, for a page has several, or a
    sentence that says why there is none; "" where nothing was recorded."""
    if not dump.after:
        return ""
    try:
        text = dot.svg(of_sites(dump))
    except CommpassError as error:
        return f"<p>There is no drawing: {escape(str(error))}.</p>"
    return text[text.index("<svg") :].replace(' id="', f' id="{prefix}')
