"""Measures the claims, prints them, and writes the results and the page."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.claims.claim import Result, judged
from benchmarks.claims.page import page
from benchmarks.claims.ranks import measured
from benchmarks.claims.suites import every

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "claims.json", ROOT / "docs" / "papers.md"


def as_data(result: Result) -> dict[str, Any]:
    claim = result.claim
    return {
        "paper": claim.paper,
        "where": claim.where,
        "text": claim.text,
        "kind": claim.kind,
        "number": claim.number,
        "measured": result.measured,
        "predicted": claim.predicted,
        "assumed": claim.assumed,
        "why_not": claim.why_not,
        "verdict": result.verdict,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims")
    parser.add_argument("--paper", help="the claims of one paper alone; nothing is written then")
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager")
    options = parser.parse_args()
    claims = [each for each in every() if options.paper in (None, each.paper)]
    if not claims:
        known = ", ".join(dict.fromkeys(each.paper for each in every()))
        parser.error(f"no paper is called {options.paper!r}: there are {known}")
    cases = {case.name: case for claim in claims for case in claim.cases}
    start = time.monotonic()
    found = measured(list(cases.values()), options.inner) if cases else {}
    results = [judged(claim, found) for claim in claims]
    table = Table()
    for column in ("paper", "claim", "number", "measured", "predicted", "verdict"):
        table.add_column(column)
    for row in map(as_data, results):
        numbers = ("number", "measured", "predicted")
        said = [
            ""
            if row[each] is None
            else f"{row[each]:.4g}"
            if isinstance(row[each], float)
            else str(row[each])
            for each in numbers
        ]
        table.add_row(row["paper"], row["text"], *said, row["verdict"])
    Console().print(table)
    if options.paper is not None:
        return
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "inner": options.inner,
        "seconds": round(time.monotonic() - start),
        "claims": [as_data(each) for each in results],
    }
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")
    PAGE.write_text(page(facts))


if __name__ == "__main__":
    main()
