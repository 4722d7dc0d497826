"""Arguments that several commands share, and the dumps that they refer to."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from commpass.cli import completion
from commpass.errors import CommpassError
from commpass.plan import dump
from commpass.plan.dump import Dump
from commpass.utils.printable import clean

DumpPath = Annotated[
    Path,
    typer.Argument(metavar="DUMP", help="A dump folder, or one file of it.", show_default=False),
]
RunName = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="ID",
        help="Which run of the folder, or all (default: newest).",
        autocompletion=completion.run,
    ),
]
Module = Annotated[
    str | None,
    typer.Option("--module", metavar="GLOB", help="Sites of these modules: layers.*.mlp."),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help="Sites of this kind: all_reduce.",
        autocompletion=completion.kind,
    ),
]
Direction = Annotated[
    str | None,
    typer.Option(
        "--direction",
        metavar="NAME",
        help="forward or backward.",
        autocompletion=completion.direction,
    ),
]
CodecName = Annotated[
    str | None,
    typer.Option(
        "--codec",
        metavar="CODEC",
        help="Sites with this codec (none: uncompressed).",
        autocompletion=completion.codec,
    ),
]
Every = Annotated[
    bool, typer.Option("--all", help="A line for each site (default: for each pattern).")
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


def load(path: Path, run: str | None) -> list[Dump]:
    """Return one run of a dump. If several exist and none is named, list the others on stderr."""
    dumps = dump.read_run(path, run)
    gc.freeze()  # a command ends soon: its data need no garbage collection
    if run is None and path.is_dir():
        runs = list(dict.fromkeys(dump.runs(path).values()))
        if len(runs) > 1:
            others = ", ".join(runs[:-1])
            note = (
                f"{path} has {len(runs)} runs; this is the newest, {runs[-1]}. --run picks:"
                f" {others}, or all (each backend and each integration of a program is a run)"
            )
            typer.echo(clean(note), err=True)
    return dumps


def newest(dumps: list[Dump], number: int | None) -> tuple[Dump, str]:
    """Return the graph of that number, by default the newest, and a note: which one it is, and the
    others if none was named."""
    one = dumps[-1] if number is None else pick(dumps, number)
    note = f"this is graph {one.number} ({one.plan.direction}) of run {one.run}"
    others = ", ".join(f"{each.number} ({each.plan.direction})" for each in dumps[:-1])
    if number is None and others:
        note += f", the newest of {len(dumps)}; --graph picks: {others}"
    return one, clean(note)


def pick(dumps: list[Dump], number: int) -> Dump:
    """Return the graph of that number."""
    known = ", ".join(f"{one.number} ({one.plan.direction})" for one in dumps)
    for one in dumps:
        if one.number == number:
            return one
    raise CommpassError(f"no graph {number} here; there are: {known}")
