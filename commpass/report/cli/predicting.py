"""``breakeven``, ``simulate`` and ``calibrate``: what would pay, before a job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.report.cli.app import app
from commpass.report.cli.arguments import Json


@app.command()
def breakeven(
    links: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LINK]...",
            help="Names (ethernet-25g, nvlink-4, ...), or profiles (.toml, .json).",
        ),
    ] = None,
    *,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,8,64",
    dtype: Annotated[str, typer.Option(help="Dtypes of the tensor.")] = "float32,bfloat16",
    kind: Annotated[str, typer.Option(help="The collective.")] = "all_reduce",
    policy: Annotated[str, typer.Option(help="A preset or .toml file.")] = "balanced",
    at: Annotated[str, typer.Option("--size", help="The tensor that is timed.")] = "16MiB",
    gpus: Annotated[bool, typer.Option("--gpus", help="Codecs run on GPUs, also here.")] = False,
    json: Json = False,
) -> None:
    """Predict from which size on compressing pays.

    By link, number of ranks and dtype. Needs no network.
    """
    from commpass.report import breakeven as table

    chosen = links or table.LINKS
    table.run(chosen, ranks, dtype, kind, policy, at, gpus=gpus, json=json)


@app.command()
def simulate(
    build: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="FUNCTION(mesh) gives a model, divided over the mesh, and its inputs.",
            show_default=False,
        ),
    ],
    mesh: Annotated[str, typer.Option(help="Sizes of the mesh by name: dp=8,tp=8.")],
    profile: Annotated[str, typer.Option(help="A name, a .toml or .json file.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A preset or .toml file; may be given again.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="A dimension of the mesh, gbit, inside_gbit or an argument of FUNCTION, and its"
            " values: tp=2,4,8."
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train/--inference", help="With or without backward.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the steps (.png).")] = None,
    json: Json = False,
) -> None:
    """Predict a step of a model on a cluster that is not there."""
    from commpass.report import simulated

    chosen = policy or ["off", "lossless", "balanced"]
    simulated.run(build, profile, mesh, chosen, sweep, train=train, plot=plot, json=json)


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
        Path | None, typer.Option("--from", help="Use what was measured before (.json).")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write what was measured (.json).")
    ] = None,
    codecs: Annotated[
        list[str] | None, typer.Option("--codec", help="A choice; may be given again.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="What holds where nothing was measured, and what is kept.")
    ] = "lossless",
    profile: Annotated[str | None, typer.Option(help="A name, a .toml or .json file.")] = None,
    cheapest: Annotated[str, typer.Option(help="What is made small: bytes or time.")] = "bytes",
    train: Annotated[
        bool, typer.Option("--train/--inference", help="With or without backward.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the sensitivities (.png).")] = None,
) -> None:
    """Measure which errors a model minds, and choose codecs by that.

    Run it on every rank, as torchrun does.
    """
    from commpass.report import calibrated

    calibrated.run(
        build,
        mesh,
        max_error,
        output,
        source=source,
        json=json,
        codecs=codecs or (),
        policy=policy,
        profile=profile,
        cheapest=cheapest,
        train=train,
        plot=plot,
    )
