"""Render plans and their differences as rich tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from commpass.plan import Grouped, Plan, PlannedSite, Simplification, Split
from commpass.report import sent_bytes
from commpass.utils.printable import amount, brief, clean_lines

COLUMNS = (
    ("site", "module", "direction"),
    ("collective", "group", "tensor"),
    ("bytes", "on the wire", "ratio", "sent"),
    ("codec", "algorithm", "chunks"),
    ("uncompressed us", "predicted us", "error"),
)
"""Each name is a column on a wide terminal; on a narrow one, each group is a column of several
lines."""


SHORT = "uncompressed"
"""The first time in a narrow column: the next line has the unit."""


def size(count: float) -> str:
    """Format bytes; a negative count is unknown (a dynamic shape without a hint)."""
    if count < 0:
        return "?"
    if count < 1024:
        return f"{count:.0f} B"
    power = min(3, int(math.log2(count) // 10))
    return f"{count / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def amounts(*counts: float, arrow: str = "->") -> str:
    """Format bytes before and after as ``1 MiB -> 260 KiB``, or one amount."""
    return f" {arrow} ".join(map(amount, counts))


def durations(*us: float, arrow: str = "->") -> str:
    """Format times before and after in one unit as ``8.5 -> 2.5 ms``, or one time."""
    most = max(us)
    unit, scale = ("us", 1.0) if most < 1000 else ("ms", 1e3) if most < 1e6 else ("s", 1e6)
    return f" {arrow} ".join(_short(each / scale) for each in us) + f" {unit}"


def _short(value: float) -> str:
    if value >= 10 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 else f"{value:.1g}"


def micros(value: float, baseline: float | None = None) -> str:
    """Format a time in the unit that fits it, or that fits ``baseline``."""
    return (
        f"{value:,.1f} us"
        if (value if baseline is None else baseline) < 10_000
        else f"{value / 1000:,.1f} ms"
    )


def ratio(after: float, before: float) -> str:
    return f"{100 * after / before:.0f}%" if before > 0 and after >= 0 else "-"


NARROW = 80
"""Width of a terminal, in columns, below which even numbers are folded."""


def sites_table(
    sites: Sequence[PlannedSite],
    *,
    wide: bool,
    full: bool = True,
    slack: Sequence[float | None] = (),
) -> Table:
    """Return a table with a line for each site.

    It includes their ``slack`` in microseconds, if that is known for any.
    """
    table = plain_table("#")
    table.leading = 0 if wide else 1
    more = ((SLACK,),) if slack else ()
    for group, columns in enumerate((*COLUMNS[:-1], sum((COLUMNS[-1], *more), ()))):
        for header in columns if wide else ["\n".join(columns).replace("uncompressed us", SHORT)]:
            table.add_column(
                header,
                justify="right" if group in (2, 4) else "left",
                overflow="fold",
                no_wrap=full and group > 1,  # fold names before numbers, and only without room
            )
    for number, site in enumerate(sites, 1):
        groups = cells(site)
        if slack:
            groups = (*groups[:-1], (*groups[-1], slack_cell([slack[number - 1]])))
        texts = (
            [cell for group in groups for cell in group]
            if wide
            else ["\n".join(group) for group in groups]
        )
        table.add_row(*map(Text, (str(number), *texts)), style="green" if site.compressed else "")
    return table


SLACK, CRITICAL = "slack", "critical"
"""The header of the slack column, and its text for a slack of zero."""


def slack_cell(slack: Sequence[float | None]) -> str:
    """Format the slack of the sites of one line, in microseconds; "-" if it is unknown."""
    known = [us for us in slack if us is not None]
    some = sorted(us for us in known if us > 0)
    critical = len(known) - len(some)
    if not known:
        return "-"
    if not some:
        return CRITICAL
    least, most = durations(some[0]), durations(some[-1])
    if critical:
        return f"{critical} {CRITICAL}, others {least}" + (" or more" if most != least else "")
    return least if least == most else f"{least} to {most}"


def cells(site: PlannedSite) -> tuple[tuple[str, ...], ...]:
    """Return the texts of one site, in the shape of COLUMNS."""
    kind = site.kind + (f"({site.reduce_op})" if site.reduce_op else "")
    tensor = f"{site.dtype.removeprefix('torch.')}[{', '.join(map(str, site.shape))}]"
    algorithm = site.algorithm + (", fused" if site.fused else "")
    algorithm += ", kernel" if site.lowering == "kernel" else ""
    return (
        (site.name, site.module or "-", site.direction),
        (kind, f"{site.group_label or site.group}/{site.group_size}", tensor),
        (
            size(site.bytes),
            size(site.wire_bytes),
            ratio(site.wire_bytes, site.bytes),
            size(sent_bytes.planned(site)),
        ),
        (brief(site.codec), algorithm, f"{site.chunks} chunks" if site.chunks > 1 else "-"),
        (f"{site.plain_us:,.1f}", f"{site.predicted_us:,.1f}", f"{100 * site.error:.3g}%"),
    )


NO_REASON = "(no reason was recorded)"


def reasons(sites: Sequence[PlannedSite]) -> Table:
    """Return every reason in full, for a place below the table; sites with one reason share a
    line."""
    numbers: dict[str, list[int]] = {}
    for number, site in enumerate(sites, 1):
        numbers.setdefault(site.reason or NO_REASON, []).append(number)
    return numbered(numbers)


def numbered(numbers: Mapping[str, Sequence[int]]) -> Table:
    """Return the texts, each after the numbers that it applies to."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=16, overflow="fold")
    table.add_column(overflow="fold")
    for text, which in numbers.items():
        table.add_row(Text(spans(which)), Text(brief(text)))
    return table


def exposed(sites: Sequence[PlannedSite], numbers: Sequence[int] | None = None) -> Table:
    """Return for how long the rank is predicted to wait, and why; sites with one reason share a
    line.

    ``numbers`` are those of the sites' lines, if not 1, 2, ...
    """
    missed: dict[str, list[tuple[int, PlannedSite]]] = {}
    for number, site in zip(numbers or range(1, len(sites) + 1), sites, strict=True):
        if site.missed:
            missed.setdefault(site.missed, []).append((number, site))
    table = plain_table(
        "exposed,\npredicted", "sites", "before\nmoving", "why", folded=("sites", "why")
    )
    for why, found in missed.items():
        us = [
            sum(getattr(site, f"{when}_us") for _, site in found) for when in ("exposed", "unmoved")
        ]
        which = spans(list(dict.fromkeys(number for number, _ in found)))
        table.add_row(*map(Text, (micros(us[0]), which, micros(us[1]), why)))
    return table


def simplified(steps: Sequence[Simplification]) -> Table:
    """Return what need not be sent, by rule."""
    saved = sum(step.saved_bytes for step in steps)
    first = f"{len(steps)} simplified"
    table = plain_table(first, "into", f"{size(saved)} less", folded=(first, "into"))
    for step in steps:
        table.add_row(
            Text(f"{step.site} ({step.rule})"), Text(step.into), Text(size(step.saved_bytes))
        )
    return table


def grouped(fusions: Sequence[Grouped]) -> Table:
    """Return which small sites are sent together, and why."""
    many = sum(len(each.sites) for each in fusions)
    first = f"{many} grouped"
    table = plain_table(first, "into", "bytes", "why", folded=(first, "into", "why"))
    for each in fusions:
        texts = (", ".join(each.sites), each.into, size(sum(each.bytes)), each.reason)
        table.add_row(*map(Text, texts))
    return table


def splits(steps: Sequence[Split]) -> Table:
    """Return what is done in chunks of rows, and why."""
    first = f"{len(steps)} split into chunks"
    table = plain_table(first, "rows", "reason", folded=(first, "rows", "reason"))
    for step in steps:
        rows = " + ".join(map(str, step.rows))
        table.add_row(*map(Text, (f"{step.site}: {', '.join(step.into)}", rows, step.reason)))
    return table


def spans(numbers: Sequence[int]) -> str:
    """Format 1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def totals(plans: Sequence[Plan]) -> str:
    """Return the totals of plans as text. A graph that fell back counts as it was before."""
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


def plain_table(*headers: str, folded: Sequence[str] = ()) -> Table:
    """Return a table whose cells are never cut, since half a number reads as another one.

    The columns ``folded`` are free text, which may wrap.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold", no_wrap=header not in folded)
    return table


WIDE = 10_000
"""An upper bound for the width of tables."""


LEAST = 40
"""Width below which a table's columns would be one letter wide. The terminal wraps such lines
instead."""


class Harmless(Console):
    """A console that shows a dump's text without interpreting it.

    Escapes and other control characters become blanks.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            if part.control or part.text == "\n" or part.text.isprintable():
                yield part
            else:
                yield part._replace(text=clean_lines(part.text))


def console_for(*tables: RenderableType, full: bool = True) -> Console:
    """Return a console on stdout that is wide enough for the tables.

    In a file or a pipe, lines are as long as the tables need, unless COLUMNS is set. On a terminal
    that is too narrow, they are as long as what must stay ``full`` needs. They are never narrower
    than LEAST.
    """
    console = Harmless()
    for each in tables if full else ():
        if isinstance(each, Table):
            _keep_whole(each)
    sizes = [console.measure(each, options=_wide(console)) for each in tables]
    if not console.is_terminal and "COLUMNS" not in os.environ:
        needs = [each.maximum for each in sizes]
    else:
        needs = [each.minimum for each in sizes] if full else []
    console.width = max([console.width, LEAST, *needs])
    return console


def _keep_whole(table: Table) -> None:
    """Give columns that do not wrap room for their longest cell: rich uses the longest word."""
    for column in table.columns:
        if column.no_wrap:
            cells = (str(cell) for cell in (column.header, *column.cells))
            column.min_width = max(max(map(cell_len, each.split("\n"))) for each in cells)


def _wide(console: Console) -> ConsoleOptions:
    return console.options.update(width=WIDE, max_width=WIDE)
