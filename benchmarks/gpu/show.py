"""Print tables of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Found = dict[str, Any]


def show(found: Sequence[Found], console: Console) -> None:
    """Print times, then failed checks, then what was left out, then the counts."""
    for title, columns, rows in (
        ("Against a copy of the same bytes", COPIED, _with(found, "gbs")),
        ("The matmul that encodes", PRODUCTS, _with(found, "of_matmul")),
        ("Against others: their time over ours", RIVALS, _with(found, "ahead")),
    ):
        if rows:
            console.print(_table(title, columns, rows))
    failed = [each for each in found if each["kind"] == "check" and not each["passed"]]
    for each in failed:
        console.print(f"[red]FAILED[/red] {each['job']}: {each['name']}", highlight=False)
        console.print(f"    {each['said']}", markup=False, highlight=False)
    for each in found:
        if each["kind"] == "left out":
            console.print(f"left out: {each['job']}: {each['name']}", highlight=False)
        elif each["kind"] == "note" and each["said"] == "not installed":
            console.print(f"{each['name']}: not installed", highlight=False)
    for line in counts(found).items():
        console.print(f"{line[0]}: {line[1]}", highlight=False)


def counts(found: Sequence[Found]) -> dict[str, int]:
    """Count checks passed and failed, goals met and missed, and what was left out."""
    checks = [each["passed"] for each in found if each["kind"] == "check"]
    goals = [each["met"] for each in found if each["kind"] == "timing" and "met" in each]
    return {
        "checks passed": sum(checks),
        "checks failed": len(checks) - sum(checks),
        "goals met": goals.count(True),
        "goals missed": goals.count(False),
        "left out": sum(each["kind"] == "left out" for each in found),
    }


def _with(found: Sequence[Found], key: str) -> list[Found]:
    return [each for each in found if each["kind"] == "timing" and key in each]


COPIED = (
    ("", "name"),
    ("", "what"),
    ("us", "us"),
    ("spread", "spread"),
    ("GB/s", "gbs"),
    ("of a copy", "of_copy"),
    ("goal", "goal"),
    ("met", "met"),
    ("ratio", "ratio"),
)
PRODUCTS = (
    ("", "name"),
    ("", "what"),
    ("us", "us"),
    ("TFLOP/s", "tflops"),
    ("matmul us", "matmul_us"),
    ("of matmul", "of_matmul"),
    ("goal", "goal"),
    ("of matmul + encode", "of_both"),
    ("met", "met"),
    ("configuration", "configuration"),
)
RIVALS = (
    ("", "name"),
    ("", "what"),
    ("us", "us"),
    ("theirs us", "rival_us"),
    ("ahead", "ahead"),
    ("goal", "goal"),
    ("met", "met"),
)


def _table(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Found]) -> Table:
    table = Table(title=title)
    for head, _ in columns:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for row in rows:
        if row.get("shown", True):
            table.add_row(*(_text(key, row.get(key)) for _, key in columns))
    return table


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "[green]yes[/green]" if value else "[red]no[/red]"
    if key == "spread":
        return f"{value:.1%}"
    return f"{value:.1f}" if key in ("us", "gbs", "tflops", "rival_us") else str(value)
