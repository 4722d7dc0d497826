"""Write ``docs/papers.md`` from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.claims.claim import LOSS_WITHIN, NO_CHANGE, WITHIN

HEAD = """# The papers' claims, and ours

This page is for readers who know one of the five papers and ask whether its numbers hold here.
Each row is one claim. `python -m benchmarks.claims --help` says how to measure them again.
The page was written from `benchmarks/results/claims.json`: {date}, commit {commit}, torch {torch}.
Runs of minutes are *experiments*. Each stores its result in `benchmarks/results/claims/`.

| column | it holds |
|---|---|
{columns}

| verdict | it means |
|---|---|
{verdicts}

Trainings here are small, and their losses are percent above the loss without compression.
Several of the papers' losses are below {loss} percent. For such a row *reproduced* says that the
loss stayed as small, and not that it is the same.

A row that begins with *formula* compares commpass with an equation, worked out in float64.
Its measured number is the largest deviation; the bound is what rounding explains.
"""
COLUMNS = {
    "where": "a table, figure, section or equation of the paper; *ours*: a claim of commpass alone",
    "paper": "the paper's number; empty where the row is an order or a formula",
    "measured": "the number measured here, on CPUs. If *conditions* names nothing else, it is of"
    " graphs of `torch.compile(backend=commpass.backend(...))` on four ranks over gloo. ± is the"
    " standard deviation over seeds",
    "predicted": "what the cost model predicts for the paper's hardware; it was not measured",
    "conditions": "how it was measured, or what the prediction assumes",
}
VERDICTS = {
    "reproduced": "an order *holds*; a number is within {exact} %, a ratio within {ratio} %; a loss"
    " or another percentage is within {loss} points, or two spreads, and has the same sign, unless"
    " both are below {none} points or one spread; a deviation is within its bound",
    "order only": "a ratio is further off, but on the same side of 1; a percentage is further off,"
    " but has the same sign",
    "contradicted": "none of these",
    "ours alone": "it was measured here, and the paper has no such number",
    "predicted only": "the cost model's number, with its ratio to the paper's. It is *off* beyond"
    " {ratio} %, or where another choice is predicted",
    "fitted": "as *predicted only*, but a parameter of the model was fitted to this very number",
    "not testable here": "*conditions* gives the reason",
    "not run": "its experiment has no result yet: `python -m benchmarks.claims --run NAME`",
}
ABOUT_MISSES = """These rows contradict a paper, or their prediction is off. Rows that are
*order only* also miss the paper's number; the tables below have them."""


def page(found: dict[str, Any]) -> str:
    within = {kind: f"{100 * share:g}" for kind, share in WITHIN.items()}
    within |= {"loss": f"{LOSS_WITHIN:g}", "none": f"{NO_CHANGE:g}"}
    tables = {"columns": _lines(COLUMNS), "verdicts": _lines(VERDICTS).format(**within)}
    lines = [HEAD.format(**found, **within, **tables)]
    rows: Sequence[dict[str, Any]] = found["claims"]
    lines += [*_counts(rows), *_misses(rows)]
    for paper in dict.fromkeys(row["paper"] for row in rows):
        lines += [
            f"## {paper}\n",
            "| where | claim | paper | measured | predicted | verdict | conditions |",
            "|---|---|---:|---:|---:|---|---|",
        ]
        for row in rows:
            if row["paper"] == paper:
                lines.append(_row(row))
        lines.append("")
    return "\n".join(lines)


def _lines(words: dict[str, str]) -> str:
    return "\n".join(f"| {word} | {text} |" for word, text in words.items())


def _counts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many rows of each paper have each verdict."""
    found = Counter((row["paper"], row["verdict"]) for row in rows)
    lines = ["## How many rows have which verdict\n", f"| | {' | '.join(VERDICTS)} |"]
    lines.append(f"|---|{'---:|' * len(VERDICTS)}")
    for paper in dict.fromkeys(row["paper"] for row in rows):
        cells = " | ".join(str(found[paper, verdict]) for verdict in VERDICTS)
        lines.append(f"| {paper} | {cells} |")
    return [*lines, ""]


def _misses(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the rows that contradict a paper, and the predictions that are off."""
    lines = ["## What does not hold here\n", f"{ABOUT_MISSES}\n"]
    for row in rows:
        if row["verdict"] == "contradicted":
            numbers = [number(row["measured"], row["spread"])]
            if row["bound"] is None and row["number"] is not None:
                numbers.append(f"the paper's is {number(row['number'])}")
            lines.append(f"- {row['paper']}, {row['where']}: {row['text']}: {', '.join(numbers)}.")
        elif is_off(row):
            numbers = [number(row["predicted"]), f"the paper's is {number(row['number'])}"]
            said = f"predicted {', '.join(numbers)}"
            lines.append(f"- {row['paper']}, {row['where']}: {row['text']}: {said}.")
    return [*lines, ""]


def _row(row: dict[str, Any]) -> str:
    measured = number(row["measured"], row["spread"])
    if row["bound"] is not None:
        measured = f"{measured} (bound {row['bound']:.2g})"
    said = f"{number(row['number'])} | {measured} | {number(row['predicted'])}"
    missing = row["experiments"] if row["verdict"] == "not run" else []
    run = ", ".join(f"`--run {name}`" for name in missing)
    why = "; ".join(filter(None, (run, row["note"], row["assumed"], row["why_not"])))
    return f"| {row['where']} | {row['text']} | {said} | {_verdict(row)} | {why} |"


def _verdict(row: dict[str, Any]) -> str:
    """Return the verdict; for a prediction, also how far it is from the paper's number."""
    if row["verdict"] != "predicted only" or row["number"] is None:
        return str(row["verdict"])
    off = "**off**, " if is_off(row) else ""
    if isinstance(row["number"], str):
        return f"predicted only: {off}{'another' if off else 'the same'} choice"
    return f"predicted only: {off}ratio {row['predicted'] / row['number']:.2f}"


def is_off(row: dict[str, Any]) -> bool:
    """Return whether a prediction differs from the paper's choice, or is further from its number
    than a reproduced ratio may be."""
    if row["verdict"] != "predicted only" or row["number"] is None:
        return False
    if isinstance(row["number"], str):
        return bool(row["predicted"] != row["number"])
    return bool(abs(row["predicted"] / row["number"] - 1) > WITHIN["ratio"])


def published(row: dict[str, Any]) -> str:
    """Return the paper's number, or the largest allowed deviation from its formula."""
    return number(row["number"]) if row["bound"] is None else f"≤ {row['bound']:.2g}"


def number(value: Any, spread: float | None = None) -> str:
    """Format a number, an order or a choice for the page and the table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "holds" if value else "does not hold"
    if isinstance(value, str):
        return value
    return f"{value:.4g}" + (f" ± {spread:.2g}" if spread is not None else "")
