"""Show what was simplified, grouped and split in a graph: a line for each step, or each sort."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from commpass.plan import Grouped, Plan, Simplification, Split
from commpass.report.numbers import size
from commpass.report.tables import plain_table
from commpass.utils.printable import amount, plural


def changes_of(plan: Plan, *, every: bool) -> list[Table]:
    """Return a table for each sort of change that the graph has."""
    found = []
    if plan.simplified:
        found.append(simplified(plan.simplified, every=every))
    if plan.grouped:
        found.append(grouped(plan.grouped, every=every))
    if plan.split:
        found.append(splits(plan.split, every=every))
    return found


def simplified(steps: Sequence[Simplification], *, every: bool = True) -> Table:
    """Return what need not be sent, by rule."""
    if every:
        rows = [(f"{s.site} ({s.rule})", s.into, s.saved_bytes) for s in steps]
    else:
        alike = _by_key((step.rule, step) for step in steps)
        rows = [
            (_abbreviated([s.site for s in some]), rule, sum(s.saved_bytes for s in some))
            for rule, some in alike.items()
        ]
    first, less = f"{len(steps)} simplified", f"{size(sum(s.saved_bytes for s in steps))} less"
    folded = (first, "into") if every else ()
    table = plain_table(first, "into" if every else "rule", less, folded=folded)
    for what, into, saved in rows:
        table.add_row(*map(Text, (what, into, size(saved))))
    return table


def grouped(fusions: Sequence[Grouped], *, every: bool = True) -> Table:
    """Return which small sites are sent together, and why."""
    first = f"{sum(len(each.sites) for each in fusions)} grouped"
    if every:
        table = plain_table(first, "into", "bytes", "why", folded=(first, "into", "why"))
        for each in fusions:
            texts = (", ".join(each.sites), each.into, size(sum(each.bytes)), each.reason)
            table.add_row(*map(Text, texts))
        return table
    table = plain_table(first, "bytes", "why", folded=(first, "why"))
    alike = _by_key(((len(each.sites), each.reason), each) for each in fusions)
    for (many, reason), some in alike.items():
        into = f"{many} each into {_abbreviated([each.into for each in some])}"
        table.add_row(*map(Text, (into, amount(sum(sum(e.bytes) for e in some)), reason)))
    return table


def splits(steps: Sequence[Split], *, every: bool = True) -> Table:
    """Return what is done in chunks of rows, and why."""
    first = f"{len(steps)} split into chunks"
    if every:
        table = plain_table(first, "rows", "reason", folded=(first, "rows", "reason"))
        for step in steps:
            texts = (f"{step.site}: {', '.join(step.into)}", _rows(step.rows), step.reason)
            table.add_row(*map(Text, texts))
        return table
    table = plain_table(first, "why", folded=(first, "why"))
    for rows, some in _by_key((step.rows, step) for step in steps).items():
        said = Counter(step.reason for step in some).most_common()
        chunks = f"{_abbreviated([step.site for step in some])}: rows {_rows(rows)}"
        table.add_row(Text(chunks), Text(said[0][0] + more_reasons(len(said) - 1)))
    return table


def more_reasons(count: int) -> str:
    """Return `` (and 2 more reasons: --all)``; "" for none."""
    return f" (and {plural(count, 'more reason')}: --all)" if count else ""


def _by_key(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _rows(rows: Sequence[int]) -> str:
    return " + ".join(map(str, rows))


def _abbreviated(names: Sequence[str]) -> str:
    """Return ``all_reduce_3``, or the first name and the number of others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
