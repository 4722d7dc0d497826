"""Figures of matplotlib, which need no display."""

from __future__ import annotations

from typing import Any

from commpass.errors import CommpassError


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of that size in inches. Raise CommpassError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommpassError("a picture needs: pip install 'commpass[graph]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
