"""Draw the steps of all cases by policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commpass.report.colours import WAITING, colour_of
from commpass.report.plots import new_figure

HEIGHT = 0.2


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw a bar for each case and policy: the step relative to ``off``, with its exposed part."""
    rows = found["rows"]
    figure = new_figure(11, 0.6 * len(rows) + 1)
    figure.get_layout_engine().set(w_pad=0.2, h_pad=0.1)
    axes = figure.subplots()
    policies = list(rows[0]["policies"])
    for number, name in enumerate(policies):
        places = [at + HEIGHT * (number - 1.5) for at in range(len(rows))]
        base = [row["policies"]["off"]["step_ms"] for row in rows]
        for field, color, label in (
            ("step_ms", colour_of(name), name),
            ("exposed_ms", WAITING, "waits for exchanges" if number == len(policies) - 1 else None),
        ):
            times = [row["policies"][name][field] for row in rows]
            shares = [100 * time / whole for time, whole in zip(times, base, strict=True)]
            axes.barh(places, shares, HEIGHT, color=color, label=label)
    axes.set_yticks(
        range(len(rows)),
        [f"{row['model']}, {row['gpus']:,} GPUs, {row['machine']}" for row in rows],
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title("Predicted time of a training step, relative to policy off")
    axes.set(xlabel="% of the step under policy off", xlim=(0, 104))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=90)
