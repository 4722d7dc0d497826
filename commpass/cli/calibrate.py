"""``calibrate``: measure which errors a model tolerates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli import completion
from commpass.cli.app import app
from commpass.cli.arguments import Json


@app.command()
def calibrate(
    build: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="FUNCTION(mesh) gives a model, batches (tuples of its inputs), and maybe a loss.",
            show_default=False,
        ),
    ] = None,
    *,
    max_error: Annotated[
        float, typer.Option(help="Largest relative error of the gradients (inference: outputs).")
    ],
    mesh: Annotated[str | None, typer.Option(help="Sizes of the mesh by name: tp=2.")] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The policy to write (.toml).")
    ] = Path("calibrated.toml"),
    source: Annotated[
        Path | None, typer.Option("--from", help="Use earlier measurements (.json).")
    ] = None,
    measurements: Annotated[
        Path | None, typer.Option(help="Also write the measurements, for --from (.json).")
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            "--codec", help="A candidate codec; repeatable.", autocompletion=completion.codec
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="The policy for unmeasured sites; its keep rules apply.",
            autocompletion=completion.policy,
        ),
    ] = "lossless",
    profile: Annotated[
        str | None,
        typer.Option(help="A name, a .toml or .json file.", autocompletion=completion.profile),
    ] = None,
    cheapest: Annotated[str, typer.Option(help="What to minimize: bytes or time.")] = "bytes",
    train: Annotated[
        bool, typer.Option("--train/--inference", help="With or without backward.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the sensitivities (.png).")] = None,
    json: Json = False,
) -> None:
    """Measure how sensitive a model is to errors, and choose codecs accordingly.

    Run it on every rank, as torchrun does.
    """
    from commpass.report.calibrate import run

    run(
        build,
        mesh,
        max_error,
        output,
        source=source,
        measurements=measurements,
        codecs=codecs or (),
        policy=policy,
        profile=profile,
        cheapest=cheapest,
        train=train,
        plot=plot,
        json=json,
    )
