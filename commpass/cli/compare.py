"""``compare``: the user's own command with commpass off and on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commpass.cli import completion
from commpass.cli.app import app
from commpass.cli.arguments import Json


@app.command(context_settings={"allow_interspersed_args": False})
def compare(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="What starts the program: torchrun --nproc-per-node 2 train.py",
            show_default=False,
        ),
    ],
    *,
    policies: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="Presets or .toml files, the first is the base. on: the policy of the program.",
            autocompletion=completion.policies,
        ),
    ] = "off,on",
    rounds: Annotated[
        int, typer.Option(min=1, help="How often the command runs under each policy, in turns.")
    ] = 3,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stop each run after so many counted steps (default: run to the end)."
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="How the output names a loss; its first group is the number: 'ppl=([0-9.]+)'.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write (.html).")
    ] = Path("compare.html"),
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep output, step times and dumps of each run here."),
    ] = None,
    json: Json = False,
) -> None:
    """Run a command with commpass off and on, in turns, and compare its steps.

    The program stays as it is: the policy is set in its environment.

    The exit status is 2 on an error, and 130 after Ctrl-C.
    """
    from commpass.report import compare as comparison

    chosen = comparison.policies_of(policies)
    how = comparison.Runs(command, chosen, rounds, steps, comparison.loss_pattern(loss))
    if status := comparison.run(how, output, keep, json=json):
        raise typer.Exit(status)
