"""``report``: one HTML page about a run, or about several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli.app import app
from commpass.cli.arguments import load


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
