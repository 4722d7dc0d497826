"""Plans and their differences as rich tables."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from commpass.dump import Dump
from commpass.plan import (
    AGREED_FIELDS,
    Difference,
    Grouped,
    Plan,
    PlannedSite,
    Simplification,
    Split,
    diff,
)

if TYPE_CHECKING:
    from commpass.report.survey import Measured

FORECASTS = ("wire_bytes", "plain_us", "predicted_us", "error", "reason")
"""What a diff shows besides the decisions: what the cost model thought of them."""

COLUMNS = (
    ("site", "module", "direction"),
    ("collective", "group", "tensor"),
    ("bytes", "on the wire", "ratio"),
    ("codec", "algorithm", "chunks"),
    ("plain us", "predicted us", "error"),
)
"""One table column each on a wide terminal; on a narrow one each group is a column of three
lines."""


def size(count: float) -> str:
    """Bytes for people; a negative count is one that nobody knows (a dynamic shape without a
    hint)."""
    if count < 0:
        return "?"
    if count < 1024:
        return f"{count:.0f} B"
    power = min(3, int(math.log2(count) // 10))
    return f"{count / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def micros(value: float, beside: float | None = None) -> str:
    """A time in the unit that fits it, or the number that it stands ``beside``."""
    return (
        f"{value:,.1f} us"
        if (value if beside is None else beside) < 10_000
        else f"{value / 1000:,.1f} ms"
    )


def ratio(after: float, before: float) -> str:
    return f"{100 * after / before:.0f}%" if before > 0 and after >= 0 else "-"


def explain(dumps: Sequence[Dump], console: Console) -> Iterator[RenderableType]:
    """The plans of one run, graph by graph, and what they come to."""
    for dump in dumps:
        plan = dump.plan
        yield Text(f"graph {dump.number}: {plan.direction} ({plan.graph})", style="bold")
        passes = f", passes took {sum(dump.passes_ms.values()):.1f} ms" if dump.passes_ms else ""
        yield Text(f"policy {plan.policy}, profile {plan.profile}{passes}")
        if plan.fallback:
            yield Panel(
                Text.assemble(
                    "The untouched graph was compiled, nothing below was carried out:\n",
                    plan.fallback,
                ),
                title="FALLBACK",
                style="bold red",
            )
        if plan.sites:
            table = sites_table(plan.sites, wide=True)
            needs = console.measure(table, options=console.options.update(max_width=10_000)).maximum
            yield (
                table
                if needs <= console.width
                else sites_table(plan.sites, wide=False, whole=console.width >= NARROW)
            )
            yield Text()
            yield reasons(plan.sites)
            if any(site.missed for site in plan.sites):
                yield Text()
                yield exposed(plan.sites)
                yield Text()
            yield Text(totals([plan]), style="bold")
        elif plan.simplified:
            yield Text("no collective is left in this graph")
        else:
            yield Text(
                "no collective in this graph, so there was nothing to decide (backward graphs often"
                " have none)"
            )
        if plan.simplified:
            yield Text()
            yield simplified(plan.simplified)
        if plan.grouped:
            yield Text()
            yield grouped(plan.grouped)
        if plan.split:
            yield Text()
            yield splits(plan.split)
        yield Text()
    if len(dumps) > 1:
        yield Text(
            f"all {len(dumps)} graphs: {totals([dump.plan for dump in dumps])}", style="bold"
        )
    last = dumps[-1]
    yield Text(
        f"run {last.run}, written {last.written} by rank {last.rank} of {last.world_size}, "
        f"commpass {last.commpass}, torch {last.torch}"
    )


NARROW = 80
"""Columns of a terminal below which even numbers are folded."""


def sites_table(sites: Sequence[PlannedSite], *, wide: bool, whole: bool = True) -> Table:
    table = plain_table("#")
    table.leading = 0 if wide else 1
    for group, columns in enumerate(COLUMNS):
        for header in columns if wide else ["\n".join(columns)]:
            table.add_column(
                header,
                justify="right" if group in (2, 4) else "left",
                overflow="fold",
                no_wrap=whole
                and group > 1,  # names are folded before numbers, and only if there is no room
            )
    for number, site in enumerate(sites, 1):
        groups = cells(site)
        texts = (
            [cell for group in groups for cell in group]
            if wide
            else ["\n".join(group) for group in groups]
        )
        table.add_row(*map(Text, (str(number), *texts)), style="green" if site.compressed else "")
    return table


def cells(site: PlannedSite) -> tuple[tuple[str, ...], ...]:
    """The texts of one site, in the shape of COLUMNS."""
    kind = site.kind + (f"({site.reduce_op})" if site.reduce_op else "")
    tensor = f"{site.dtype.removeprefix('torch.')}[{', '.join(map(str, site.shape))}]"
    algorithm = site.algorithm + (", fused" if site.fused else "")
    algorithm += ", kernel" if site.lowering == "kernel" else ""
    return (
        (site.name, site.module or "-", site.direction),
        (kind, f"{site.group_label or site.group}/{site.group_size}", tensor),
        (size(site.bytes), size(site.wire_bytes), ratio(site.wire_bytes, site.bytes)),
        (site.codec, algorithm, f"{site.chunks} chunks" if site.chunks > 1 else "-"),
        (f"{site.plain_us:,.1f}", f"{site.predicted_us:,.1f}", f"{100 * site.error:.3g}%"),
    )


def reasons(sites: Sequence[PlannedSite]) -> Table:
    """Every reason in full, below the table where it has room; sites that share one share a
    line."""
    numbers: dict[str, list[int]] = {}
    for number, site in enumerate(sites, 1):
        numbers.setdefault(site.reason or "(no reason was recorded)", []).append(number)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=16, overflow="fold")
    table.add_column(overflow="fold")
    for reason, which in numbers.items():
        table.add_row(Text(spans(which)), Text(reason))
    return table


def exposed(sites: Sequence[PlannedSite]) -> Table:
    """For how long the rank is predicted to stand still, and why; sites of one reason share a
    line."""
    missed: dict[str, list[tuple[int, PlannedSite]]] = {}
    for number, site in enumerate(sites, 1):
        if site.missed:
            missed.setdefault(site.missed, []).append((number, site))
    table = plain_table(
        "exposed, predicted", "sites", "before moving", "why", folded=("sites", "why")
    )
    for why, found in missed.items():
        us = [
            sum(getattr(site, f"{when}_us") for _, site in found) for when in ("exposed", "unmoved")
        ]
        numbers = spans([number for number, _ in found])
        table.add_row(*map(Text, (micros(us[0]), numbers, micros(us[1]), why)))
    return table


def simplified(steps: Sequence[Simplification]) -> Table:
    """What need not be sent, rule by rule."""
    saved = sum(step.saved_bytes for step in steps)
    first = f"{len(steps)} simplified"
    table = plain_table(first, "into", f"{size(saved)} less", folded=(first, "into"))
    for step in steps:
        table.add_row(
            Text(f"{step.site} ({step.rule})"), Text(step.into), Text(size(step.saved_bytes))
        )
    return table


def grouped(fusions: Sequence[Grouped]) -> Table:
    """Which small sites travel together, and why."""
    many = sum(len(each.sites) for each in fusions)
    first = f"{many} grouped"
    table = plain_table(first, "into", "bytes", "why", folded=(first, "into", "why"))
    for each in fusions:
        texts = (", ".join(each.sites), each.into, size(sum(each.bytes)), each.reason)
        table.add_row(*map(Text, texts))
    return table


def splits(steps: Sequence[Split]) -> Table:
    """What is done in chunks of rows, and why."""
    first = f"{len(steps)} split into chunks"
    table = plain_table(first, "rows", "reason", folded=(first, "rows", "reason"))
    for step in steps:
        rows = " + ".join(map(str, step.rows))
        table.add_row(*map(Text, (f"{step.site}: {', '.join(step.into)}", rows, step.reason)))
    return table


def spans(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def totals(plans: Sequence[Plan]) -> str:
    """A graph that fell back sends and takes what it did before, whatever its plan says."""
    sites = [(site, not plan.fallback) for plan in plans for site in plan.sites]
    known = [
        (site, done)
        for site, done in sites
        if site.bytes >= 0 and (site.wire_bytes >= 0 or not done)
    ]
    before = sum(site.bytes for site, _ in known)
    after = sum(site.wire_bytes if done else site.bytes for site, done in known)
    plain = sum(site.plain_us for site, _ in sites)
    predicted = sum(site.predicted_us if done else site.plain_us for site, done in sites)
    unknown = (
        f" ({len(sites) - len(known)} of unknown size not counted)"
        if len(known) < len(sites)
        else ""
    )
    unmoved = sum(site.unmoved_us for site, done in sites if done)
    exposed = sum(site.exposed_us for site, done in sites if done)
    still = (
        f", and a rank stands still for {micros(exposed, unmoved)} of them ({micros(unmoved)}"
        " before exchanges were moved)"
        if unmoved > 0
        else ""
    )
    return (
        f"{len(sites)} site{'s' * (len(sites) != 1)}, {sum(len(plan.compressed) for plan in plans)}"
        f" compressed; {size(before)} -> {size(after)} ({ratio(after, before)}){unknown}; predicted"
        f" {micros(plain, plain)} -> {micros(predicted, plain)}{still}"
    )


def named(dumps: Sequence[Dump]) -> dict[str, Dump]:
    """The graphs by place and direction ("forward 1"): what two runs of one model have in
    common."""
    seen = Counter[str]()
    found = {}
    for dump in dumps:
        seen[dump.plan.direction] += 1
        found[f"{dump.plan.direction} {seen[dump.plan.direction]}"] = dump
    return found


def differences(
    left: Sequence[Dump], right: Sequence[Dump]
) -> list[tuple[str, RenderableType, int]]:
    """For every graph that differs: its name, what to show, and how many differences that are."""
    found: list[tuple[str, RenderableType, int]] = []
    lefts, rights = named(left), named(right)
    for name in dict.fromkeys((*lefts, *rights)):
        a, b = lefts.get(name), rights.get(name)
        if a is None or b is None:
            found.append((name, Text(f"only in {'B' if a is None else 'A'}"), 1))
        elif rows := diff(a.plan, b.plan, (*AGREED_FIELDS, *FORECASTS)):
            found.append((name, diff_table(rows, a.plan, b.plan), len(rows)))
    return found


def diff_table(rows: Sequence[Difference], left: Plan, right: Plan) -> Table:
    modules = {site.name: site.module for plan in (right, left) for site in plan.sites}
    table = plain_table("site", "module", "field", "A", "B", folded=("module", "A", "B"))
    for row in rows:
        texts = (
            row.site,
            modules.get(row.site) or "-",
            row.field,
            shown(row, row.left),
            shown(row, row.right),
        )
        table.add_row(*map(Text, texts))
    return table


def codecs(rows: Sequence[Measured]) -> Table:
    """Codecs on some data, one a line."""
    timed = any(row.encode_gbs is not None for row in rows)
    speed_headers = ("encode GB/s", "decode GB/s") if timed else ()
    table = plain_table("codec", "bits", "error", "cosine", "bound", "above", *speed_headers)
    table.caption = (
        "above: bits above 2^-b, the least for a Gaussian (lossless: above the entropy of the"
        " exponents)"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        speeds = [f"{speed:.2f}" for speed in (row.encode_gbs, row.decode_gbs) if speed is not None]
        error = "lossless" if row.lossless else f"{row.error:.3%}"
        bound = "" if row.lossless else f"{row.bound:.2f}"
        table.add_row(
            row.codec,
            f"{row.bits:.3f}",
            error,
            f"{row.cosine:.6f}",
            bound,
            f"{row.distance:.2f}",
            *speeds,
        )
    return table


def plain_table(*headers: str, folded: Sequence[str] = ()) -> Table:
    """A table whose cells stay whole: half a number or half a name reads as another one. Those of
    the columns ``folded`` are free text, which may go on in the next line."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold", no_wrap=header not in folded)
    return table


WIDE = 10_000
"""What no table is wider than."""


def console_for(*tables: RenderableType, whole: bool = True) -> Console:
    """A console on stdout. In a file or a pipe, where COLUMNS says nothing else, its lines are as
    long as the tables need. On a terminal too narrow for what must stay ``whole`` they are as long
    as that needs."""
    console = Console()
    for each in tables if whole else ():
        if isinstance(each, Table):
            _keep_whole(each)
    sizes = [console.measure(each, options=_wide(console)) for each in tables]
    if not console.is_terminal and "COLUMNS" not in os.environ:
        needs = [each.maximum for each in sizes]
    else:
        needs = [each.minimum for each in sizes] if whole else []
    console.width = max([console.width, *needs])
    return console


def _keep_whole(table: Table) -> None:
    """Gives columns that do not wrap room for their longest cell: rich counts its longest word."""
    for column in table.columns:
        if column.no_wrap:
            cells = (str(cell) for cell in (column.header, *column.cells))
            column.min_width = max(max(map(cell_len, each.split("\n"))) for each in cells)


def _wide(console: Console) -> ConsoleOptions:
    return console.options.update(width=WIDE, max_width=WIDE)


def shown(row: Difference, value: Any) -> str:
    if row.field == "site":
        return "(no such site)" if value is None else str(value)
    if row.field == "wire_bytes":
        return f"{value:,} ({size(value)})"
    return "-" if value in (None, "") else str(value)
