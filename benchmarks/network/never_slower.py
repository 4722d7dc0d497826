"""Check whether a preset is ever slower than plain, over kinds, sizes and rates, for float32.

``x plain`` is how many times faster than plain, by quartiles over pairs of calls in one process. If
the preset leaves the graph unchanged, that is the same graph twice, and shows the noise: such rows
are marked ``unchanged`` and not judged by time. The worst of the others is named below the table.
"""

from __future__ import annotations

import torch

from .calls import KINDS, Contenders, compare_with_plain
from .shared import (
    LINKS,
    Measurement,
    Options,
    Row,
    by,
    on_links,
    spread,
    text,
)

NAME = "never_slower"
PRESETS = ("balanced", "lossless")
USUAL = {
    "ranks": [2],
    "gbit": [0.1, 1.0, 10.0],
    "kib": [4, 64, 256, 1024, 4096, 16384],
    "repeats": 200,
    "seconds": 20.0,
}
QUICK = {"gbit": [1.0], "kib": [4, 1024], "repeats": 3}


def measured(options: Options) -> list[Row]:
    rows: list[Row] = []
    for ranks, gbit in on_links(NAME, options):
        for kind, function in KINDS.items():
            contenders: Contenders = {"plain": (function, None)}
            contenders |= {preset: (function, preset) for preset in PRESETS}
            for kib in options.kib:
                case = (ranks, gbit, kind, kib, contenders, torch.float32)
                often = (options.repeats, options.seconds)
                rows += compare_with_plain(*case, f"ethernet-{gbit:g}g", *often)
    return rows


def middle(row: Row) -> float:
    """Return the median of the pairs."""
    return float(row["pairs"][1])


def remarks(rows: list[Row]) -> list[str]:
    ours = [row for row in rows if row["name"] != "plain"]
    changed = [row for row in ours if not row["unchanged"]]
    said = [f"unchanged: {len(ours) - len(changed)} of {len(ours)}"]
    if changed:
        worst = min(changed, key=middle)
        where = f"{worst['kind']}, {worst['KiB']} KiB, {worst['gbit']:g} Gbit/s, {worst['name']}"
        said.append(f"worst of the others: {middle(worst):.2f} times plain ({where})")
    return said


COLUMNS = {
    **LINKS,
    "kind": text("kind"),
    "KiB": text("KiB"),
    "preset": text("name"),
    "codec": lambda row: "unchanged" if row.get("unchanged") else row.get("codec") or "",
    "by": by,
    "ms": spread,
    "calls": text("calls"),
    "x plain": lambda row: f"{middle(row):.2f} [{row['pairs'][0]:.2f}, {row['pairs'][2]:.2f}]",
}
MEASUREMENT = Measurement(NAME, "presets and plain", USUAL, QUICK, measured, COLUMNS, remarks)
