"""``breakeven``: the size from which on compression is faster."""

from __future__ import annotations

from typing import Annotated

import typer

from commpass.cli import completion
from commpass.cli.app import app
from commpass.cli.arguments import Json


@app.command()
def breakeven(
    links: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LINK]...",
            help="Links or machines (ethernet-25g, dgx-h100), or profiles (.toml, .json).",
            autocompletion=completion.profile,
        ),
    ] = None,
    *,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,8,64",
    dtype: Annotated[str, typer.Option(help="Dtypes of the tensor.")] = "float32,bfloat16",
    kind: Annotated[
        str, typer.Option(help="The collective.", autocompletion=completion.kind)
    ] = "all_reduce",
    policy: Annotated[
        str, typer.Option(help="A preset or .toml file.", autocompletion=completion.policy)
    ] = "balanced",
    at: Annotated[str, typer.Option("--size", help="The tensor that is timed.")] = "16MiB",
    card: Annotated[str | None, typer.Option(help="The GPU that encodes: h100.")] = None,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Codecs run on the GPU of the profile.")
    ] = False,
    json: Json = False,
) -> None:
    """Predict from which size on compressing pays.

    By link, number of ranks and dtype. Needs no network.
    """
    from commpass.report.breakeven import LINKS, run

    run(links or LINKS, ranks, dtype, kind, policy, at, gpus=gpus, card=card, json=json)
