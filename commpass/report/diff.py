"""Show how two runs differ: totals of both, then what changed, by pattern of sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from commpass.plan import AGREED_FIELDS, Plan, PlannedSite
from commpass.report.comparison import FORECASTS, GraphPair
from commpass.report.headlines import totals_line
from commpass.report.layer_patterns import total, without_numbers
from commpass.report.numbers import amounts, durations, size
from commpass.report.run import Run
from commpass.report.site_text import done
from commpass.report.tables import plain_table
from commpass.utils.printable import plural

FIELD_LABELS = {
    "wire_bytes": "on the wire",
    "plain_us": "uncompressed us",
    "predicted_us": "predicted us",
    "common_shape": "shape",
}
"""Fields whose names are not clear enough."""


def heads(first: Run, right: Run) -> Iterator[Text]:
    """Yield a header for the two runs, with the totals of each."""
    for letter, run in zip("AB", (first, right), strict=True):
        yield Text(
            f"{letter}: {run.source}, run {run.first.run}, policy {run.policies}, profile"
            f" {run.first.plan.profile}"
        )
        sent = f"{size(run.sent.before)} -> {size(run.sent.after)}"
        yield Text(f"   {totals_line(run.totals)}", style="bold")
        yield Text(f"   sent to other ranks: {sent}", style="bold")


def differences(found: Sequence[GraphPair], *, every: bool) -> Iterator[RenderableType]:
    """Yield what differs in each graph: a line for each pattern, or for each field of each site."""
    for one in found:
        if one.only_in:
            plan = one.left or one.right
            many = len(plan.sites) if plan else 0
            yield Text(f"\n{one.name}: 1 difference", style="bold")
            yield Text(f"only in {one.only_in} ({plural(many, 'site')})")
            continue
        many, sites = len(one.rows), changed_sites(one)
        counts = f"{plural(many, 'difference')} in {plural(sites, 'site')}"
        yield Text(f"\n{one.name}: {counts}", style="bold")
        yield diff_table(one) if every else changes_table(one)


def changed_sites(one: GraphPair) -> int:
    """Return how many sites differ. A site that is split into chunks counts once."""
    plans = [plan for plan in (one.left, one.right) if plan]
    of = {part: split.site for plan in plans for split in plan.split for part in split.into}
    return len({of.get(row.site, row.site) for row in one.rows if row.site != "(graph)"})


def diff_table(one: GraphPair) -> Table:
    """Return a table with a line for each field of each site."""
    table = plain_table("site", "module", "field", "A", "B", folded=("module", "A", "B"))
    modules = _modules(one)
    for row in one.rows:
        field = FIELD_LABELS.get(row.field, row.field)
        values = (_text(row.field, value) for value in (row.left, row.right))
        table.add_row(*map(Text, (row.site, modules.get(row.site) or "-", field, *values)))
    return table


def _modules(one: GraphPair) -> dict[str, str]:
    plans = [plan for plan in (one.right, one.left) if plan]
    return {site.name: site.module for plan in plans for site in plan.sites}


def _text(field: str, value: Any) -> str:
    if field == "site":
        return "(no such site)" if value is None else str(value)
    if field == "wire_bytes":
        return f"{value:,} ({size(value)})"
    return "-" if value in (None, "") else str(value)


def to_json(first: Run, right: Run, found: Sequence[GraphPair]) -> dict[str, Any]:
    """Return the two runs with their totals, and each difference, as data for programs."""
    graphs = []
    for one in found:
        modules = _modules(one)
        rows = [
            {"site": row.site, "module": modules.get(row.site, ""), "field": row.field}
            | {"a": row.left, "b": row.right}
            for row in one.rows
        ]
        graphs.append({"graph": one.name, "only_in": one.only_in.lower(), "differences": rows})
    return {"a": _totals(first), "b": _totals(right), "graphs": graphs}


def _totals(run: Run) -> dict[str, Any]:
    of = run.totals
    return {
        "run": run.first.run,
        "policy": run.policies,
        "profile": run.first.plan.profile,
        "sites": of.sites,
        "compressed": of.compressed,
        "bytes": of.bytes,
        "wire_bytes": of.wire_bytes,
        "sent_plain_bytes": run.sent.before,
        "sent_bytes": run.sent.after,
        "plain_us": of.plain_us,
        "predicted_us": of.predicted_us,
    }


# Differences by pattern. A collective that is split into chunks in one run is compared as a whole.


Sites = tuple[PlannedSite, ...]
"""A collective before any split, in one run: its site, or the sites into which it is split. ()
where a run does not have it."""


def wholes(plan: Plan) -> dict[str, Sites]:
    """Return the collectives of a plan by their original names."""
    of = {part: split.site for split in plan.split for part in split.into}
    found: dict[str, Sites] = {}
    for site in plan.sites:
        name = of.get(site.name, site.name)
        found[name] = (*found.get(name, ()), site)
    return found


Key = tuple[str, str, tuple[str, ...]]
"""The key of one line: pattern of modules, kind, and the changes as text."""


def changes_table(one: GraphPair) -> Table:
    """Return a table with a line for each pattern of sites with the same changes."""
    assert one.left is not None
    assert one.right is not None
    lefts, rights = wholes(one.left), wholes(one.right)
    lines: dict[Key, list[tuple[Sites, Sites]]] = {}
    for name in dict.fromkeys((*lefts, *rights)):
        a, b = lefts.get(name, ()), rights.get(name, ())
        if changed := changes(a, b):
            site = (*a, *b)[0]
            key = (without_numbers(site.module), site.kind, changed)
            lines.setdefault(key, []).append((a, b))
    table = plain_table("sites", "changed", "on the wire, all", "predicted, all", folded=HEADS)
    for (module, kind, changed), pairs in lines.items():
        modules = {each[0].module for pair in pairs for each in pair if each}
        name = module if len(modules) > 1 else modules.pop()
        what = f"{len(pairs)} {kind} of {name or 'the root module'}"
        texts = (what, "; ".join(changed), _two(pairs, "wire_bytes"), _two(pairs, "predicted_us"))
        table.add_row(*map(Text, texts))
    for row in one.rows:
        if row.site == "(graph)" and row.field != "split":  # the sites have those
            was, now = _often(row.left), _often(row.right)
            table.add_row(Text("the graph"), Text(f"{row.field}: {was} -> {now}"), "", "")
    return table


def _often(value: Any) -> str:
    """Return a list as text in which repeated entries are counted."""
    counted = Counter(str(value).split("; "))
    texts = (each + (f" (x {many})" if many > 1 else "") for each, many in counted.items())
    return "; ".join(texts) if value else "-"


HEADS = ("sites", "changed")


def changes(first: Sites, right: Sites) -> tuple[str, ...]:
    """Return the changes of one collective as text; () if there are none. Sums are in another
    column."""
    if not first or not right:
        return (f"only in {'A' if first else 'B'}",)
    found = []
    chunks = [len(first), len(right)]
    if chunks[0] != chunks[1]:
        found.append(f"chunks of rows {chunks[0]} -> {chunks[1]}")
    fields = [f for f in AGREED_FIELDS if f != "common_shape" or chunks[0] == chunks[1]]
    a, b = first[0], right[0]
    if a.compressed != b.compressed:
        found.append(f"{done(a)} -> {done(b)}")
        fields = [f for f in fields if f not in ("codec", "algorithm", "chunks", "lowering")]
    for field in fields:
        was, now = _common(first, field), _common(right, field)
        if was != now:
            found.append(f"{FIELD_LABELS.get(field, field)} {was or '-'} -> {now or '-'}")
    if not found:
        found = _forecasts(first, right)
    return tuple(found)


def _common(sites: Sites, field: str) -> str:
    """Return the common value of a field, or "several"."""
    values = {str(getattr(site, field)) for site in sites}
    return values.pop() if len(values) == 1 else "several"


def _forecasts(first: Sites, right: Sites) -> list[str]:
    """Return which predictions differ if the decisions are equal, without numbers."""
    changed = [
        FIELD_LABELS.get(field, field)
        for field in FORECASTS
        if [getattr(site, field) for site in first] != [getattr(site, field) for site in right]
    ]
    return [f"decided alike, with other {', '.join(changed)}"] if changed else []


def _two(pairs: Sequence[tuple[Sites, Sites]], field: str) -> str:
    """Return the sums of both runs, or of the one that has the sites."""
    sums = [
        sum(total(each, field) for each in side) for side in zip(*pairs, strict=True) if any(side)
    ]
    same = len(sums) == 2 and sums[0] == sums[1]
    return (amounts if field == "wire_bytes" else durations)(*(sums[:1] if same else sums))
