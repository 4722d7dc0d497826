"""``diff``: how two plans differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from commpass.cli.app import app
from commpass.cli.arguments import (
    CodecName,
    Direction,
    Every,
    Json,
    Kind,
    Module,
    load,
)
from commpass.report import diff as differing
from commpass.report import tables
from commpass.report.site_filter import Choice


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
    found = differing.compared(a, b, Choice(module, kind, direction, codec))
    if json:
        told = differing.to_json(a, b, found)
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1))
    else:
        parts = list(differing.differences(found, every=every))
        console = tables.console_for(*parts, full=False)
        for part in (*differing.heads(a, b, (str(first), str(right))), *parts):
            console.print(part)
        if not found:
            console.print("no differences")
    if found:
        raise typer.Exit(1)
