"""Compare the predictions of commpass's cost model with the measurements of four papers.

    python benchmarks/papers.py [--json FILE]

Predictions use only the papers' hardware, models and baselines (`paper_models`). Where a paper
gives no value, one is assumed and shown beside the row. A number to which a parameter was fitted is
marked, and does not count. `of the gain` is the share of a speedup, or of a loss, that is
predicted: a ratio of 0.93 may be half of it. The second table has other assumptions and their
results.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.paper_models.rows import GOAL, Number, Row, all_rows, summary
from benchmarks.paper_models.tried import all_tried

RESULTS = Path(__file__).parent / "results" / "papers.json"
RIGHT = ("number", "predicted", "ratio", "of the gain")


def text(number: Number | None) -> str:
    if number is None:
        return ""
    return number if isinstance(number, str) else f"{number:.2f}"


def said(row: Row) -> str:
    """Return whether a row meets the goal, as text for a table."""
    return "fitted" if row.fitted else "yes" if row.met else "no"


def cells(row: Row) -> list[str]:
    numbers = (row.number, row.predicted, row.ratio, row.of_gain)
    return [row.paper, row.what, *map(text, numbers), said(row), row.assumed]


def show(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for name in ("paper", "what", *RIGHT, f"within {GOAL:.0%}", "assumed"):
        table.add_column(
            name, justify="right" if name in RIGHT else "left", no_wrap=name == "paper"
        )
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)


def as_data(rows: list[Row]) -> list[dict[str, object]]:
    more = [{"ratio": row.ratio, "of_gain": row.of_gain, "met": row.met} for row in rows]
    return [{**asdict(row), **each} for row, each in zip(rows, more, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows, tried = all_rows(), all_tried()
    show("what papers measured, and what the cost model predicts", rows)
    show("other assumptions", tried)
    found = summary(rows)
    print(f"{found.met} of {found.predicted} within {GOAL:.0%}; {found.fitted} were fitted to")
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "goal": GOAL,
        "summary": asdict(found),
    }
    made = {**facts, "rows": as_data(rows), "tried": as_data(tried)}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(made, indent=1) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
