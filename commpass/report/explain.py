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

from commpass.plan import Grouped, Plan, Simplification, Split
from commpass.plan.dump import Dump
from commpass.report import sent_bytes, tables
from commpass.report.layer_patterns import Pattern, patterns
from commpass.report.run import Merged, is_exchange, merged
from commpass.report.tables import WIDE, amount, amounts, durations, plain_table, ratio, size
from commpass.utils.printable import brief

HEADERS = (
    ("sites", "collective"),
    ("codec",),
    ("bytes each", "sent, all of them"),
    ("predicted each",),
)
"""Each name is a column on a wide terminal; on a narrow one, each group is a column of several
lines."""


def explain(
    dumps: Sequence[Dump], console: Console, *, every: bool = False
) -> Iterator[RenderableType]:
    """Yield the decisions of one run.

    ``every``: a line for each site instead of one for each pattern.
    """
    plans = [dump.plan for dump in dumps]
    last = dumps[-1]
    yield Text(
        f"run {last.run}, written {last.written} by rank {last.rank} of {last.world_size}, "
        f"commpass {last.commpass}, torch {last.torch}"
    )
    if len(dumps) > 1:
        yield Text(f"all {len(dumps)} graphs: {tables.totals(plans)}", style="bold")
        yield from (Text(line, style="bold") for line in headlines(dumps))
    for one in merged(dumps):
        yield Text()
        yield from of_graph(one, console, every=every)


def headlines(dumps: Sequence[Dump]) -> list[str]:
    """Return the bytes that leave the rank, and those that need not be sent at all."""
    before, after, unknown = sent_bytes.of_plans(dump.plan for dump in dumps)
    lines = []
    if any(dump.plan.sites for dump in dumps):
        left_out = f", {unknown} of unknown size not counted" if unknown else ""
        lines.append(
            f"sent to other ranks: {size(before)} -> {size(after)} ({ratio(after, before)})"
            + left_out
        )
    steps = [step for dump in dumps for step in dump.plan.simplified]
    if steps:
        found, gone = simplified_sites(dumps)
        saved = size(sum(step.saved_bytes for step in steps))
        of = (
            f"{gone} of {found} collective{'s' * (found != 1)} not sent at all"
            if gone
            else f"{len(steps)} made smaller"
        )
        lines.append(f"simplified: {of}, {saved} less handed over")
    return lines


def simplified_sites(dumps: Sequence[Dump]) -> tuple[int, int]:
    """Return the number of original collectives in the graphs, and how many of them need not be
    sent.

    Grouped or split collectives count as the original ones.
    """
    found = gone = 0
    for dump in dumps:
        plan = dump.plan
        were = {node.site.partition(".")[0] for node in dump.before if node.site}
        parts = {name: split.site for split in plan.split for name in split.into}
        members = {each.into: each.sites for each in plan.grouped}
        left = {
            name.partition(".")[0]
            for site in plan.sites
            for name in members.get(site.name, (parts.get(site.name, site.name),))
        }
        found += len(were)
        gone += max(0, len(were) - len(left)) if plan.simplified else 0
    return found, gone


def of_graph(one: Merged, console: Console, *, every: bool) -> Iterator[RenderableType]:
    """Yield one graph: its totals, its sites, and the reasons."""
    dump, plan = one.dump, one.dump.plan
    yield Text(one.title, style="bold")
    passes = f", passes took {sum(dump.passes_ms.values()):.1f} ms" if dump.passes_ms else ""
    yield Text(f"policy {plan.policy}, profile {plan.profile}{passes}")
    if plan.fallback:
        said = "The untouched graph was compiled, nothing below was carried out:\n"
        yield Panel(Text.assemble(said, plan.fallback), title="FALLBACK", style="bold red")
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
        yield Text(tables.totals([plan]), style="bold")
    yield from (Text(line, style="bold") for line in headlines([dump]))
    if plan.sites:
        slack = slack_of_sites(dump)
        yield Text()
        yield from (_each if every else _by_pattern)(plan, console, slack)
        if slack:
            yield Text()
            yield Text(critical_sentence(slack))
    for table in _what_else(plan, every=every):
        yield Text()
        yield table


Slack = Sequence[float | None]
"""For each site of a graph, how many microseconds later its exchanges could begin without delaying
the end of the graph. None if that is unknown. Empty if it is unknown for all sites."""


def slack_of_sites(dump: Dump) -> Slack:
    """Return the slack of a graph's sites.

    It is empty for a graph that is one exchange of a hook, since compute that overlaps it is not in
    the graph.
    """
    timeline = dump.timeline
    if timeline is None or not timeline.slack_us:
        return ()
    if len(timeline.slack_us) == 1 and is_exchange(dump):
        return ()
    return [timeline.slack_of(site.name) for site in dump.plan.sites]


def critical_sentence(slack: Slack) -> str:
    """Return how many sites are critical, and what that means."""
    critical = sum(us == 0 for us in slack)
    verb = "is" if critical == 1 else "are"
    return (
        f"{critical} of {len(slack)} sites {verb} critical: on the longest path through the"
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


def _each(plan: Plan, console: Console, slack: Slack) -> Iterator[RenderableType]:
    """Yield a line for each site."""
    table = tables.sites_table(plan.sites, wide=True, slack=slack)
    fits = _needs(table, console) <= console.width
    whole = console.width >= tables.NARROW
    yield table if fits else tables.sites_table(plan.sites, wide=False, full=whole, slack=slack)
    yield Text()
    yield tables.reasons(plan.sites)
    if any(site.missed for site in plan.sites):
        yield Text()
        yield tables.exposed(plan.sites)


def _by_pattern(plan: Plan, console: Console, slack: Slack) -> Iterator[RenderableType]:
    """Yield a line for each pattern."""
    found = patterns([plan])
    table = patterns_table(found, wide=True, slack=slack)
    fits = _needs(table, console) <= console.width
    yield table if fits else patterns_table(found, wide=False, slack=slack)
    yield Text()
    yield reasons(found)
    if any(site.missed for site in plan.sites):
        yield Text()
        numbers = [number for number, one in enumerate(found, 1) for _ in one.sites]
        yield tables.exposed([site for one in found for site in one.sites], numbers)


def _needs(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=WIDE)).maximum


def patterns_table(found: Sequence[Pattern], *, wide: bool, slack: Slack = ()) -> Table:
    """Return a table with one line for each pattern on a wide terminal, two on a narrow one.

    It includes the ``slack`` of the graph's sites, if that is known for any.
    """
    table = plain_table("#")
    for group in (*HEADERS[:-1], (*HEADERS[-1], *((tables.SLACK,) if slack else ()))):
        for header in group if wide else ["\n".join(group)]:
            right = group[0].startswith(("bytes", "predicted"))
            table.add_column(header, justify="right" if right else "left", overflow="fold")
    for number, one in enumerate(found, 1):
        groups = cells(one)
        if slack:
            its = tables.slack_cell([slack[place - 1] for _, place in one.numbers])
            groups = (*groups[:-1], (*groups[-1], its))
        texts = [t for group in groups for t in group] if wide else list(map("\n".join, groups))
        style = "green" if one.first.compressed else ""
        table.add_row(*map(Text, (str(number), *texts)), style=style)
    return table


def cells(one: Pattern) -> tuple[tuple[str, ...], ...]:
    """Return the texts of one pattern, in the shape of HEADERS."""
    site, many = one.first, len(one.sites)
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
        (name_of(one), f"{site.kind} over {site.group_label or site.group}/{site.group_size}"),
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
    many = len(one.sites)
    return (one.module or "(the root module)") + (f" x {many}" if many > 1 else "")


def done(site: tables.PlannedSite) -> str:
    """Return what is done to a site in a few words: ``int8 by two_shot x4``."""
    if not site.compressed:
        return "left alone: hides behind compute" if site.hidden else "left alone"
    chunks = f" x{site.chunks}" if site.chunks > 1 else ""
    return f"{brief(site.codec)} by {site.algorithm}{chunks}"


MOST = 3
"""Reasons of a pattern that are shown; ``--all`` shows all."""


def reasons(found: Sequence[Pattern]) -> Table:
    """Return the reasons of the patterns, the most frequent first.

    Patterns with one reason share a line.
    """
    numbers: dict[str, list[int]] = {}
    left_out = Counter[int]()
    for number, one in enumerate(found, 1):
        counted = Counter(site.reason or tables.NO_REASON for site in one.sites).most_common()
        left_out[number] = len(counted) - MOST
        for reason, _ in counted[:MOST]:
            numbers.setdefault(reason, []).append(number)
    for number, more in left_out.items():
        if more > 0:
            numbers.setdefault(_and_more(more).strip(), []).append(number)
    return tables.numbered(numbers)


def _what_else(plan: Plan, *, every: bool) -> Iterator[Table]:
    """Yield what was simplified, grouped and split: each step, or the number of each sort."""
    if plan.simplified:
        yield tables.simplified(plan.simplified) if every else simplified(plan.simplified)
    if plan.grouped:
        yield tables.grouped(plan.grouped) if every else grouped(plan.grouped)
    if plan.split:
        yield tables.splits(plan.split) if every else splits(plan.split)


def simplified(steps: Sequence[Simplification]) -> Table:
    """Return what need not be sent, a line for each rule."""
    saved = sum(step.saved_bytes for step in steps)
    table = plain_table(f"{len(steps)} simplified", "rule", f"{size(saved)} less")
    by_rule: dict[str, list[Simplification]] = {}
    for step in steps:
        by_rule.setdefault(step.rule, []).append(step)
    for rule, some in by_rule.items():
        table.add_row(
            _abbreviated([s.site for s in some]), rule, size(sum(s.saved_bytes for s in some))
        )
    return table


def grouped(fusions: Sequence[Grouped]) -> Table:
    """Return which small sites are sent together, a line for each number of sites and reason."""
    first = f"{sum(len(each.sites) for each in fusions)} grouped"
    table = plain_table(first, "bytes", "why", folded=(first, "why"))
    alike: dict[tuple[int, str], list[Grouped]] = {}
    for each in fusions:
        alike.setdefault((len(each.sites), each.reason), []).append(each)
    for (many, reason), some in alike.items():
        into = f"{many} each into {_abbreviated([each.into for each in some])}"
        table.add_row(*map(Text, (into, amount(sum(sum(e.bytes) for e in some)), reason)))
    return table


def splits(steps: Sequence[Split]) -> Table:
    """Return what is done in chunks of rows, a line for each form of chunks."""
    first = f"{len(steps)} split into chunks"
    table = plain_table(first, "why", folded=(first, "why"))
    alike: dict[tuple[int, ...], list[Split]] = {}
    for step in steps:
        alike.setdefault(step.rows, []).append(step)
    for rows, some in alike.items():
        said = Counter(step.reason for step in some).most_common()
        chunks = f"{_abbreviated([step.site for step in some])}: rows {' + '.join(map(str, rows))}"
        table.add_row(Text(chunks), Text(said[0][0] + _and_more(len(said) - 1)))
    return table


def _and_more(reasons: int) -> str:
    return f" (and {reasons} more reason{'s' * (reasons != 1)}: --all)" if reasons else ""


def _abbreviated(names: Sequence[str]) -> str:
    """Return ``all_reduce_3``, or the first name and the number of others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
