"""``doctor``: what this installation can do."""

from __future__ import annotations

import typer

from commpass.cli.app import app
from commpass.cli.arguments import Json
from commpass.errors import CommpassError
from commpass.report import doctor as checks_of
from commpass.report import tables


@app.command()
def doctor(json: Json = False) -> None:
    """Show what this installation can do.

    The exit status is 1 if commpass cannot work here, 2 if COMMPASS_PROFILE names no profile.
    """
    found = checks_of.checks()
    if json:
        tables.print_json(found)
    else:
        made = checks_of.table_of(found)
        tables.console_for(made).print(made)
    if any(check.needed and not check.ok for check in found):
        raise typer.Exit(1)
    if wrong := next((check.wrong for check in found if check.wrong), ""):
        raise CommpassError(wrong)
