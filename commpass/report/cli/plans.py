"""``explain``, ``diff`` and ``report``: what was decided, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from commpass.dump import Dump
from commpass.printable import brief
from commpass.report import compared, tables
from commpass.report.choice import Choice, only
from commpass.report.cli.app import app
from commpass.report.cli.arguments import (
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
from commpass.report.explained import explain as explanation
from commpass.report.explained import slack_of_sites, to_json
from commpass.report.why import candidates, considered, refusals, title
from commpass.report.why import table_of as candidates_table


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
    """Show the collectives, what was decided about them, and the reasons."""
    choice = Choice(module, kind, direction, codec)
    dumps = only(load(path, run), choice)
    if why is not None:
        show_candidates(dumps, why, json)
        return
    if json:
        plans = msgspec.json.encode(to_json(dumps))
        typer.echo(msgspec.json.format(plans, indent=1))
        return
    shown = [
        tables.sites_table(one.plan.sites, wide=True, slack=slack_of_sites(one))
        for one in dumps
        if every
    ]
    console = tables.console_for(*shown, full=False)
    if not choice.everything:
        console.print(Text(f"only {choice}", style="bold"))
    for part in explanation(dumps, console, every=every):
        console.print(part)


def show_candidates(dumps: list[Dump], name: str, json: bool) -> None:
    """What was considered for the sites of a name, best first."""
    found = considered(dumps, name)
    if json:
        rows = [
            {"graph": one.number, "site": site, "candidates": candidates(one, site)}
            for one, site in found
        ]
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=1))
        return
    shown = [candidates_table(one, site) for one, site in found]
    console = tables.console_for(*shown, full=False)
    for one, site in found:
        console.print(title(one, site))
        if one.plan.fallback:
            console.print(Text(f"The untouched graph was compiled: {one.plan.fallback}"), "")
            continue
        console.print(candidates_table(one, site), "", Text(brief(site.reason)), "", sep="\n")
        if (table := refusals(one, site)).row_count:
            console.print(table, "")


@app.command()
def diff(
    first: Annotated[
        Path, typer.Argument(metavar="DUMP_A", help="A dump folder, or one file of it.")
    ],
    right: Annotated[Path, typer.Argument(metavar="DUMP_B", help="The one to compare it with.")],
    *,
    every: Every = False,
    module: Module = None,
    kind: Kind = None,
    direction: Direction = None,
    codec: CodecName = None,
    left_run: Annotated[
        str | None, typer.Option("--run-a", metavar="ID", help="Which run of DUMP_A.")
    ] = None,
    right_run: Annotated[
        str | None, typer.Option("--run-b", metavar="ID", help="Which run of DUMP_B.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what two plans say differently.

    The exit status is 0 if nothing, 1 if something, 2 on an error.
    """
    a, b = load(first, left_run), load(right, right_run)
    found = compared.compared(a, b, Choice(module, kind, direction, codec))
    if json:
        told = compared.to_json(a, b, found)
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1))
    else:
        parts = list(compared.differences(found, every=every))
        console = tables.console_for(*parts, full=False)
        for part in (*compared.heads(a, b, (str(first), str(right))), *parts):
            console.print(part)
        if not found:
            console.print("no differences")
    if found:
        raise typer.Exit(1)


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="DUMP...", help="Dump folders, or files.", show_default=False),
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write (.html).")
    ] = Path("report.html"),
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TRACE",
            help="A step's trace by torch.profiler of the first run; again: of the next one.",
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="ID", help="Which run of one folder, or all. Again: more."),
    ] = None,
) -> None:
    """Write one HTML page about a run, or about several: then the first two are compared."""
    from commpass.report import html

    html.check(output)
    if names and len(paths) > 1:
        raise typer.BadParameter("picks runs of one DUMP, not of several", param_hint="--run")
    found = [(path, load(path, name)) for path in paths for name in names or (None,)]
    html.write(html.runs(found, measured or ()), output)
    typer.echo(f"wrote {output}")
