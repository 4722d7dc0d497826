"""``probe`` and ``doctor``: what the machines here can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from commpass.errors import CommpassError
from commpass.report import doctor as checks_of
from commpass.report import tables
from commpass.report.cli.app import app
from commpass.report.cli.arguments import Json


@app.command()
def probe(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The profile to write (.json).")
    ] = Path("cluster.json"),
    seconds: Annotated[
        float, typer.Option(min=1, help="About how long to measure the links.")
    ] = 40.0,
    plot: Annotated[Path | None, typer.Option(help="Draw times and fits (.png).")] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Also compile and time codecs (takes a minute more).")
    ] = False,
    json: Json = False,
) -> None:
    """Measure links (and kernels), and write a profile.

    Run it on every rank, as torchrun does.
    """
    from commpass.report import probed

    probed.run(output, seconds, kernels=kernels, plot=plot, json=json)


@app.command()
def doctor(json: Json = False) -> None:
    """Show what this installation can do.

    The exit status is 1 if commpass cannot work here, 2 if COMMPASS_PROFILE names no profile.
    """
    found = checks_of.checks()
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=1))
    else:
        made = checks_of.table_of(found)
        tables.console_for(made).print(made)
    if any(check.needed and not check.ok for check in found):
        raise typer.Exit(1)
    if wrong := next((check.wrong for check in found if check.wrong), ""):
        raise CommpassError(wrong)
