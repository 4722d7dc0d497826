"""``probe``: measure links and kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli.app import app
from commpass.cli.arguments import Json


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
    from commpass.report.probe import run

    run(output, seconds, kernels=kernels, plot=plot, json=json)
