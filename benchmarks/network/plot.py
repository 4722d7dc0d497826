"""Draw the measurements at one link rate, one panel below the other.

    python -m benchmarks.network.plot FILE.json [FILE.json ...] FILE.png

A panel shows the speedup of all_reduce over size, the times of steps by policy, or losses over
time. Colours are those of all pictures (``commpass.report.colours``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from commpass.report.colours import WAITING, colour_of
from commpass.report.plots import new_figure

Row = dict[str, Any]
Rows = dict[str, list[Row]]
PREFERRED_GBIT = 1.0
WIDTH, PANEL, DPI = 7.5, 3.9, 140
"""The width of the picture and the height of a panel in inches, and its resolution."""
UNCOMPRESSED = "without commpass"
LABELS = {"plain": UNCOMPRESSED, "plain bf16": "bf16 in the program"}
"""Labels of policies whose names in the files are no words of their users."""
VARIANT = "--"
"""The style of a line whose colour another line has."""


def draw(rows: Rows, file: Path) -> None:
    """Write a PNG file. Raise ValueError if there is no measurement to draw."""
    shown = [(name, panel) for name, panel in PAINTED.items() if rows.get(name)]
    if not shown:
        raise ValueError(f"nothing to draw: it shows {', '.join(PAINTED)}, and there is none")
    figure = new_figure(WIDTH, PANEL * len(shown))
    for axes, (name, panel) in zip(
        figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True
    ):
        panel(axes, at_one_rate(rows[name]))
    figure.savefig(file, dpi=DPI)


def at_one_rate(rows: Iterable[Row]) -> list[Row]:
    """Return the rows at 1 Gbit/s, or at the lowest rate if there are none."""
    rows = list(rows)
    rates = {row["gbit"] for row in rows}
    rate = PREFERRED_GBIT if PREFERRED_GBIT in rates else min(rates)
    return [row for row in rows if row["gbit"] == rate]


def gains(axes: Axes, rows: list[Row]) -> None:
    """Draw the speedup of all_reduce over size, for the fewest ranks."""
    ranks = min(row["ranks"] for row in rows)
    rows = sorted((row for row in rows if row["ranks"] == ranks), key=lambda row: row["KiB"])
    used = set[str]()
    for name in dict.fromkeys(row["name"] for row in rows if row["name"] != "plain"):
        some = [row for row in rows if row["name"] == name]
        style, color = (VARIANT if colour_of(name) in used else "-"), colour_of(name)
        used.add(color)
        points = [row["KiB"] for row in some], [row["of_plain"] for row in some]
        axes.plot(
            *points, style, marker="o", markersize=4, color=color, label=LABELS.get(name, name)
        )
    axes.axhline(1, color=colour_of("plain"), linewidth=2, label=UNCOMPRESSED)
    ticks = sorted({row["KiB"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{k} KiB" if k < 1024 else f"{k // 1024} MiB" for k in ticks])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="bytes of each rank", ylabel=f"times as fast as {UNCOMPRESSED}")
    axes.set_title(f"all_reduce over {ranks} ranks, {rows[0]['gbit']:g} Gbit/s", loc="left")
    axes.grid(alpha=0.3)
    legend_beside(axes)


def steps(axes: Axes, rows: list[Row]) -> None:
    """Draw step times in clusters of models and ranks, with a colour for each policy.

    Lines are quartiles; the dark part is the time for which a rank waits. Variants of a policy are
    left out.
    """
    rows = [row for row in rows if "," not in row["policy"]]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    clusters = list(dict.fromkeys((row["model"], row["ranks"]) for row in rows))
    width = 0.85 / len(policies)
    for number, policy in enumerate(policies):
        some = [row for row in rows if row["policy"] == policy]
        low, middle, high = zip(*(row["ms"] for row in some), strict=True)
        shift = (number - (len(policies) - 1) / 2) * width
        left = [clusters.index((row["model"], row["ranks"])) + shift for row in some]
        errors = [
            [m - a for m, a in zip(middle, low, strict=True)],
            [b - m for m, b in zip(middle, high, strict=True)],
        ]
        style = {"color": colour_of(policy), "ecolor": "grey", "label": LABELS.get(policy, policy)}
        axes.bar(left, middle, 0.92 * width, yerr=errors, **style)
        waits = [row.get("exposed_ms", 0.0) for row in some]
        label = "a rank waits" if number == len(policies) - 1 else None
        axes.bar(left, waits, 0.92 * width, color=WAITING, alpha=0.45, label=label)
    names = [f"{model}\n{ranks} ranks" for model, ranks in clusters]
    axes.set_xticks(range(len(clusters)), names)
    axes.set_ylabel("ms a step")
    axes.set_title(f"time of a training step by policy, {rows[0]['gbit']:g} Gbit/s", loc="left")
    axes.grid(axis="y", alpha=0.3)
    legend_beside(axes)


def losses(axes: Axes, rows: list[Row]) -> None:
    """Draw the training loss over the time that the steps took."""
    for number, row in enumerate(row for row in rows if row["learns"]):
        style = ("-", "--", ":", "-.")[number // 10 % 4]
        color = f"C{number % 10}"
        axes.plot(row["elapsed_s"], row["losses"], style, color=color, label=row["way"])
    axes.set(xlabel="seconds of training", ylabel="loss in training")
    axes.grid(alpha=0.3)
    axes.set_title(f"data-parallel training, {rows[0]['gbit']:g} Gbit/s", loc="left")
    legend_beside(axes)


def legend_beside(axes: Axes) -> None:
    """Draw the legend beside the panel, where it covers no data."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


PAINTED: dict[str, Callable[[Axes, list[Row]], None]] = {
    "reduces": gains,
    "steps": steps,
    "data_parallel": losses,
}
"""The measurements that are drawn, and how each is drawn."""

KEYS = ("ranks", "gbit", "KiB", "name", "model", "policy", "way")
"""What identifies a measurement."""


def merged(sources: Iterable[Path]) -> Rows:
    """Return the rows of several files; a later measurement of the same thing replaces an
    earlier."""
    found: dict[str, dict[tuple, Row]] = {}
    for source in sources:
        for name, rows in json.loads(source.read_text())["rows"].items():
            by_key = {tuple(row.get(key) for key in KEYS): row for row in rows}
            found.setdefault(name, {}).update(by_key)
    return {name: list(rows.values()) for name, rows in found.items()}


if __name__ == "__main__":
    *files, target = map(Path, sys.argv[1:])
    draw(merged(files), target)
