"""The command-line program: its global options, how it reports errors, and its output streams."""

from __future__ import annotations

import codecs
import errno
import io
import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from commpass.errors import CommpassError
from commpass.utils.printable import clean

ASCII = {"→": "->", "·": "-", "─": "-"}


class Commands(TyperGroup):
    """Every command tells an error of ours as one line, with exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CommpassError as error:
            typer.echo(f"commpass: {clean(' '.join(str(error).splitlines()))}", err=True)
            raise typer.Exit(2) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            typer.echo(f"commpass: the output cannot be written: {error.strerror}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"commpass {metadata.version('commpass')}")
        raise typer.Exit


@app.callback()
def commpass(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Show what commpass did to the collectives of a model, and why. Measure and predict.

    Dumps are written by backend(..., dump="folder") or COMMPASS_DUMP=folder.
    """


def spelled(error: UnicodeError) -> tuple[str, int]:
    """Return in ASCII the characters that an encoding lacks, and the position behind them."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(ASCII.get(sign, "?") for sign in missing), error.end


def print_whatever_the_encoding() -> None:
    """Let standard output and standard error take any text."""
    codecs.register_error("commpass.spelled", spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="commpass.spelled")
