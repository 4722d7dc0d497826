"""``diff``: how two plans differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli.app import app
from commpass.cli.arguments import CodecName, Direction, Every, Json, Kind, Module, load
from commpass.report import tables
from commpass.report.comparison import compared
from commpass.report.diff import differences, heads, to_json
from commpass.report.run import Run
from commpass.report.site_filter import SiteFilter


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
        str | None,
        typer.Option("--run-a", metavar="ID", help="Which run of DUMP_A (default: newest)."),
    ] = None,
    right_run: Annotated[
        str | None,
        typer.Option("--run-b", metavar="ID", help="Which run of DUMP_B (default: newest)."),
    ] = None,
    json: Json = False,
) -> None:
    """Show the differences between two plans.

    The exit status is 0 without differences, 1 with differences, and 2 on an error.
    """
    a = Run(tuple(load(first, left_run)), str(first))
    b = Run(tuple(load(right, right_run)), str(right))
    found = compared(a, b, SiteFilter(module, kind, direction, codec))
    if json:
        tables.print_json(to_json(a, b, found))
    else:
        parts = list(differences(found, every=every))
        console = tables.console_for(*parts, full=False)
        for part in (*heads(a, b), *parts):
            console.print(part)
        if not found:
            console.print("no differences")
    if found:
        raise typer.Exit(1)
