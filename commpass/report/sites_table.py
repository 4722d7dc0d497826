"""Show sites as tables: a line for each, their reasons, and how long the rank waits for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text

from commpass.plan import PlannedSite
from commpass.report import sent_bytes
from commpass.report.numbers import durations, micros, ratio, size, spans
from commpass.report.site_text import form_of, group_of, kind_of, tensor_of
from commpass.report.tables import numbered, plain_table
from commpass.utils.printable import brief

COLUMNS = (
    ("site", "module", "direction"),
    ("collective", "group", "tensor"),
    ("bytes", "on the wire", "ratio", "sent"),
    ("codec", "algorithm", "chunks"),
    ("uncompressed us", "predicted us", "error"),
)
"""Each name is a column on a wide terminal; on a narrow one, each group is a column of several
lines."""
NARROW_COLUMNS = (*COLUMNS[:-1], ("uncompressed", *COLUMNS[-1][1:]))
"""The same for a narrow terminal, where the next line has the unit of the first time."""
NARROW = 80
"""Width of a terminal, in columns, below which even numbers are folded."""

Cells = Sequence[tuple[str, ...]]
"""Texts, or headers, by group of columns."""


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
    rows = [(cells(site), site, slack[at : at + 1]) for at, site in enumerate(sites)]
    no_wrap = range(2, len(COLUMNS)) if full else ()  # fold names before numbers
    columns = COLUMNS if wide else NARROW_COLUMNS
    table = numbered_rows(columns, rows, wide=wide, right=(2, 4), no_wrap=no_wrap)
    table.leading = 0 if wide else 1
    return table


def numbered_rows(
    columns: Cells,
    rows: Sequence[tuple[Cells, PlannedSite, Sequence[float | None]]],
    *,
    wide: bool,
    right: Collection[int],
    no_wrap: Collection[int] = (),
) -> Table:
    """Return a table of sites or patterns, each with its first site, and the slack of all.

    On a wide terminal each name is a column, on a narrow one each group. The groups ``right`` are
    justified so, and those in ``no_wrap`` do not wrap.
    """
    if any(slack for *_, slack in rows):
        columns = _and_slack(columns, SLACK)
        rows = [(_and_slack(texts, slack_cell(s)), site, s) for texts, site, s in rows]
    table = plain_table("#")
    for at, group in enumerate(columns):
        justify: Literal["left", "right"] = "right" if at in right else "left"
        for header in group if wide else ["\n".join(group)]:
            table.add_column(header, justify=justify, overflow="fold", no_wrap=at in no_wrap)
    for number, (groups, site, _) in enumerate(rows, 1):
        texts = [t for group in groups for t in group] if wide else list(map("\n".join, groups))
        style = "green" if site.compressed else ""
        table.add_row(*map(Text, (str(number), *texts)), style=style)
    return table


def _and_slack(groups: Cells, text: str) -> Cells:
    return (*groups[:-1], (*groups[-1], text))


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


def cells(site: PlannedSite) -> Cells:
    """Return the texts of one site, in the shape of COLUMNS."""
    return (
        (site.name, site.module or "-", site.direction),
        (kind_of(site), group_of(site), tensor_of(site)),
        (
            size(site.bytes),
            size(site.wire_bytes),
            ratio(site.wire_bytes, site.bytes),
            size(sent_bytes.planned(site)),
        ),
        (
            brief(site.codec),
            site.algorithm + form_of(site),
            f"{site.chunks} chunks" if site.chunks > 1 else "-",
        ),
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
        table.add_row(*map(Text, (micros(us[0], us[1]), which, micros(us[1]), why)))
    return table
