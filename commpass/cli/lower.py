"""``lower``: the compiled kernels of a codec, for GPUs and as C++ for CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli import completion
from commpass.cli.app import app
from commpass.cli.arguments import Json, RunName


@app.command()
def lower(
    spec: Annotated[
        str | None,
        typer.Option(
            "--codec",
            metavar="SPEC",
            help="The kernels of this codec.",
            autocompletion=completion.codec,
        ),
    ] = None,
    *,
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "encode, decode, decode_sum, decode_sum_encode or matmul_encode (default: all that"
                " there are), batched_matmul_encode, grouped_matmul_encode or decode_matmul."
            ),
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(metavar="ARCH", help="sm_80, sm_90, sm_100 or gfx942 (default: sm_90)."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the values.")] = "bfloat16",
    ranks: Annotated[int, typer.Option(min=1, max=1 << 20, help="Rows that are summed.")] = 8,
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
    cpp: Annotated[
        bool, typer.Option("--cpp", help="The kernel in C++, for this machine's CPU; no --arch.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the code to this file."),
    ] = None,
    json: Json = False,
) -> None:
    """Compile a codec's kernels for a GPU that need not be present, or for CPUs.

    Show registers, spills, memory accesses, and the predicted share of a copy's bandwidth.

    --cpp shows what a CPU runs: the C++ of commpass, or else that of Inductor.
    """
    from commpass.report import lower as kernels

    flags = (triton, ptx, sass, cpp)
    chosen = [name for name, on in zip(kernels.TEXTS, flags, strict=True) if on]
    if len(chosen) + json > 1:
        hint = "--triton/--ptx/--sass/--cpp/--json"
        raise typer.BadParameter("choose one of them", param_hint=hint)
    if output is not None and not chosen:
        raise typer.BadParameter(
            "writes code: choose --triton, --ptx, --sass or --cpp", param_hint="--output"
        )
    asked = kernels.KernelQuery(spec, kernel, dtype, ranks, path, site, run)
    if cpp:
        if arch is not None:
            raise typer.BadParameter(
                "is for GPUs; --cpp shows the code for this machine's CPU", param_hint="--arch"
            )
        kernels.show_cpp(asked, output)
        return
    named = "sm_90" if arch is None else arch
    kernels.run(asked, named, text="".join(chosen), json=json, output=output)
