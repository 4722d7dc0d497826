"""Draw a graph for the page."""

from __future__ import annotations

from html import escape

from commpass.errors import CommpassError
from commpass.plan.dump import Dump
from commpass.report.graph import dot
from commpass.report.graph.view import of_sites

MOST = 400
"""Most boxes of a drawing that is still readable and takes seconds."""


def drawing(dump: Dump, prefix: str) -> str:
    """Return a graph as HTML: an SVG, or a sentence that gives the reason why there is none.

    Its ids begin with ``prefix``, since a page has several. Return "" if nothing was recorded.
    """
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
