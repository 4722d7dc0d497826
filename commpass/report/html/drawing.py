"""The drawing of a graph, as the page holds it."""

from __future__ import annotations

from commpass.dump import Dump


def drawing(dump: Dump, prefix: str) -> str:
    """A graph as HTML: an SVG whose ids begin with ``prefix``, for a page has several, or a
    sentence that says why there is none; "" where nothing is to be said.

    The drawings of ``commpass graph`` come here once they are text: see ``report.graph``.
    """
    return ""
