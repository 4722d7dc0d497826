"""``timeline``: drawings of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from commpass.cli.app import app
from commpass.cli.arguments import DumpPath, RunName, load, pick
from commpass.report import tables
from commpass.report import timeline as timelines
from commpass.report.measured_timeline import measured as measured_timelines


@app.command()
def timeline(
    path: DumpPath,
    *,
    number: Annotated[
        int | None, typer.Option("--graph", metavar="N", help="Which graph (default: all).")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="A step's trace by torch.profiler, of the same ranks (.json or .json.gz).",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write a .png or .html picture, or .json for ui.perfetto.dev (default: a table).",
        ),
    ] = None,
    run: RunName = None,
) -> None:
    """Show what a rank computes while exchanges are in flight, and where it waits."""
    dumps = load(path, run)
    times = measured_timelines(measured, dumps) if measured is not None else {}
    dumps = dumps if number is None else [pick(dumps, number)]
    shown = timelines.timelines(dumps, times)
    for line in timelines.left_out(dumps):
        typer.echo(line, err=True)
    if output is not None:
        timelines.write(shown, output)
        typer.echo(f"wrote {output}")
        return
    console = tables.console_for(*map(timelines.table, shown), full=False)
    for one in shown:
        for picture in one.pictures:
            console.print(Text(picture.title, style="bold"))
        console.print(timelines.table(one), "")
