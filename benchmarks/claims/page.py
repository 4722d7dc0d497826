"""``docs/papers.md``, written from the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = """# The papers' claims, and ours

Each headline of the five papers beside what commpass gives. Measured numbers are those of graphs
that `torch.compile(backend=commpass.backend(...))` made, on four ranks over gloo where the last
column says nothing else. Predicted ones are the cost model's for the paper's hardware.
`python -m benchmarks.claims` writes this page, from `benchmarks/results/claims.json`: {date},
commit {commit}, torch {torch}. Runs of minutes are experiments, each with a file in
`benchmarks/results/claims/`; ± is the spread over seeds.

- *reproduced*: an order holds, or a number is within 2 % (a ratio: 15 %; a change of a loss: two
  spreads, or 0.25 % of the loss). Of a formula, *measured* is the deviation of commpass from it,
  which is no more than the paper's column allows: what rounding explains.
- *order only*: a ratio is off by more, but on the same side of 1.
- *contradicted*: neither.
- *ours alone*: a measured number that the paper does not have.
- *predicted only*, *fitted*: the cost model's number; a parameter was fitted to the second kind.
- *not testable here*: the last column says why.
- *not run*: its experiment has no result yet (`python -m benchmarks.claims --run NAME`).
"""


def page(found: dict[str, Any]) -> str:
    lines = [HEAD.format(**found)]
    rows: Sequence[dict[str, Any]] = found["claims"]
    for paper in dict.fromkeys(row["paper"] for row in rows):
        lines += [
            f"## {paper}\n",
            "| where | claim | paper | measured | predicted | verdict | |",
            "|---|---|---:|---:|---:|---|---|",
        ]
        for row in rows:
            if row["paper"] == paper:
                lines.append(_row(row))
        lines.append("")
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    measured = number(row["measured"], row["spread"])
    said = f"{published(row)} | {measured} | {number(row['predicted'])}"
    missing = row["experiments"] if row["verdict"] == "not run" else []
    run = ", ".join(f"`--run {name}`" for name in missing)
    why = "; ".join(filter(None, (run, row["note"], row["assumed"], row["why_not"])))
    return f"| {row['where']} | {row['text']} | {said} | {row['verdict']} | {why} |"


def published(row: dict[str, Any]) -> str:
    """The paper's number, or what the deviation from its formula may be."""
    return number(row["number"]) if row["bound"] is None else f"≤ {row['bound']:.2g}"


def number(value: Any, spread: float | None = None) -> str:
    """A number, an order or a choice, as the page and the table write it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "holds" if value else "does not hold"
    if isinstance(value, str):
        return value
    return f"{value:.4g}" + (f" ± {spread:.2g}" if spread is not None else "")
