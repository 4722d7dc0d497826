"""``doctor``: what this installation can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli.app import app
from commpass.cli.arguments import Json
from commpass.errors import CommpassError
from commpass.report import doctor as checks_of
from commpass.report import tables


@app.command()
def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Test kernels, links and exchanges on this node's GPUs.")
    ] = False,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The profile that --gpu writes (.json).")
    ] = Path("cluster.json"),
    seconds: Annotated[
        float, typer.Option(min=1, help="About how long --gpu measures the links.")
    ] = 40.0,
    json: Json = False,
) -> None:
    """Show what this installation can do.

    The exit status is 1 if commpass cannot work here, if a test of --gpu fails, or if there is no
    GPU to test.

    It is 2 if COMMPASS_PROFILE names no profile.
    """
    if gpu:
        if why := checks_of.no_gpu_reason():
            if json:
                tables.print_json({"findings": [], "times": [], "profile": None, "why": why})
            else:
                typer.echo(why)
            raise typer.Exit(1)
        from commpass.report.doctor_gpu import run  # needs Triton

        raise typer.Exit(run(output, seconds, json=json))
    found = checks_of.checks()
    if json:
        tables.print_json(found)
    else:
        made = checks_of.table_of(found)
        tables.console_for(made).print(made)
    if any(check.needed and not check.ok for check in found):
        raise typer.Exit(1)
    if wrong := next((check.wrong for check in found if check.wrong), ""):
        raise CommpassError(wrong)
