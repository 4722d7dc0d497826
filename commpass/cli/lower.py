"""``lower``: the compiled GPU kernels of a codec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli.app import app
from commpass.cli.arguments import Json, RunName


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
        typer.Option("--dump", metavar="DIR", help="The kernels of a planned site in this dump."),
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
    """Compile a codec's kernels for a GPU that need not be present.

    Show registers, spills, memory accesses, and the predicted share of a copy's bandwidth.
    """
    from commpass.report import lower as kernels

    chosen = [name for name, on in zip(kernels.TEXTS, (triton, ptx, sass), strict=True) if on]
    if len(chosen) + json > 1:
        raise typer.BadParameter("choose one of them", param_hint="--triton/--ptx/--sass/--json")
    asked = kernels.KernelQuery(spec, kernel, dtype, ranks, path, site, run)
    kernels.run(asked, arch, text="".join(chosen), json=json)
