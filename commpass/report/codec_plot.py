"""Draw codecs as points: error against bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commpass.errors import PolicyError, unwritable
from commpass.report.plots import new_figure

if TYPE_CHECKING:
    from commpass.report.codecs import Measured

MARKS = "osD^vPX*<>dph"
FEW_BITS = 10.0
"""Codecs of more bits are in a panel of their own, if there are others."""
LABEL = 7.0
"""The font size of a label, in points."""
SAME_PLACE = 5.0
"""The distance below which two points are drawn as one, in pixels."""
AWAY = [
    (length * x, length * y)
    for length in (8, 16, 26, 38, 52, 68, 86, 106)
    for x, y in ((1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1), (0, -1))
]
"""Candidate positions of a label, in points from its own point, the best first."""


def plot(rows: Sequence[Measured], title: str, path: Path) -> None:
    """Draw error against bits, one labelled point for each codec.

    The line is the rate-distortion bound of a Gaussian, ``2^-bits``. Each family has its own colour
    and mark. Codecs of many bits have a panel of their own.
    """
    lossy = [row for row in rows if row.error > 0]
    panels = _panels(lossy)
    figure = new_figure(11, 8)
    families = list(map(_family, lossy))
    joined = len(set(families)) < len(families)
    notes = ["Dotted lines join the settings of one codec."] if joined else []
    if exact := [row.codec for row in rows if row.error == 0]:
        notes.append(f"Without error, and not in the picture: {', '.join(exact)}.")
    figure.supxlabel(" ".join(notes), fontsize=8, color="#555555")
    widths = [max(1.3, high - low) for low, high, _ in panels]
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
    colours = _family_colours(lossy)
    errors = [row.error for row in lossy] or [1.0]
    all_axes[0].set(
        yscale="log", ylabel="relative error (2-norm)", ylim=(min(errors) / 3, max(errors) * 2)
    )
    figure.suptitle(title)
    for axes, (low, high, some) in zip(all_axes, panels, strict=True):
        axes.set(xlim=(low, high), xlabel="bits a value" + ", side data included" * (low == 0))
        axes.plot((low, high), (2.0**-low, 2.0**-high), color="black", linewidth=1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        _points(axes, some, colours)
    middle = panels[0][1] * 0.55
    bound = all_axes[0].annotate(
        "bound $2^{-b}$ of a Gaussian",
        (middle, 2.0**-middle),
        (-8, -14),
        textcoords="offset points",
        ha="right",
    )
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # positions must not move from here on
    for axes, (_, _, some) in zip(all_axes, panels, strict=True):
        _label(figure, axes, some, colours, bound)
    try:
        figure.savefig(path, dpi=140)
    except OSError as error:
        raise PolicyError(unwritable(path, error)) from error
    except ValueError as error:
        raise PolicyError(f"{path}: end the name in .png, .svg or .pdf ({error})") from error


Panel = tuple[float, float, list["Measured"]]
"""The bits at both ends of a panel, and its codecs."""


def _panels(rows: Sequence[Measured]) -> list[Panel]:
    """Return one panel, or two if some codecs have many bits and others have few."""
    few = [row for row in rows if row.bits <= FEW_BITS]
    many = [row for row in rows if row.bits > FEW_BITS]
    if not few or not many:
        return [(0.0, max((row.bits for row in rows), default=8.0) + 0.7, list(rows))]
    bits = [row.bits for row in many]
    ends = max(row.bits for row in few) + 1.0
    return [(0.0, ends, few), (min(bits) - 1.0, max(bits) + 1.0, many)]


def _points(axes: Any, rows: Sequence[Measured], colours: dict[str, Any]) -> None:
    """Draw the points of each family, joined by a dotted line."""
    for number, (family, colour) in enumerate(colours.items()):
        points = sorted((row.bits, row.error) for row in rows if _family(row) == family)
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle=":" if len(points) > 1 else "",
                linewidth=0.8,
                color=colour,
                marker=MARKS[number % len(MARKS)],
            )


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
    """Write each point's name beside it, where it covers neither a point nor another name. Points
    at one place have one label."""
    from matplotlib.transforms import Bbox

    renderer = figure.canvas.get_renderer()
    at = [axes.transData.transform((row.bits, row.error)) for row in rows]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in at]
    taken.append(bound.get_window_extent(renderer))
    inside = axes.get_window_extent(renderer)
    for some in _at_one_place(sorted(rows, key=lambda row: (row.bits, -row.error)), axes):
        families = {_family(row) for row in some}
        colour = colours[families.pop()] if len(families) == 1 else "black"
        for x, y in AWAY:
            label = axes.annotate(
                ", ".join(row.codec for row in some),
                (some[0].bits, some[0].error),
                (x, y),
                textcoords="offset points",
                ha="left" if x > 0 else "right" if x < 0 else "center",
                va="center",
                fontsize=LABEL,
                bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.3},
                color=colour,
                arrowprops={"arrowstyle": "-", "lw": 0.4, "color": colour},
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


def _at_one_place(rows: Sequence[Measured], axes: Any) -> list[list[Measured]]:
    """Return the codecs whose points cover each other, in lists."""
    found: list[list[Measured]] = []
    for row in rows:
        x, y = axes.transData.transform((row.bits, row.error))
        for some in found:
            other_x, other_y = axes.transData.transform((some[0].bits, some[0].error))
            if max(abs(x - other_x), abs(y - other_y)) < SAME_PLACE:
                some.append(row)
                break
        else:
            found.append([row])
    return found


def _text_of(label: Any, renderer: Any) -> tuple[float, float, float, float]:
    """Return the place of a label without its line."""
    from matplotlib.text import Text

    box = Text.get_window_extent(label, renderer)
    return box.x0, box.y0, box.width, box.height
