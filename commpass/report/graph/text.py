"""Show a picture as a table: one line for each box, with the lines of those that it waits for."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from commpass.report.graph.picture import BOX_STYLES, Picture, in_order
from commpass.report.tables import WIDE, plain_table


def text(picture: Picture) -> RenderableType:
    """Return the title, the legend and the table."""
    return Group(
        Text(picture.title, style="bold"), Text(_legend(picture)), Text(), table_of(picture)
    )


def plain(picture: Picture) -> str:
    """Return the same as lines of plain text, as long as needed."""
    file = io.StringIO()
    Console(file=file, width=WIDE, no_color=True).print(text(picture))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def table_of(picture: Picture) -> Table:
    """Return the boxes in an order in which they may run.

    A number in brackets is a line that is reached through hidden boxes.
    """
    edges: dict[str, list[str]] = {box.name: [] for box in picture.boxes}
    for arrow in picture.arrows:
        edges[arrow.user].append(arrow.source)
    boxes = {box.name: box for box in picture.boxes}
    order = in_order(edges) or list(boxes)
    line = {name: str(at) for at, name in enumerate(order, 1)}
    after: dict[str, list[str]] = {name: [] for name in order}
    for arrow in picture.arrows:
        number = line[arrow.source]
        after[arrow.user].append(f"({number})" if arrow.hidden else number)
    table = plain_table("line", "", "what", "input lines", folded=("what", "input lines"))
    for name in order:
        box = boxes[name]
        label = " · ".join(box.lines)
        what = f"{box.cluster}: {label}" if box.cluster else label
        style = "green" if box.kind in ("compressed", "inserted") else ""
        cells = (line[name], BOX_STYLES[box.kind].mark, what, ", ".join(after[name]) or "-")
        table.add_row(*map(Text, cells), style=style)
    return table


def _legend(picture: Picture) -> str:
    legend = [
        f"{BOX_STYLES[kind].mark} {BOX_STYLES[kind].meaning}"
        for kind in picture.kinds
        if kind != "plain"
    ]
    if any(arrow.hidden for arrow in picture.arrows):
        legend.append("(n) by way of what is not shown")
    return "  ".join(legend)
