"""``codecs``: bits, errors and speed of codecs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli import completion
from commpass.cli.app import app
from commpass.cli.arguments import Json
from commpass.report import tables
from commpass.report.progress import progress


@app.command()
def codecs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CODEC]...",
            help="Codecs to measure (default: all).",
            autocompletion=completion.codec,
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE.safetensors|gaussian|laplace|student|outliers|gradients|tokens",
            help="The values that are encoded.",
        ),
    ] = "gaussian",
    dtype: Annotated[str, typer.Option(help="Dtype of the data; a file has its own.")] = "float32",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw error against bits.")
    ] = None,
    speed: Annotated[
        bool,
        typer.Option(
            "--speed/--no-speed", help="Compile and time each codec (takes seconds each)."
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Measure codecs: bits, error, distance to the bound 2^-b, speed."""
    from commpass.report import codecs as measurements
    from commpass.report.codec_plot import plot as draw

    tensors = measurements.tensors(data, dtype)
    rows: list[measurements.Measured] = []
    specs = names or measurements.STANDARD
    with progress("codecs") as show_progress:
        for spec in specs:
            show_progress(len(rows), len(specs), spec)
            rows.append(measurements.measure(spec, tensors, timed=speed))
    if json:
        tables.print_json(rows)
    else:
        made = measurements.table_of(rows)
        purposes = measurements.purposes_of(row.codec for row in rows)
        tables.console_for(made).print(made, "", purposes, sep="\n")
    if plot is not None:
        draw(rows, measurements.title_of(data), plot)
        typer.echo(f"wrote {plot}", err=json)
