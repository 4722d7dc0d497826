"""``simulate``: predict a step on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli import completion
from commpass.cli.app import app
from commpass.cli.arguments import Json


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
    profile: Annotated[
        str | None,
        typer.Option(help="A name, a .toml or .json file.", autocompletion=completion.profile),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A machine instead of a profile: dgx-h100.", autocompletion=completion.machine
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Their number; the mesh must have all GPUs.", min=1)
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A preset or .toml file; may be given again (default: off, lossless, balanced).",
            autocompletion=completion.policy,
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="A dimension of the mesh, gbit, intra_host_gbit or an argument of FUNCTION, and"
            " its values: tp=2,4,8."
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train/--inference", help="With or without backward.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the steps (.png).")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dump", metavar="DIR", help="Write plans and graphs, a run per policy."),
    ] = None,
    json: Json = False,
) -> None:
    """Predict a step of a model on a cluster that need not exist."""
    from commpass.report.simulate import run

    chosen = policy or ["off", "lossless", "balanced"]
    run(
        build,
        profile,
        mesh,
        chosen,
        sweep,
        cluster=cluster,
        nodes=nodes,
        train=train,
        plot=plot,
        dump=folder,
        json=json,
    )
