"""Explain the plans of a run: totals, then a line for each pattern of sites or each site, and
reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from commpass.plan import Plan
from commpass.plan.dump import Dump
from commpass.report import sent_bytes
from commpass.report.exchange_graphs import Merged
from commpass.report.graph_changes import changes_of, more_reasons
from commpass.report.headlines import headlines, totals_line
from commpass.report.layer_patterns import Pattern, patterns
from commpass.report.numbers import amounts, durations
from commpass.report.run import Run, Slack, slack_of_sites
from commpass.report.site_text import done, group_of
from commpass.report.sites_table import (
    NARROW,
    NO_REASON,
    Cells,
    exposed,
    numbered_rows,
    sites_table,
)
from commpass.report.sites_table import reasons as site_reasons
from commpass.report.tables import WIDE, numbered

HEADERS = (
    ("sites", "collective"),
    ("codec",),
    ("bytes each", "sent, all of them"),
    ("predicted each",),
)
"""Each name is a column on a wide terminal; on a narrow one, each group is a column of several
lines."""


def explain(run: Run, console: Console, *, every: bool = False) -> Iterator[RenderableType]:
    """Yield the decisions of one run.

    ``every``: a line for each site instead of one for each pattern.
    """
    last = run.dumps[-1]
    yield Text(
        f"run {last.run}, written {last.written} by rank {last.rank} of {last.world_size}, "
        f"commpass {last.commpass}, torch {last.torch}"
    )
    if len(run.dumps) > 1:
        yield Text(f"all {len(run.dumps)} graphs: {totals_line(run.totals)}", style="bold")
        yield from (Text(line, style="bold") for line in headlines(run))
    for one in run.merged:
        yield Text()
        yield from of_graph(one, console, every=every)


def of_graph(one: Merged, console: Console, *, every: bool) -> Iterator[RenderableType]:
    """Yield one graph: its totals, its sites, and the reasons."""
    dump, plan, only = one.dump, one.dump.plan, Run((one.dump,))
    yield Text(one.title, style="bold")
    passes = f", passes took {sum(dump.passes_ms.values()):.1f} ms" if dump.passes_ms else ""
    source = f" ({dump.profile['source']})" if dump.profile.get("source") else ""
    yield Text(f"policy {plan.policy}, profile {plan.profile}{source}{passes}")
    if plan.fallback:
        note = "The untouched graph was compiled, nothing below was carried out:\n"
        yield Panel(Text.assemble(note, plan.fallback), title="FALLBACK", style="bold red")
    if not plan.sites:
        yield Text(
            "no collective is left in this graph"
            if plan.simplified
            else "no collective in this graph, so there was nothing to decide (backward graphs"
            " often have none)"
        )
        if not plan.simplified:
            return
    else:
        yield Text(totals_line(only.totals), style="bold")
    yield from (Text(line, style="bold") for line in headlines(only))
    if plan.sites:
        slack = slack_of_sites(dump)
        yield Text()
        yield from _sites(plan, console, slack, every=every)
        if slack:
            yield Text()
            yield Text(critical_sentence(slack))
    for table in changes_of(plan, every=every):
        yield Text()
        yield table


def critical_sentence(slack: Slack) -> str:
    """Return how many exchanges are critical, and what that means.

    A site that is split into chunks has an exchange for each.
    """
    critical = sum(us == 0 for us in slack)
    verb = "is" if critical == 1 else "are"
    return (
        f"{critical} of {len(slack)} exchanges {verb} critical: on the longest path through the"
        " predicted timeline, where a faster exchange may end the graph sooner. Elsewhere it does"
        " not: slack is how much later an exchange could begin and the graph end no later."
    )


def in_words_of_slack(us: float) -> str:
    """Return what the slack of one site means."""
    if us == 0:
        return (
            "critical: it is on the longest path through the predicted timeline, where a faster"
            " exchange may end the graph sooner"
        )
    return f"slack {durations(us)}: it could begin so much later, and the graph would end no later"


def to_json(dumps: Sequence[Dump]) -> list[dict[str, Any]]:
    """Return the plans with the slack of each site and whether it is critical; None if unknown."""
    found = []
    for dump in dumps:
        made = msgspec.to_builtins(dump.plan)
        slack = slack_of_sites(dump) or [None] * len(dump.plan.sites)
        for site, us in zip(made["sites"], slack, strict=True):
            site |= {"slack_us": us, "critical": None if us is None else us == 0}
        found.append(made)
    return found


def _sites(plan: Plan, console: Console, slack: Slack, *, every: bool) -> Iterator[RenderableType]:
    """Yield a line for each site, or for each pattern."""
    found = patterns([plan])
    numbers = [number for number, one in enumerate(found, 1) for _ in one.sites]
    sites = [site for one in found for site in one.sites]

    def table(*, wide: bool) -> Table:
        if every:
            full = wide or console.width >= NARROW
            return sites_table(plan.sites, wide=wide, full=full, slack=slack)
        return patterns_table(found, wide=wide, slack=slack)

    widest = table(wide=True)
    needs = console.measure(widest, options=console.options.update(max_width=WIDE)).maximum
    yield widest if needs <= console.width else table(wide=False)
    yield Text()
    yield site_reasons(plan.sites) if every else reasons(found)
    if any(site.missed for site in plan.sites):
        yield Text()
        yield exposed(plan.sites) if every else exposed(sites, numbers)


def patterns_table(found: Sequence[Pattern], *, wide: bool, slack: Slack = ()) -> Table:
    """Return a table with one line for each pattern on a wide terminal, two on a narrow one.

    It includes the ``slack`` of the graph's sites, if that is known for any.
    """
    rows = [
        (cells(one), one.first, [slack[place - 1] for _, place in one.numbers] if slack else ())
        for one in found
    ]
    return numbered_rows(HEADERS, rows, wide=wide, right=(2, 3))


def cells(one: Pattern) -> Cells:
    """Return the texts of one pattern, in the shape of HEADERS."""
    site, many = one.first, one.count  # chunks of rows of one collective are added up
    known = min(min(each.bytes, each.wire_bytes) for each in one.sites) >= 0
    each = [one.total(name) / many if known else -1 for name in ("bytes", "wire_bytes")]
    moved = [
        _all(sent_bytes.plain(s) for s in one.sites),
        _all(sent_bytes.planned(s) for s in one.sites),
    ]
    us = [one.total(name) / many for name in ("plain_us", "predicted_us")]
    if not site.compressed:
        each, moved, us = each[:1], moved[:1], us[:1]
    return (
        (name_of(one), f"{site.kind} over {group_of(site)}"),
        (done(site),),
        (amounts(*each), amounts(*moved)),
        (durations(*us),),
    )


def _all(numbers: Iterator[int]) -> int:
    """Return their sum, or -1 if one of them is unknown."""
    found = list(numbers)
    return -1 if min(found) < 0 else sum(found)


def name_of(one: Pattern) -> str:
    """Return ``layers.*.mlp.down x 32``."""
    return one.name("(the root module)")


MOST = 3
"""Reasons of a pattern that are shown; ``--all`` shows all."""


def reasons(found: Sequence[Pattern]) -> Table:
    """Return the reasons of the patterns, the most frequent first.

    Patterns with one reason share a line. The times of a split collective are those of a chunk.
    """
    numbers: dict[str, list[int]] = {}
    left_out = Counter[int]()
    for number, one in enumerate(found, 1):
        counted = Counter(site.reason or NO_REASON for site in one.sites).most_common()
        left_out[number] = len(counted) - MOST
        prefix = "each chunk: " if len(one.sites) >= 2 * one.count else ""
        for reason, _ in counted[:MOST]:
            numbers.setdefault(prefix + reason, []).append(number)
    for number, more in left_out.items():
        if more > 0:
            numbers.setdefault(more_reasons(more).strip(), []).append(number)
    return numbered(numbers)
