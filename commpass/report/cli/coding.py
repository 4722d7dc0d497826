"""``codecs`` and ``lower``: what a codec costs, and what its kernels become."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from commpass.report import tables
from commpass.report.cli.app import app
from commpass.report.cli.arguments import Json, RunName


@app.command()
def codecs(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CODEC]...", help="Which (default: all named ones)."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE.safetensors|gaussian|laplace|student|outliers|gradients|tokens",
            help="What to encode.",
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
    from commpass.report import glosses, scatter, survey

    tensors = survey.tensors(data, dtype)
    rows = []
    specs = names or survey.STANDARD
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(specs))
        for spec in specs:
            progress.update(task, description=spec)
            rows.append(survey.measure(spec, tensors, timed=speed))
            progress.advance(task)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    else:
        made, words = survey.table_of(rows), glosses.table_of(row.codec for row in rows)
        tables.console_for(made).print(made, "", words, sep="\n")
    if plot is not None:
        scatter.plot(rows, f"codecs on {Path(data).name}", plot)
        typer.echo(f"wrote {plot}", err=json)


@app.command()
def lower(
    spec: Annotated[
        str | None, typer.Option("--codec", metavar="SPEC", help="The kernels of this codec.")
    ] = None,
    *,
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "encode, decode, decode_sum, decode_sum_encode or matmul_encode (default: all that"
                " there are)."
            ),
        ),
    ] = None,
    arch: Annotated[
        str, typer.Option(metavar="ARCH", help="sm_80, sm_90, sm_100 or gfx942.")
    ] = "sm_90",
    dtype: Annotated[str, typer.Option(help="Dtype of the values.")] = "bfloat16",
    ranks: Annotated[int, typer.Option(min=1, help="Rows that are summed.")] = 8,
    path: Annotated[
        Path | None,
        typer.Option("--dump", metavar="DIR", help="Those of a planned site in this dump."),
    ] = None,
    site: Annotated[str | None, typer.Option(metavar="NAME", help="The site's name.")] = None,
    run: RunName = None,
    triton: Annotated[bool, typer.Option("--triton", help="The kernel in Triton.")] = False,
    ptx: Annotated[
        bool, typer.Option("--ptx", help="The kernel in PTX, or AMD's assembly.")
    ] = False,
    sass: Annotated[bool, typer.Option("--sass", help="NVIDIA's machine code.")] = False,
    json: Json = False,
) -> None:
    """Show what a codec's kernels become on a GPU that need not be here.

    Registers, spills, memory accesses, and how near they can come to a copy.
    """
    from commpass.report import lowered

    chosen = [name for name, on in zip(lowered.TEXTS, (triton, ptx, sass), strict=True) if on]
    if len(chosen) + json > 1:
        raise typer.BadParameter("choose one of them", param_hint="--triton/--ptx/--sass/--json")
    asked = lowered.KernelQuery(spec, kernel, dtype, ranks, path, site, run)
    lowered.run(asked, arch, text="".join(chosen), json=json)
