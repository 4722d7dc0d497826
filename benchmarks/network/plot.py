"""Draw the measurements.

    python -m benchmarks.network.plot FILE.json [FILE.json ...] FILE.png

Each rate is a column with the share of the ideal and the speed-up of all_reduce over size, the
times of steps as bars, and losses over time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Row = dict[str, Any]
Rows = dict[str, list[Row]]
STYLES = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "dash and dot"}
PER_COLUMN, PER_ROW, DPI = 4.6, 3.3, 110
COLOURS = 10


def draw(rows: Rows, file: Path) -> None:
    """Write a PNG file. Raise ValueError if there is no measurement to draw."""
    shown = [
        (name, each) for name, painted in PAINTED.items() if rows.get(name) for each in painted
    ]
    if not shown:
        raise ValueError(f"nothing to draw: it shows {', '.join(PAINTED)}, and there is none")
    rates = sorted({row["gbit"] for name, _ in shown for row in rows[name]})
    size = (max(PER_COLUMN * len(rates), 2 * PER_COLUMN), PER_ROW * len(shown))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(shown), len(rates), squeeze=False)
    for axes, (name, paint) in zip(grid, shown, strict=True):
        for one, gbit in zip(axes, rates, strict=True):
            here = [row for row in rows[name] if row["gbit"] == gbit]
            one.set_visible(bool(here))
            if here:
                paint(one, here)
                one.set_title(f"{one.get_title()}, {gbit:g} Gbit/s", fontsize=10)
    figure.savefig(file, dpi=DPI)


def lines(axes: Axes, rows: list[Row], key: str, skipped: tuple[str, ...] = ()) -> None:
    """Draw lines over size, with a colour for each codec and a style for each number of ranks."""
    names = dict.fromkeys(row["name"] for row in rows)
    everyone = sorted({row["ranks"] for row in rows})
    for number, name in enumerate(names):
        for style, ranks in zip(STYLES, everyone, strict=False):
            some = [row for row in rows if (row["name"], row["ranks"]) == (name, ranks)]
            if name in skipped or not some:
                continue
            some.sort(key=lambda row: row["KiB"])
            label = name if ranks == everyone[0] else None
            values = [row[key] for row in some]
            sizes = [row["KiB"] for row in some]
            axes.plot(sizes, values, style, marker=".", color=f"C{number}", label=label)
    axes.set_xscale("log", base=2)
    ticks = sorted({row["KiB"] for row in rows})
    axes.set_xticks(ticks, [f"{kib}K" if kib < 1024 else f"{kib // 1024}M" for kib in ticks])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    lines = zip(STYLES.values(), everyone, strict=False)
    styles = ", ".join(
        f"{ranks} {line}" if len(everyone) > 1 else f"{ranks}" for line, ranks in lines
    )
    axes.set_xlabel(f"bytes a rank (ranks: {styles})", fontsize=8)


def shares(axes: Axes, rows: list[Row]) -> None:
    lines(axes, rows, "share")
    axes.set_ylim(0, 1.05)
    axes.set_title("all_reduce: share of the ideal")


def gains(axes: Axes, rows: list[Row]) -> None:
    lines(axes, rows, "of_plain", skipped=("plain",))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_title("all_reduce: times plain")


def bars(axes: Axes, rows: list[Row], by: str, cluster: Callable[[Row], str]) -> None:
    """Draw step times in clusters, with a colour for each ``by``.

    Lines are quartiles; the dark part is the time in which a rank waits.
    """
    names, clusters = (list(dict.fromkeys(map(of, rows))) for of in (lambda row: row[by], cluster))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        some = [row for row in rows if row[by] == name]
        low, middle, high = zip(*(row["ms"] for row in some), strict=True)
        left = [
            clusters.index(cluster(row)) + (number - (len(names) - 1) / 2) * width for row in some
        ]
        errors = [
            [m - a for m, a in zip(middle, low, strict=True)],
            [b - m for m, b in zip(middle, high, strict=True)],
        ]
        axes.bar(left, middle, width, yerr=errors, color=f"C{number}", label=name, ecolor="grey")
        waits = [row.get("exposed_ms", 0.0) for row in some]
        axes.bar(left, waits, width, color="black", alpha=0.35)
    axes.set_xticks(range(len(clusters)), clusters, fontsize=8)
    axes.set_ylabel("ms")
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08))


def steps(axes: Axes, rows: list[Row]) -> None:
    bars(axes, rows, "policy", lambda row: f"{row['model']}, {row['ranks']} ranks")
    axes.set_title("a step (dark: waiting)")


def losses(axes: Axes, rows: list[Row]) -> None:
    """Draw the training loss over the time that the steps took."""
    for number, row in enumerate(row for row in rows if row["learns"]):
        style = list(STYLES)[number // COLOURS % len(STYLES)]
        color = f"C{number % COLOURS}"
        axes.plot(row["elapsed_s"], row["losses"], style, color=color, label=row["way"])
    axes.set_xlabel("seconds of training", fontsize=8)
    axes.set_ylabel("loss in training", fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, ncols=2)
    axes.set_title("data-parallel training")


PAINTED: dict[str, tuple[Callable[[Axes, list[Row]], None], ...]] = {
    "reduces": (shares, gains),
    "steps": (steps,),
    "data_parallel": (losses,),
}
"""The measurements that are drawn, and how each is drawn."""

if __name__ == "__main__":
    *sources, target = map(Path, sys.argv[1:])
    merged: Rows = {}
    for source in sources:
        for name, rows in json.loads(source.read_text())["rows"].items():
            merged.setdefault(name, []).extend(rows)
    draw(merged, target)
