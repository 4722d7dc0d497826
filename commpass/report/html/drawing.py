"""The drawing of a graph in the page."""

from __future__ import annotations

from commpass.dump import Dump


def drawing(dump: Dump) -> str:
    """The folded graph of a dump as SVG text, "" where there is none to show.

    TODO wire
    """
    return ""
