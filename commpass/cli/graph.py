"""``graph``: drawings of graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli.app import app
from commpass.cli.arguments import DumpPath, RunName, load, newest
from commpass.errors import CommpassError, nearest, unwritable
from commpass.report import tables
from commpass.report.graph import dot as drawings
from commpass.report.graph import nodes
from commpass.report.graph import text as boxes
from commpass.report.graph.fold import MANY
from commpass.report.graph.view import of_sites


@app.command()
def graph(
    path: DumpPath,
    *,
    number: Annotated[
        int | None,
        typer.Option("--graph", metavar="N", help="Which graph, by its number (default: newest)."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="One line a box (default).")] = False,
    dot: Annotated[bool, typer.Option("--dot", help="Graphviz source.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="A drawing; always a file.")] = False,
    level: Annotated[
        str,
        typer.Option(
            metavar="sites|nodes", help="One box a site (default), or one a node of the graph."
        ),
    ] = "sites",
    site: Annotated[
        str | None,
        typer.Option(metavar="N", help="One site, opened, and its surroundings: number or name."),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="The sites of these modules and their surroundings."),
    ] = None,
    expand: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE", help="Open this site's box: encode, exchange, decode."),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help=f"Repeated layers each (default: folded above {MANY} sites)."),
    ] = False,
    before: Annotated[bool, typer.Option("--before", help="The graph as it was found.")] = False,
    after: Annotated[
        bool, typer.Option("--after", help="The graph with coded operators (default).")
    ] = False,
    lowered: Annotated[
        bool, typer.Option("--lowered", help="The graph as it was compiled.")
    ] = False,
    radius: Annotated[
        str | None,
        typer.Option(
            "--around",
            metavar="K|all",
            help="Only what is within K arrows of a site (default: all; of --site, --module 1).",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.")
    ] = None,
    run: RunName = None,
) -> None:
    """Show a graph: its collectives, and what is computed between them."""
    if text + dot + svg > 1:
        raise typer.BadParameter("choose one of them", param_hint="--text/--dot/--svg")
    if before + after + lowered > 1:
        raise typer.BadParameter("choose one of them", param_hint="--before/--after/--lowered")
    if level not in ("sites", "nodes"):
        hint = nearest(level, ("sites", "nodes"))
        raise typer.BadParameter(f"{level!r} is no level{hint}", param_hint="--level")
    if level == "nodes" and (site, module, expand, every) != (None, None, None, False):
        raise typer.BadParameter(
            "are of the level sites; with --level nodes say --around K",
            param_hint="--site, --module, --expand and --all",
        )
    if radius not in (None, "all") and not radius.isdecimal():
        raise typer.BadParameter(
            f"{radius!r} is neither a number of arrows nor 'all'", param_hint="--around"
        )
    ending = ".svg" if svg else ".dot" if dot else ""
    if ending and output is not None and output.suffix.lower() != ending:
        what = "a drawing in SVG" if svg else "Graphviz source"
        raise typer.BadParameter(
            f"--{ending[1:]} writes {what}: {str(output)!r} must end in {ending}",
            param_hint="--output",
        )
    one, note = newest(load(path, run), number)
    side = "before" if before else "lowered" if lowered else "after"
    steps = None if radius in (None, "all") else int(radius)
    if level == "nodes" and not ending:
        written = nodes.text(one, side, steps)
        if output is None:
            typer.echo(written)
            typer.echo(note, err=True)
            return
    else:
        drawn = (
            nodes.picture(one, side, steps)
            if level == "nodes"
            else of_sites(
                one,
                side,
                module=module,
                site=site,
                expand=tuple(expand or ()),
                radius=steps,
                every=every,
            )
        )
        if not ending:
            console = tables.console_for(boxes.table_of(drawn), full=False)
            if output is None:
                console.print(boxes.text(drawn))
                typer.echo(note, err=True)
                return
            written = boxes.plain(drawn)
        else:
            written = drawings.svg(drawn) if svg else drawings.dot(drawn)
            if dot and output is None:
                typer.echo(written)
                typer.echo(note, err=True)
                return
    output = output or Path(f"graph-{one.number:04d}-{one.plan.direction}-{side}.svg")
    try:
        output.write_text(written.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise CommpassError(unwritable(output, error)) from error
    typer.echo(f"wrote {output}")
    typer.echo(note, err=True)
