"""docs/published.md and its picture, and what is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.published.results import Published, Summary, misses, summary

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "published.md", DOCS / "published.png"
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"
SPLITS = ("fit", "held-out")


def write(rows: Sequence[Published], page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Replace the tables of the page and the picture."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{tables(rows)}\n{END}{after}", encoding="utf-8")
    draw(rows, picture)


def tables(rows: Sequence[Published]) -> str:
    """Return what the page says of the rows, as Markdown."""
    kernels = [row for row in rows if row.level == "kernel"]
    lines = [
        "| Rows | Times | Median error | Within 10 % | Within 25 % | Which is faster: right |",
        "|---|---|---|---|---|---|",
        *(
            _line(f"**{split}**", summary(row for row in kernels if row.split == split))
            for split in SPLITS
        ),
        *(
            _line(f"{split}: {source}", summary(of))
            for split in SPLITS
            for source, of in _by_source(kernels, split)
            if summary(of).times
        ),
        "",
        "Rows whose time is off by more than 25 %, or whose faster side is not the predicted one:",
        "",
        "| Source | Hardware, ranks | Rows | Errors of their times | Why |",
        "|---|---|---|---|---|",
        *_missed(rows),
        "",
        "Rows that are not predicted:",
        "",
        "| Source | Rows | Why |",
        "|---|---|---|",
        *(f"| {source} | {count} | {why} |" for (source, why), count in _left_out(rows).items()),
        "",
        "<details>",
        "<summary>All predicted rows, in microseconds; ratios are relative to the plain time"
        "</summary>",
        "",
        "| Source | Hardware, ranks | Exchange | Measured: plain, compressed | Predicted |",
        "|---|---|---|---|---|",
        *(_whole(row) for row in rows if _is_predicted(row)),
        "",
        "</details>",
    ]
    return "\n".join(lines)


def _by_source(rows: Iterable[Published], split: str) -> list[tuple[str, list[Published]]]:
    found: dict[str, list[Published]] = {}
    for row in rows:
        if row.split == split:
            found.setdefault(row.source, []).append(row)
    return list(found.items())


def _line(name: str, of: Summary) -> str:
    signs = f"{of.right:.0%} of {of.signs}" if of.signs else "-"
    shares = (f"{share:.0%}" for share in (of.median, of.within_10, of.within_25))
    return f"| {name} | {of.times} | {' | '.join(shares)} | {signs} |"


def _is_predicted(row: Published) -> bool:
    return row.predicted_plain is not None or row.predicted_compressed is not None


def _left_out(rows: Iterable[Published]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        if not _is_predicted(row):
            found[row.source, row.why] = found.get((row.source, row.why), 0) + 1
    return found


def _missed(rows: Iterable[Published]) -> list[str]:
    """Return a line for all rows of a source, a host and a reason that miss."""
    found: dict[tuple[str, str, str], list[Published]] = {}
    for row in rows:
        if _is_predicted(row) and misses(row):
            found.setdefault((row.source, _host(row), row.why), []).append(row)
    return [
        f"| {source} | {host} | {len(of)} | {_errors(of)} | {why} |"
        for (source, host, why), of in found.items()
    ]


def _errors(rows: Iterable[Published]) -> str:
    errors = [error for row in rows for error in row.errors if error is not None]
    return f"{min(errors):+.0%} to {max(errors):+.0%}"


def _host(row: Published) -> str:
    return f"{row.hardware}, {row.ranks}"


def _whole(row: Published) -> str:
    size = "size of a range" if row.bytes is None else f"{row.bytes:,} B"
    cells = (
        row.source,
        _host(row),
        f"{row.collective}, {row.dtype}, {size}, {row.codec}",
        _times(row.unit, row.measured_plain, row.measured_compressed),
        _times(row.unit, row.predicted_plain, row.predicted_compressed),
    )
    return f"| {' | '.join(cells)} |"


def _times(unit: str, *times: float | None) -> str:
    digits = 2 if unit == "ratio" else 1
    return ", ".join("-" if time is None else f"{time:,.{digits}f}" for time in times)


def draw(rows: Sequence[Published], path: Path) -> None:
    """Draw predicted against measured times."""
    figure, axes = plt.subplots(figsize=(7, 6), layout="constrained")
    for split, colour in (("fit", "tab:grey"), ("held-out", "tab:blue")):
        for marker, name, points in (
            ("o", "plain", _points(rows, split, 0)),
            ("x", "compressed", _points(rows, split, 1)),
        ):
            axes.scatter(
                *points, c=colour, marker=marker, s=22, alpha=0.7, label=f"{split}, {name}"
            )
    ends = (5.0, 2e4)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for times in (0.75, 1.25):
        axes.plot(ends, [times * end for end in ends], color="black", linewidth=0.5, linestyle=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured by others, microseconds",
        ylabel="predicted, microseconds",
        title="Exchanges on GPUs: predicted and published (dotted: 25 % off)",
    )
    axes.legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _points(rows: Iterable[Published], split: str, which: int) -> tuple[list[float], list[float]]:
    pairs = {
        ((row.measured_plain, row.measured_compressed)[which], predicted)
        for row in rows
        if row.split == split
        and row.unit == "us"
        and row.errors[which] is not None
        and (predicted := (row.predicted_plain, row.predicted_compressed)[which]) is not None
    }
    found = sorted((measured, predicted) for measured, predicted in pairs if measured is not None)
    return [measured for measured, _ in found], [predicted for _, predicted in found]


def show(rows: Sequence[Published]) -> None:
    """Print a line for each source."""
    table = Table("split", "source", "times", "median error", "within 25 %", "sign right")
    for split in SPLITS:
        for source, of in _by_source(rows, split):
            found = summary(of)
            if found.times:
                table.add_row(
                    split,
                    source,
                    str(found.times),
                    f"{found.median:.0%}",
                    f"{found.within_25:.0%}",
                    f"{found.right:.0%} of {found.signs}" if found.signs else "-",
                )
    Console().print(table)
