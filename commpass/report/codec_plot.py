"""Draw codecs as points: error against bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commpass.errors import PolicyError
from commpass.report.plots import new_figure

if TYPE_CHECKING:
    from commpass.report.codecs import Measured

MARKS = "osD^vPX*<>dph"
LABEL = 6.5
"""The font size of a label, in points."""
AWAY = [
    (length * x, length * y)
    for length in (8, 16, 26, 38, 52, 68, 86, 106)
    for x, y in ((1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1), (0, -1))
]
"""Candidate positions of a label, in points from its own point, the best first."""


def plot(rows: Sequence[Measured], title: str, path: Path) -> None:
    """Draw error against bits, one labelled point for each codec.

    The line is the rate-distortion bound of a Gaussian, ``2^-bits``. Each family has its own colour
    and mark.
    """
    figure = new_figure(11, 8)
    axes = figure.add_subplot()
    lossy = [row for row in rows if row.error > 0]
    if exact := [row.codec for row in rows if row.error == 0]:
        left_out = f"without error, and not in the picture: {', '.join(exact)}"
        figure.supxlabel(left_out, fontsize=8, color="#555555")
    ends = [0.0, max((row.bits for row in lossy), default=8.0) + 0.7]
    axes.plot(ends, [2.0**-bits for bits in ends], color="black", linewidth=1)
    middle = ends[1] * 0.55
    bound = axes.annotate(
        "bound $2^{-b}$", (middle, 2.0**-middle), (-8, -14), textcoords="offset points", ha="right"
    )
    axes.set(
        yscale="log",
        xlabel="bits a value, side data included",
        ylabel="relative error",
        title=title,
        xlim=ends,
    )
    axes.grid(alpha=0.3)
    colours = _family_colours(lossy)
    for number, (family, colour) in enumerate(colours.items()):
        points = sorted((row.bits, row.error) for row in lossy if _family(row) == family)
        axes.plot(
            *zip(*points, strict=True),
            linestyle=":" if len(points) > 1 else "",
            linewidth=0.8,
            color=colour,
            marker=MARKS[number % len(MARKS)],
        )
    _label(figure, axes, lossy, colours, bound)
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path}: cannot be written: {error}") from error


def _family(row: Measured) -> str:
    return row.codec.partition("(")[0]


def _family_colours(rows: Sequence[Measured]) -> dict[str, Any]:
    """Return a dark colour for each family, with neighbours far apart in hue."""
    from matplotlib.colors import hsv_to_rgb

    families = list(dict.fromkeys(map(_family, rows)))
    return {
        family: hsv_to_rgb((number * 0.618 % 1.0, 0.85, 0.45 + 0.3 * (number % 2)))
        for number, family in enumerate(families)
    }


def _label(
    figure: Any, axes: Any, rows: Sequence[Measured], colours: dict[str, Any], bound: Any
) -> None:
    """Write each point's name beside it, where it covers neither a point nor another name."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # positions must not move from here on
    renderer = figure.canvas.get_renderer()
    at = [axes.transData.transform((row.bits, row.error)) for row in rows]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in at]
    taken.append(bound.get_window_extent(renderer))
    inside = axes.get_window_extent(renderer)
    for row in sorted(rows, key=lambda row: (row.bits, -row.error)):
        for x, y in AWAY:
            label = axes.annotate(
                row.codec,
                (row.bits, row.error),
                (x, y),
                textcoords="offset points",
                ha="left" if x > 0 else "right" if x < 0 else "center",
                va="center",
                fontsize=LABEL,
                bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.3},
                color=colours[_family(row)],
                arrowprops={"arrowstyle": "-", "lw": 0.4, "color": colours[_family(row)]},
            )
            box = label.get_window_extent(renderer)
            text = Bbox.from_bounds(*_text_of(label, renderer))
            fits = inside.x0 <= box.x0 and box.x1 <= inside.x1
            fits = fits and inside.y0 <= text.y0 and text.y1 <= inside.y1
            if fits and not any(text.overlaps(other) for other in taken):
                break
            label.remove()
        else:
            continue  # there is no room: the table has it
        taken.append(text.padded(4, 0))  # keep adjacent names apart


def _text_of(label: Any, renderer: Any) -> tuple[float, float, float, float]:
    """Return the place of a label without its line."""
    from matplotlib.text import Text

    box = Text.get_window_extent(label, renderer)
    return box.x0, box.y0, box.width, box.height
