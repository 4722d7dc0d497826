"""Draw the picture of README.md: the time of a step by policy and link rate.

    python -m benchmarks.network.readme_picture docs/steps.png

The numbers are those of ``benchmarks/results/network_steps_*.json``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.network.plot import UNCOMPRESSED
from commpass.report.colours import colour_of
from commpass.report.plots import new_figure

RESULTS = Path(__file__).parents[1] / "results"
FILES = (
    "network_steps_100m_4.json",
    "network_steps_2_ranks.json",
    "network_steps_4_ranks.json",
)
"""Rows of a later file replace those of an earlier one."""
POLICIES = {
    "plain": UNCOMPRESSED,
    "bf16": "codec bf16",
    "lossless": "lossless",
    "balanced": "balanced",
}
"""The policies that are shown, from top to bottom, and their labels."""
MODEL = "llama"


@dataclass(frozen=True)
class Panel:
    """The steps on one number of ranks at one link rate: quartiles in milliseconds by policy."""

    ranks: int
    gbit: float
    steps: dict[str, tuple[float, float, float]]


def panels(folder: Path = RESULTS) -> list[Panel]:
    """Return the measured steps, by ranks and then from the fast to the slow link."""
    found: dict[tuple[int, float], dict[str, tuple[float, float, float]]] = {}
    for name in FILES:
        for row in json.loads((folder / name).read_text())["rows"]["steps"]:
            if row["model"] == MODEL and row["policy"] in POLICIES:
                low, middle, high = row["ms"]
                here = found.setdefault((row["ranks"], row["gbit"]), {})
                here[row["policy"]] = (low, middle, high)
    order = sorted(found, key=lambda key: (key[0], -key[1]))
    return [Panel(ranks, gbit, found[ranks, gbit]) for ranks, gbit in order]


def draw(shown: list[Panel]) -> Any:
    """Return a figure with a panel for each number of ranks and link rate."""
    rows = sorted({panel.ranks for panel in shown})
    rates = sorted({panel.gbit for panel in shown}, reverse=True)
    figure = new_figure(7.6, 2.1 * len(rows) + 0.5)
    grid = figure.subplots(len(rows), len(rates), squeeze=False)
    for panel in shown:
        paint(grid[rows.index(panel.ranks)][rates.index(panel.gbit)], panel)
    note = "less is better; lines: quartiles"
    figure.suptitle(f"time of a training step of a tensor-parallel Llama, in ms ({note})")
    return figure


def paint(axes: Axes, panel: Panel) -> None:
    """Draw a bar for each policy, with its quartiles, its time and its speedup."""
    base = panel.steps["plain"][1]
    for place, policy in enumerate(POLICIES):
        if policy not in panel.steps:
            axes.text(0, place, " not measured", va="center", color="#666666")
            continue
        low, middle, high = panel.steps[policy]
        errors = [[middle - low], [high - middle]]
        color = colour_of(policy)
        axes.barh(place, middle, 0.72, xerr=errors, color=color, ecolor="#333333")
        gain = "" if policy == "plain" else f" ({base / middle:.1f}x)"
        axes.text(high, place, f" {middle:,.0f}{gain}", va="center")
    axes.set_yticks(range(len(POLICIES)), POLICIES.values())
    axes.set_ylim(len(POLICIES) - 0.5, -0.5)
    axes.set_xlim(0, 1.35 * max(high for _, _, high in panel.steps.values()))
    axes.set_xticks([])
    axes.set_title(f"{panel.ranks} ranks, {panel.gbit:g} Gbit/s", loc="left", fontsize=11)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    draw(panels()).savefig(sys.argv[1], dpi=150)
