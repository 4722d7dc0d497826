"""``explain``: the collectives of a dump, the decisions about them, and the reasons."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from commpass.cli.app import app
from commpass.cli.arguments import (
    CodecName,
    Direction,
    DumpPath,
    Every,
    Json,
    Kind,
    Module,
    RunName,
    load,
)
from commpass.plan.dump import Dump
from commpass.report import tables
from commpass.report.candidate_table import candidates, considered, refusals, title
from commpass.report.candidate_table import table_of as candidates_table
from commpass.report.explain import explain as explanation
from commpass.report.explain import to_json
from commpass.report.run import Run, slack_of_sites
from commpass.report.site_filter import SiteFilter, select
from commpass.report.sites_table import sites_table
from commpass.utils.printable import brief


@app.command()
def explain(
    path: DumpPath,
    *,
    why: Annotated[
        str | None,
        typer.Option(
            "--why",
            metavar="NAME",
            help="All candidates of a site, or of the sites of modules (a name or glob).",
        ),
    ] = None,
    every: Every = False,
    module: Module = None,
    kind: Kind = None,
    direction: Direction = None,
    codec: CodecName = None,
    run: RunName = None,
    json: Json = False,
) -> None:
    """Show the collectives of a dump, the decisions about them, and the reasons."""
    chosen = SiteFilter(module, kind, direction, codec)
    dumps = select(load(path, run), chosen)
    if why is not None:
        show_candidates(dumps, why, json)
        return
    if json:
        tables.print_json(to_json(dumps))
        return
    shown = [
        sites_table(one.plan.sites, wide=True, slack=slack_of_sites(one)) for one in dumps if every
    ]
    console = tables.console_for(*shown, full=False)
    if not chosen.everything:
        console.print(Text(f"only {chosen}", style="bold"))
    for part in explanation(Run(tuple(dumps)), console, every=every):
        console.print(part)


def show_candidates(dumps: list[Dump], name: str, json: bool) -> None:
    """Print the candidates of the sites of a name, best first."""
    found = considered(dumps, name)
    if json:
        rows = [
            {"graph": one.number, "site": site, "candidates": candidates(one, site)}
            for one, site in found
        ]
        tables.print_json(rows)
        return
    shown = [candidates_table(one, site) for one, site in found]
    console = tables.console_for(*shown, full=False)
    first: dict[tuple[object, ...], str] = {}  # of equal tables, as those of the chunks of a site
    for one, site in found:
        console.print(title(one, site))
        if one.plan.fallback:
            console.print(Text(f"The untouched graph was compiled: {one.plan.fallback}"), "")
            continue
        table_key = (one.number, tuple(candidates(one, site)), site.codec, site.reason)
        if (same := first.setdefault(table_key, site.name)) != site.name:
            console.print(Text(f"Its candidates are those of {same}."), "", sep="\n")
            continue
        console.print(candidates_table(one, site), "", Text(brief(site.reason)), "", sep="\n")
        if (table := refusals(one, site)).row_count:
            console.print(table, "")
