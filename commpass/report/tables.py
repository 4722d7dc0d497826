"""Tables and the console that prints them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from commpass.report.numbers import spans
from commpass.utils.printable import brief, clean_lines


def numbered(numbers: Mapping[str, Sequence[int]]) -> Table:
    """Return the texts, each after the numbers that it applies to."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=16, overflow="fold")
    table.add_column(overflow="fold")
    for text, which in numbers.items():
        table.add_row(Text(spans(which)), Text(brief(text)))
    return table


def plain_table(*headers: str, folded: Collection[str] = (), right: Collection[str] = ()) -> Table:
    """Return a table whose cells are never cut, since half a number reads as another one.

    The columns ``folded`` are free text, which may wrap. Those in ``right`` are justified so.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        justify: Literal["left", "right"] = "right" if header in right else "left"
        whole = header not in folded
        table.add_column(header, justify=justify, overflow="fold", no_wrap=whole)
    return table


def print_json(data: Any) -> None:
    """Print plain data, such as dataclasses, as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=1))


WIDE = 10_000
"""An upper bound for the width of tables."""


LEAST = 40
"""Width below which a table's columns would be one letter wide. The terminal wraps such lines
instead."""


class Harmless(Console):
    """A console that shows a dump's text without interpreting it.

    Escapes and other control characters become blanks.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            if part.control or part.text == "\n" or part.text.isprintable():
                yield part
            else:
                yield part._replace(text=clean_lines(part.text))


def console_for(*tables: RenderableType, full: bool = True) -> Console:
    """Return a console on stdout that is wide enough for the tables.

    In a file or a pipe, lines are as long as the tables need, unless COLUMNS is set. On a terminal
    that is too narrow, they are as long as what must stay ``full`` needs. They are never narrower
    than LEAST.
    """
    console = Harmless()
    for each in tables if full else ():
        if isinstance(each, Table):
            _keep_whole(each)
    sizes = [console.measure(each, options=_wide(console)) for each in tables]
    if not console.is_terminal and "COLUMNS" not in os.environ:
        needs = [each.maximum for each in sizes]
    else:
        needs = [each.minimum for each in sizes] if full else []
    console.width = max([console.width, LEAST, *needs])
    return console


def _keep_whole(table: Table) -> None:
    """Give columns that do not wrap room for their longest cell: rich uses the longest word."""
    for column in table.columns:
        if column.no_wrap:
            cells = (str(cell) for cell in (column.header, *column.cells))
            column.min_width = max(max(map(cell_len, each.split("\n"))) for each in cells)


def _wide(console: Console) -> ConsoleOptions:
    return console.options.update(width=WIDE, max_width=WIDE)
