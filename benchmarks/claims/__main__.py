"""Measure the claims, print them, and write the results and the page."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.claims.claim import Claim, Result, judged
from benchmarks.claims.experiments import EXPERIMENTS
from benchmarks.claims.experiments.experiment import carry_out, stored
from benchmarks.claims.facts import facts
from benchmarks.claims.page import number, page, published
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
        "spread": result.spread,
        "bound": claim.bound,
        "predicted": claim.predicted,
        "assumed": claim.assumed,
        "note": claim.note,
        "experiments": list(claim.experiments),
        "why_not": claim.why_not,
        "verdict": result.verdict,
    }


def shown(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for column in ("paper", "claim", "number", "measured", "predicted", "verdict"):
        table.add_column(column)
    for row in rows:
        numbers = (published(row), number(row["measured"], row["spread"]))
        table.add_row(row["paper"], row["text"], *numbers, number(row["predicted"]), row["verdict"])
    Console().print(table)


def arguments() -> argparse.Namespace:
    total = sum(each.minutes for each in EXPERIMENTS.values())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measures the claims of the papers, and writes docs/papers.md and\n"
        "benchmarks/results/claims.json. Experiments are runs of minutes, each with a stored\n"
        f"result. Without --quick or --run all are run again: {total:g} minutes on two cores.",
        epilog="experiments, with their minutes on two cores:\n"
        + "\n".join(f"  {e.name:<18} {e.minutes:>3g}  {e.text}" for e in EXPERIMENTS.values()),
    )
    papers = dict.fromkeys(each.paper for each in every())
    parser.add_argument(
        "--paper", choices=papers, help="only the claims of one paper; the page is not written then"
    )
    parser.add_argument(
        "--inner",
        choices=("eager", "inductor"),
        default="eager",
        help="what compiles the graphs of the short cases (default: %(default)s)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--quick",
        action="store_true",
        help="run no experiment: take the stored results (about 2 minutes)",
    )
    which.add_argument(
        "--run",
        metavar="NAME",
        choices=EXPERIMENTS,
        help="run one experiment again, and take the stored results of the others",
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    claims = [each for each in every() if options.paper in (None, each.paper)]
    needed = dict.fromkeys(name for claim in claims for name in claim.experiments)
    anew = [options.run] if options.run else [] if options.quick else list(needed)
    for name in anew:
        Console().print(f"{name}: {EXPERIMENTS[name].text} ({EXPERIMENTS[name].minutes:g} min)")
        carry_out(EXPERIMENTS[name])
    rows = measure(claims, options.inner)
    shown(rows["claims"])
    if options.paper is None:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(rows))


def measure(claims: list[Claim], inner: str) -> dict[str, Any]:
    """Run the cases in compiled graphs, judge them and the stored experiments, and return the data
    of the page."""
    cases = {case.name: case for claim in claims for case in claim.cases}
    start = time.monotonic()
    found: dict[str, Any] = dict(measured(list(cases.values()), inner)) if cases else {}
    needed = dict.fromkeys(name for claim in claims for name in claim.experiments)
    found |= {name: stored(name) for name in needed}
    results = [as_data(judged(claim, found)) for claim in claims]
    seconds = round(time.monotonic() - start)
    return facts() | {"inner": inner, "seconds": seconds, "claims": results}


if __name__ == "__main__":
    main()
